"""The numbers of one server: what steps and requests add, under vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest

from engine.server.messages import Delta, GenerateRequest, StepStats
from engine.server.metrics import buckets
from engine.server.metrics.families import Families
from engine.server.protocol import ModelInfo

REASONS = ("stop", "length", "abort", "error")
NS_PER_S = 1e9


@dataclass(slots=True)
class RequestTimes:
    """The moments of one request, as its deltas tell them."""

    request: GenerateRequest
    n: int = 1
    engine: int = 0
    scheduled_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0


class EngineMetrics:
    """The families of one engine (replica), with their labels filled in."""

    def __init__(self, parent: ServerMetrics, engine: int) -> None:
        labels = (parent.model_name, str(engine))
        self.running = parent.running.at(*labels)
        self.waiting = parent.waiting.at(*labels)
        self.waiting_capacity = parent.waiting_by_reason.at(*labels, "capacity")
        parent.waiting_by_reason.at(*labels, "deferred")
        self.kv_usage = parent.kv_usage.at(*labels)
        self.lag = None if parent.lag is None else parent.lag.at(*labels)
        self.queries = parent.queries.at(*labels)
        self.hits = parent.hits.at(*labels)
        self.preemptions = parent.preemptions.at(*labels)
        self.prompt_tokens = parent.prompt_tokens.at(*labels)
        self.cached_tokens = parent.cached_tokens.at(*labels)
        self.computed_source = parent.by_source.at(*labels, "local_compute")
        self.cached_source = parent.by_source.at(*labels, "local_cache_hit")
        self.generation_tokens = parent.generation_tokens.at(*labels)
        self.success = {reason: parent.success.at(*labels, reason) for reason in REASONS}
        self.step_tokens = parent.step_tokens.at(*labels)
        self.request_prompt_tokens = parent.request_prompt_tokens.at(*labels)
        self.request_generation_tokens = parent.request_generation_tokens.at(*labels)
        self.max_generation_tokens = parent.max_generation_tokens.at(*labels)
        self.params_n = parent.params_n.at(*labels)
        self.params_max_tokens = parent.params_max_tokens.at(*labels)
        self.ttft = parent.ttft.at(*labels)
        self.itl = parent.itl.at(*labels)
        self.tpot = parent.tpot.at(*labels)
        self.e2e = parent.e2e.at(*labels)
        self.queue = parent.queue.at(*labels)
        self.inference = parent.inference.at(*labels)
        self.prefill = parent.prefill.at(*labels)
        self.decode = parent.decode.at(*labels)
        self.num_preemptions = parent.num_preemptions.at(*labels)
        self.prefill_computed = parent.prefill_computed.at(*labels)


class ServerMetrics:
    """All metrics of one server.

    A family of vLLM's that is not here has no counterpart: nothing is reported as 0 that is not
    measured.
    """

    def __init__(self, info: ModelInfo, model_name: str) -> None:
        self.model_name = model_name
        self._families = Families(("model_name", "engine"))
        self._make_gauges_and_counters()
        self._make_histograms(buckets.token_counts(info.max_model_len))
        self._make_own(info)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._families)
        self._registry.register(self._shared)
        self._engines = [EngineMetrics(self, engine) for engine in range(info.num_engines)]

    def text(self) -> bytes:
        """What a scrape gets."""
        return generate_latest(self._registry)

    # What happens ------------------------------------------------------------------------------

    def step(self, stats: StepStats) -> None:
        """Books one step of one engine."""
        engine = self._engines[stats.engine]
        engine.running.value = stats.num_running
        engine.waiting.value = stats.num_waiting
        engine.waiting_capacity.value = stats.num_waiting
        engine.kv_usage.value = stats.kv_cache_usage
        if engine.lag is not None:
            engine.lag.value = stats.lag_ns / NS_PER_S
        engine.queries.add(stats.prefix_cache_queries)
        engine.hits.add(stats.prefix_cache_hits)
        engine.preemptions.add(stats.num_preemptions)
        engine.prompt_tokens.add(stats.num_prompt_tokens)
        engine.cached_tokens.add(stats.num_cached_tokens)
        engine.cached_source.add(stats.num_cached_tokens)
        engine.computed_source.add(stats.num_prompt_tokens - stats.num_cached_tokens)
        engine.generation_tokens.add(stats.num_generation_tokens)
        if stats.num_step_tokens:
            engine.step_tokens.observe(stats.num_step_tokens)

    def tokens(self, times: RequestTimes, deltas: Sequence[Delta], now_ns: int) -> None:
        """Books the tokens of one request, as they reach the front end."""
        times.engine = deltas[0].engine
        engine = self._engines[times.engine]
        for delta in deltas:
            times.num_preemptions = max(times.num_preemptions, delta.num_preemptions)
            if not delta.token_ids:
                continue
            if times.first_token_ns is None:
                times.first_token_ns = delta.time_ns
                times.scheduled_ns = delta.scheduled_ns
                times.num_cached_tokens = delta.num_cached_tokens or 0
                engine.ttft.observe((now_ns - times.request.arrival_ns) / NS_PER_S)
            elif times.last_token_ns is not None:
                engine.itl.observe((delta.time_ns - times.last_token_ns) / NS_PER_S)
            times.last_token_ns = delta.time_ns
            times.num_tokens += len(delta.token_ids)

    def ended(self, times: RequestTimes, reason: str, now_ns: int) -> None:
        """Books the end of one request."""
        engine = self._engines[times.engine]
        engine.success[reason].add(1)
        request = times.request
        engine.e2e.observe((now_ns - request.arrival_ns) / NS_PER_S)
        num_prompt_tokens = len(request.prompt_token_ids)
        engine.request_prompt_tokens.observe(num_prompt_tokens)
        engine.request_generation_tokens.observe(times.num_tokens)
        engine.params_n.observe(times.n)
        engine.max_generation_tokens.observe(times.num_tokens)
        if request.max_tokens is not None:
            engine.params_max_tokens.observe(request.max_tokens)
        engine.num_preemptions.observe(times.num_preemptions)
        first, last, scheduled = times.first_token_ns, times.last_token_ns, times.scheduled_ns
        if first is None or last is None or scheduled is None:
            return
        engine.prefill_computed.observe(num_prompt_tokens - times.num_cached_tokens)
        engine.queue.observe((scheduled - request.arrival_ns) / NS_PER_S)
        engine.prefill.observe((first - scheduled) / NS_PER_S)
        engine.inference.observe((last - scheduled) / NS_PER_S)
        engine.decode.observe((last - first) / NS_PER_S)
        if times.num_tokens > 1:
            per_token = (last - first) / NS_PER_S / (times.num_tokens - 1)
            engine.tpot.observe(per_token)

    def refused(self, reason: str, count: int) -> None:
        """Books requests that a full queue turned away."""
        self._refused.at(self.model_name, reason).add(count)

    # Families ----------------------------------------------------------------------------------

    def _make_gauges_and_counters(self) -> None:
        gauge, counter = self._families.gauge, self._families.counter
        self.running = gauge("vllm:num_requests_running", "Requests in execution batches.")
        self.waiting = gauge("vllm:num_requests_waiting", "Requests waiting to be processed.")
        self.waiting_by_reason = gauge(
            "vllm:num_requests_waiting_by_reason", "Waiting requests by reason.", "reason"
        )
        self.kv_usage = gauge("vllm:kv_cache_usage_perc", "KV-cache usage, 1 means 100 percent.")
        self.queries = counter("vllm:prefix_cache_queries", "Queried tokens of the prefix cache.")
        self.hits = counter("vllm:prefix_cache_hits", "Cached tokens that were found.")
        self.preemptions = counter("vllm:num_preemptions", "Preemptions.")
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prefill tokens processed.")
        self.by_source = counter(
            "vllm:prompt_tokens_by_source", "Prompt tokens by source.", "source"
        )
        self.cached_tokens = counter("vllm:prompt_tokens_cached", "Cached prompt tokens.")
        self.generation_tokens = counter("vllm:generation_tokens", "Generation tokens processed.")
        self.success = counter("vllm:request_success", "Requests that ended.", "finished_reason")

    def _make_histograms(self, token_counts: Sequence[float]) -> None:
        histogram = self._families.histogram
        self.request_prompt_tokens = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", token_counts
        )
        self.request_generation_tokens = histogram(
            "vllm:request_generation_tokens", "Output tokens of a request.", token_counts
        )
        self.step_tokens = histogram(
            "vllm:iteration_tokens_total", "Tokens of a step.", buckets.ITERATION_TOKENS
        )
        self.max_generation_tokens = histogram(
            "vllm:request_max_num_generation_tokens", "Longest output of a request.", token_counts
        )
        self.params_n = histogram(
            "vllm:request_params_n", "The parameter n.", buckets.REQUEST_PARAMS_N
        )
        self.params_max_tokens = histogram(
            "vllm:request_params_max_tokens", "The parameter max_tokens.", token_counts
        )
        self.num_preemptions = histogram(
            "vllm:request_num_preemptions",
            "Preemptions of a request.",
            buckets.REQUEST_NUM_PREEMPTIONS,
        )
        self.prefill_computed = histogram(
            "vllm:request_prefill_kv_computed_tokens",
            "Prompt tokens that were computed and not found in the cache.",
            token_counts,
        )
        self._make_latencies()

    def _make_latencies(self) -> None:
        histogram = self._families.histogram
        per_token, latency = buckets.INTER_TOKEN_LATENCY, buckets.REQUEST_LATENCY
        self.ttft = histogram(
            "vllm:time_to_first_token_seconds",
            "Time to the first token.",
            buckets.TIME_TO_FIRST_TOKEN,
        )
        self.itl = histogram("vllm:inter_token_latency_seconds", "Time between tokens.", per_token)
        self.tpot = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Time per output token of a request.",
            per_token,
        )
        self._families.alias(
            self.itl, "vllm:time_per_output_token_seconds", "Time between tokens, by its old name."
        )
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", latency)
        self.queue = histogram("vllm:request_queue_time_seconds", "Time in WAITING.", latency)
        self.inference = histogram(
            "vllm:request_inference_time_seconds", "Time in RUNNING.", latency
        )
        self.prefill = histogram("vllm:request_prefill_time_seconds", "Time in PREFILL.", latency)
        self.decode = histogram("vllm:request_decode_time_seconds", "Time in DECODE.", latency)

    def _make_own(self, info: ModelInfo) -> None:
        self.lag = None
        if info.is_paced:
            self.lag = self._families.gauge(
                "lockstep:clock_lag_seconds", "How far a paced body is behind the wall clock."
            )
        self._shared = Families(())
        self._refused = self._shared.counter(
            "vllm:admission_rejections", "Refusals by a queue limit.", "model_name", "reason"
        )
        self._refused.at(self.model_name, "max_num_queued_reqs")
        facts = {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            **info.facts,
            "engine": "0",
        }
        cache = self._shared.gauge("vllm:cache_config_info", "Facts of the KV cache.", *facts)
        cache.at(*facts.values()).value = 1
