"""Token ids that a server accepts, for the lazy ids of a workload; equal stays equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from engine.core.tokens import Prompt
from sim.workloads.table import answered_row


class PromptMaker:
    """Ids from `first_id` on, below `vocab_size`: a hash of each id of the workload.

    Prefixes that rows of the workload share are shared here, and no others (but by chance: two
    blocks of 16 tokens are equal once in vocab_size ** 16). Answers of earlier turns are what the
    server gave, where it said.
    """

    def __init__(self, vocab_size: int, seed: int = 0, first_id: int = 1000) -> None:
        first_id = min(first_id, vocab_size // 2)
        self._first_id, self._num_ids = first_id, vocab_size - first_id
        self._seed = seed

    def ids(self, prompt: Prompt, answers: Mapping[int, Sequence[int]]) -> list[int]:
        """The prompt for the server; `answers` are those of earlier rows."""
        found: list[int] = []
        for span in prompt.spans:
            row = answered_row(span) if isinstance(span, range) else None
            given = answers.get(row) if row is not None else None
            if given is not None and len(given) >= len(span):
                found.extend(given[: len(span)])
            else:
                found.extend(self._hashed(np.asarray(span, dtype=np.uint64)))
        return found

    def _hashed(self, ids: np.ndarray) -> list[int]:
        """SplitMix64 of each id."""
        with np.errstate(over="ignore"):
            mixed = ids + np.uint64(0x9E3779B97F4A7C15) * np.uint64(self._seed + 1)
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            mixed ^= mixed >> np.uint64(31)
        places: list[int] = (mixed % np.uint64(self._num_ids) + np.uint64(self._first_id)).tolist()
        return places
