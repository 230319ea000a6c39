"""`python -m golden`: the same as `lockstep golden`."""

import sys

from engine.cli import main

sys.exit(main(["golden", *sys.argv[1:]]))
