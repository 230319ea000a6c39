"""The fewest lists that reach what all reach: arcs of the kernel's code, and about how often."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from types import FrameType
from typing import Any

from properties.fuzzing.lists import decode
from properties.search.run import run_workload

Arc = tuple[str, int, int]  # function, line before, line
_KERNEL = "engine/core/"


class _Arcs:
    """Counts the arcs that a run takes."""

    def __init__(self) -> None:
        self.counts: Counter[Arc] = Counter()

    def called(self, frame: FrameType, event: str, argument: object) -> Any:  # noqa: ANN401
        """For every call: follows the kernel's own."""
        if _KERNEL not in frame.f_code.co_filename:
            return None
        name, before = f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}", 0

        def stepped(frame: FrameType, event: str, argument: object) -> Any:  # noqa: ANN401
            nonlocal before
            if event == "line":
                self.counts[name, before, frame.f_lineno] += 1
                before = frame.f_lineno
            return stepped

        return stepped


def features(line: bytes) -> set[tuple[Arc, int]]:
    """Arcs of a list's run, each with the order of magnitude of its count."""
    arcs = _Arcs()
    workload = decode(line)
    sys.settrace(arcs.called)
    try:
        run_workload(workload, thorough=False)
    finally:
        sys.settrace(None)
    return {(arc, count.bit_length()) for arc, count in arcs.counts.items()}


def fewest(lines: Iterable[bytes]) -> list[bytes]:
    """Short lists first: each one that reaches something new stays."""
    reached: set[tuple[Arc, int]] = set()
    kept = []
    for line in sorted(set(lines), key=lambda line: (len(line), line)):
        found = features(line)
        if not found <= reached:
            reached |= found
            kept.append(line)
    return kept
