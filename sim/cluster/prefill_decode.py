"""Prefill and decode on servers of their own, and the way of the KV cache from one to the other.

A prefill server computes a prompt and samples the first token, which is when the user gets it.
The prompt's KV then travels over the prefill server's link, one request after the other, to a
decode server, which takes the request in with its prompt already computed. Not modelled: the
prefill server could reuse the blocks of a request before its KV has left, and a decode server
does not ask for less where it already holds a prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.core import ConfigError, KernelConfig, Prompt, Request, RequestId
from engine.core.plan import StepPlan
from engine.steplog.api import StepListener
from sim.cluster.clock import Clock
from sim.cluster.server import Server
from sim.cost.features import CostModel, StepFeatures
from sim.metrics.requests import Ledger
from sim.metrics.server_stats import ServerStats

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class KvLink:
    """Transfer of KV out of each GPU of a prefill server; its GPUs send side by side.

    With `layerwise` the KV of a layer leaves as soon as it is computed, so that a transfer goes on
    beside the prefill; the last layer's begins when the prompt is done.
    """

    bytes_per_s: float = 50e9
    latency_ns: int = 100_000
    layerwise: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_s < float("inf"):
            raise ConfigError("gb_per_s", self.bytes_per_s / 1e9, "must be above 0")
        if self.latency_ns < 0:
            raise ConfigError("latency_us", self.latency_ns / 1e3, "must not be negative")

    def busy_ns(self, num_bytes: int) -> int:
        """Time for which a transfer occupies the link."""
        return round(num_bytes / self.bytes_per_s * NS_PER_S)

    def end_ns(self, num_bytes: int, begun_ns: int, now_ns: int, free_ns: int, layers: int) -> int:
        """When a transfer has left the link.

        Its prefill began at `begun_ns` and has ended now; the link is free from `free_ns` on.
        """
        busy_ns = self.busy_ns(num_bytes)
        if not self.layerwise:
            return max(now_ns, free_ns) + busy_ns
        return max(max(begun_ns, free_ns) + busy_ns, now_ns + busy_ns // layers)


def decode_config(config: KernelConfig) -> KernelConfig:
    """The kernel of a decode server: its token budget bounds computing, which loaded KV is not."""
    budget = config.max_model_len * config.max_num_seqs
    return replace(config, max_num_batched_tokens=budget, long_prefill_token_threshold=0)


class PrefillServer(Server):
    """Ends every request after its first token; `on_prefilled(row)` takes it from there.

    A request that wants one token only is finished here.
    """

    def __init__(
        self,
        env: Clock,
        index: int,
        config: KernelConfig,
        cost: CostModel,
        ledger: Ledger,
        stats: ServerStats,
        on_finish: Callable[[int], None],
        on_prefilled: Callable[[int], None],
        log: StepListener | None = None,
        step_by_step: bool = False,
    ) -> None:
        super().__init__(env, index, config, cost, ledger, stats, on_finish, log, step_by_step)
        self._on_prefilled = on_prefilled
        # When the last of the transfers that have been asked for leaves the link.
        self.link_free_ns = 0

    def add(self, request: Request, row: int, first_output_id: int, num_outputs: int) -> None:
        """Takes a request at the present time.

        Raises:
            RequestRejected: it can never run; nothing has changed.
        """
        super().add(replace(request, max_tokens=1), row, first_output_id, 1)
        self._live[request.request_id].total_outputs = num_outputs

    def _finish(self, request_id: RequestId, time_ns: int, num_outputs: int) -> None:
        live = self._live[request_id]
        if live.total_outputs == 1:
            super()._finish(request_id, time_ns, num_outputs)
            return
        del self._live[request_id]
        self._num_sharers -= live.sharer
        self._clock.finished(request_id)
        self._prompt_tokens -= live.prompt_tokens
        self._output_tokens -= num_outputs
        self._ledger.handed_over(live.row, time_ns)
        self._on_prefilled(live.row)


class DecodeServer(Server):
    """Continues requests whose prompt was computed elsewhere.

    A request that is preempted here has lost its KV and is recomputed here, in one chunk.
    """

    def __init__(
        self,
        env: Clock,
        index: int,
        config: KernelConfig,
        cost: CostModel,
        ledger: Ledger,
        stats: ServerStats,
        on_finish: Callable[[int], None],
        log: StepListener | None = None,
        step_by_step: bool = False,
    ) -> None:
        super().__init__(env, index, config, cost, ledger, stats, on_finish, log, step_by_step)
        self._loaded: set[RequestId] = set()

    def receive(
        self, request: Request, row: int, first_output_id: int, first_token_ns: int
    ) -> None:
        """Takes a request whose first token is known and whose prompt's KV has arrived."""
        first = range(first_output_id, first_output_id + 1)
        prompt = Prompt.from_spans([*request.prompt.spans, first])
        left = request.max_tokens - 1
        self._loaded.add(request.request_id)
        self._clock.resume(request.request_id, first_token_ns)
        super().add(
            replace(request, prompt=prompt, max_tokens=left), row, first_output_id + 1, left
        )

    def _features(self, plan: StepPlan) -> StepFeatures:
        features = super()._features(plan)
        self._loaded.difference_update(plan.preempted)
        if not self._loaded or not plan.chunks:
            return features
        chunks = []
        for chunk in plan.chunks:
            first, num_tokens = chunk.first_position, chunk.num_tokens
            if chunk.request_id in self._loaded:
                # Only the first token, which came without KV, is computed.
                self._loaded.discard(chunk.request_id)
                first, num_tokens = first + num_tokens - 1, 1
            chunks.append((first, num_tokens))
        return replace(features, chunks=tuple(chunks))

    def _finish(self, request_id: RequestId, time_ns: int, num_outputs: int) -> None:
        row = self._live[request_id].row
        super()._finish(request_id, time_ns, num_outputs)
        self._ledger.output_tokens[row] += 1  # the first token was another server's
