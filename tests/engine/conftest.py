"""Without a GPU, Triton kernels run in its interpreter; it must be told before its first import."""

import os

# Asked without torch, whose import takes longer than most tests.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
