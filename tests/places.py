"""Where the tests find the repository and, if it is there, the material shared beside it."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("LOCKSTEP_SHARED", REPOSITORY.parent / "shared"))
