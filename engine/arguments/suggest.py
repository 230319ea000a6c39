"""What was probably meant by a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LEAST_LIKENESS = 0.65


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant: one that `name` contains before a similar one."""
    names = list(known)
    folded = name.lower().replace("_", "-")
    contained = [one for one in names if len(one) > 4 and one.replace("_", "-") in folded]
    if contained:
        return max(contained, key=len)
    by_folded = {one.lower().replace("_", "-"): one for one in names}
    close = difflib.get_close_matches(folded, by_folded, 1, _LEAST_LIKENESS)
    return by_folded[close[0]] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message: `; did you mean 'x'?`, or nothing."""
    found = nearest(name, known)
    return f"; did you mean {found!r}?" if found else ""


def one_of(name: object, known: Iterable[str]) -> str:
    """The limit of a choice: all words, and the one that was probably meant."""
    names = list(known)
    return f"must be one of {', '.join(names)}{did_you_mean(str(name), names)}"
