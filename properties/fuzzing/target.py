"""What libFuzzer runs: `python -m properties.fuzzing.target` with its options. Needs Atheris.

The kernel is imported in here for the first time, so that its code can be watched. Nothing is
imported with the module itself, as Atheris is there only with the extra `fuzz`.
"""

from __future__ import annotations

import sys
from random import Random


def main() -> None:
    """Fuzzes until libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["engine.core"]):
        from properties.fuzzing.lists import corpus, decode, encode, mutated
        from properties.search.run import run_workload

    known = [decode(line) for line in corpus()]

    def one_list(data: bytes) -> int:
        """Runs a list with all laws on; an alarm is libFuzzer's crash."""
        try:
            workload = decode(data)
        except Exception:  # no list at all: not worth keeping
            return -1
        run_workload(workload)
        return 0

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        """A neighbour of a list."""
        rng = Random(seed)
        try:
            changed = encode(mutated(decode(data), rng, rng.choice(known)))
        except Exception:  # no list, or a change that makes no configuration
            changed = encode(rng.choice(known))
        return changed if len(changed) <= most else data

    atheris.Setup(sys.argv, one_list, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
