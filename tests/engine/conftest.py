"""Without a GPU, Triton kernels run in its interpreter; it must be told before its first import."""

import os
from pathlib import Path

import pytest

# Asked without torch, whose import takes longer than most tests.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory) -> Path:
    """SmolLM2 in float32, unpacked once for all tests."""
    from engine.commands import model_smollm2 as smollm2

    pytest.importorskip("gguf")
    try:
        smollm2.find_gguf()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    out = tmp_path_factory.mktemp("smollm2") / "model"
    assert smollm2.main(["--out", str(out), "--dtype", "float32"]) == 0
    return out
