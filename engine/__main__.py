"""`python -m engine`: the same as `lockstep`."""

import sys

from engine.cli import main

sys.exit(main())
