"""`python -m properties.fuzzing`: lets libFuzzer grow the corpus for some time, with all laws on.

Needs the extra `fuzz` (Atheris). An alarm is written to `out/fuzzing` and ends the run; `--merge`
keeps of all lists the fewest that reach the same code, as the corpus that the default tests replay.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from properties.fuzzing.fewest import fewest
from properties.fuzzing.lists import CORPUS, corpus

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "out" / "fuzzing"


def _spread(lines: list[bytes], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, line in enumerate(lines):
        (folder / f"kept-{number}").write_bytes(line)
    return folder


def _child(*arguments: str) -> int:
    command = [sys.executable, "-m", "properties.fuzzing.target", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ}, check=False).returncode


def main() -> int:
    """Grows the corpus, or cuts it down."""
    parser = argparse.ArgumentParser(prog="python -m properties.fuzzing")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--merge", action="store_true", help="renew the corpus from all lists")
    args = parser.parse_args()
    grown = _spread(corpus(), OUT / "lists")
    limits = ["-max_len=20000", "-rss_limit_mb=4000", "-timeout=60"]
    if not args.merge:
        time = [f"-max_total_time={args.seconds}", f"-seed={args.seed}", "-print_final_stats=1"]
        return _child(*limits, *time, f"-artifact_prefix={OUT}/alarm-", str(grown))
    lines = fewest([path.read_bytes() for path in sorted(grown.iterdir())])
    CORPUS.write_bytes(b"".join([line + b"\n" for line in lines]))
    print(f"{len(lines)} lists kept in {CORPUS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
