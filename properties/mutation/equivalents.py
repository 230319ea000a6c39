"""Mutants that change nothing, each with the reason; kept beside the suite and not as pragmas.

A pragma switches off a whole line with all its other mutants. Here the exact change is named: the
line before and after, without indentation. A change that is not listed and survives is a hole.
"""

from __future__ import annotations

# (line before, line after) -> why nobody can tell them apart
EQUIVALENT: dict[tuple[str, str], str] = {
    (
        "self._aborting[request_id] = None",
        'self._aborting[request_id] = ""',
    ): "the dict is an ordered set: its values are never read",
    (
        "if num_steps > 1:",
        "if num_steps >= 1:",
    ): "with one step the loop inside is empty, and a run without steps books nothing",
    (
        "step = self._begin_step(tokens_open=False)",
        "step = self._begin_step(tokens_open=None)",
    ): "only the truth of the flag is read",
    (
        "step = self._begin_step(tokens_open=False)",
        "step = self._begin_step(tokens_open=True)",
    ): "keys then come with the commit of the same step, before anybody looks for one",
}


def parse_diff(diff: str) -> tuple[str, str]:
    """The changed lines of a unified diff, joined, without indentation."""
    before, after = [], []
    for line in diff.splitlines():
        if line.startswith("-") and not line.startswith("---"):
            before.append(line[1:].strip())
        elif line.startswith("+") and not line.startswith("+++"):
            after.append(line[1:].strip())
    return " ".join(before), " ".join(after)
