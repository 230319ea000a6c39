"""`python -m properties`: the same as `lockstep verify`."""

import sys

from engine.cli import main

sys.exit(main(["verify", *sys.argv[1:]]))
