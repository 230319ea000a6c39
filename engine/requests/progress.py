"""The progress bar of one call, with the rates of prefill and decode."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from engine.core.request import RequestId
from engine.requests.committed_step import CommittedStep

_REFRESH_NS = 200_000_000


class Progress:
    """Counts a call's own requests and the tokens per kind of step; silent unless enabled."""

    def __init__(self, request_ids: Sequence[RequestId], enabled: bool) -> None:
        self._own = frozenset(request_ids)
        self._bar: Any = None
        if enabled:
            from tqdm import tqdm

            self._bar = tqdm(
                total=len(self._own), desc="generating", unit="req", dynamic_ncols=True
            )
        self._prefill = [0, 0]  # tokens, ns
        self._decode = [0, 0]
        self._since_refresh_ns = 0

    def count(self, step: CommittedStep) -> None:
        """Books a step; a mixed step counts as prefill."""
        if self._bar is None:
            return
        counter = self._prefill if step.plan.chunks else self._decode
        counter[0] += step.plan.num_tokens
        counter[1] += step.duration_ns
        ended = sum(end.request_id in self._own for end in step.outcome.finished)
        if ended:
            self._bar.update(ended)
        self._since_refresh_ns += step.duration_ns
        if self._since_refresh_ns >= _REFRESH_NS:
            self._since_refresh_ns = 0
            self._show()

    def _show(self) -> None:
        rates = {
            name: f"{tokens * 1e9 / max(1, time_ns):,.0f} tok/s"
            for name, (tokens, time_ns) in (("prefill", self._prefill), ("decode", self._decode))
        }
        self._bar.set_postfix(rates, refresh=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._show()
            self._bar.close()
