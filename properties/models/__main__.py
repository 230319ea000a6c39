"""`python -m properties.models`: checks the model, replays it on the kernel, writes the record.

Needs Spin and a C compiler. Exit 0: all held; 1: an error, or a planted defect that was not found;
2: a tool is missing. `--quick` leaves the largest scope and the files in the repository alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from properties.models import spin
from properties.models.calls import Call
from properties.models.replay import Scope, replay, replay_graph

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "properties" / "records" / "model.json"
TRACES = Path(__file__).parent / "traces.json"
WORK = ROOT / "out" / "model"
SMALL = Scope(requests=2, blocks=3, most_prompt=4, most_output=3, seats=2, budget=3)
LARGE = Scope(requests=3, blocks=3, most_prompt=4, most_output=3, seats=2, budget=3)
DEFECTS = {
    1: "a plan of void entries runs after the plan behind it",
    2: "discard: the second plan's keys stay",
    3: "discard: the second plan's requests live on",
    4: "a request is served past its known end",
    5: "keys for blocks with a pending token",
    6: "the token in flight of a preempted request is lost",
}


class Paths:
    """Picks from the graph the first run to every kind of call: its name and what it met."""

    def __init__(self) -> None:
        self.picked: list[list[Call]] = []
        self._path: list[Call] = []
        self._seen: set[tuple[object, ...]] = set()

    def watch(self, calls: Iterable[Call]) -> Iterator[Call]:
        """Hands the calls on."""
        for call in calls:
            while self._path and self._path[-1].depth >= call.depth:
                self._path.pop()
            self._path.append(call)
            reasons = tuple(end.reason for end in call.ended)
            kind = (call.name, tuple(sorted(set(call.met))), reasons, call.after.open)
            if kind not in self._seen:
                self._seen.add(kind)
                self.picked.append([*self._path])
            yield call


def main(words: list[str] | None = None) -> int:
    """Everything, in a few minutes."""
    parser = argparse.ArgumentParser(prog="properties.models", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(words).quick
    if missing := spin.tools_missing():
        print(
            f"not found: {', '.join(missing)} (Debian: apt-get install spin gcc)", file=sys.stderr
        )
        return 2
    checks = {}
    for name, scope in {"small": SMALL, **({} if quick else {"large": LARGE})}.items():
        found = spin.check(WORK, scope)
        checks[name] = {"scope": asdict(scope), **found.to_json()}
        print(f"{name}: {found}")
    canaries = {DEFECTS[number]: spin.check(WORK, SMALL, number).to_json() for number in DEFECTS}
    for defect, result in canaries.items():
        print(f"planted, {defect}: {result['violated'] or 'NOT FOUND'}")
    witnesses = {event: spin.witness(WORK, SMALL, event) for event in spin.events()}
    started, paths = time.perf_counter(), Paths()
    num_calls = replay_graph(SMALL, paths.watch(spin.graph(WORK, SMALL)))
    seconds = round(time.perf_counter() - started, 1)
    print(f"replayed on the kernel: {num_calls} calls in {seconds} s")
    traces = [trace for trace in witnesses.values() if trace] + paths.picked
    for trace in traces:
        replay(SMALL, trace)
    print(f"traces: {len(traces)}; never met: {[e for e, trace in witnesses.items() if not trace]}")
    if not quick:
        _write(traces)
        RECORD.write_text(
            json.dumps(
                {
                    "command": "python -m properties.models",
                    "tool": spin.spin_version(),
                    "model": model_hash(),
                    "invariants": "every assert of async_kernel.pml, and <> FINISHED",
                    "checks": checks,
                    "planted": canaries,
                    "replayed_calls": num_calls,
                    "replay_seconds": seconds,
                },
                indent=1,
            )
            + "\n"
        )
    wrong = [name for name, result in checks.items() if result["errors"]]
    wrong += [defect for defect, result in canaries.items() if not result["errors"]]
    return 1 if wrong else 0


def _write(traces: list[list[Call]]) -> None:
    """One trace per line, so that a changed one is one changed line."""
    lines = ",\n".join(
        json.dumps([call.to_json() for call in trace], separators=(",", ":")) for trace in traces
    )
    scope = json.dumps(asdict(SMALL))
    TRACES.write_text(f'{{"model": "{model_hash()}", "scope": {scope}, "traces": [\n{lines}\n]}}\n')


def model_hash() -> str:
    """Of the model's text: traces of another model are noticed."""
    text = b"".join((spin.FOLDER / name).read_bytes() for name in spin.FILES)
    return hashlib.sha256(text).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
