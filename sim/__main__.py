"""`python -m sim`: the same as `lockstep sim`."""

import sys

from engine.cli import main

sys.exit(main(["sim", *sys.argv[1:]]))
