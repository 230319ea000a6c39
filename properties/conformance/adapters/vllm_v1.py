"""vLLM's V1 scheduler and KV-cache manager, unchanged (package `vllm`, 0.33.0), on a CPU.

    lockstep verify conformance --target properties.conformance.adapters.vllm_v1:VllmV1

Only the scheduler is built: its settings are an object with the fields that it reads, so that no
model, tokenizer or device is needed. Block 0 is vLLM's placeholder and never handed out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any


class _Settings(SimpleNamespace):
    """Settings that are off, or None, unless they are given."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (untyped package)
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class VllmV1:
    """Claims every law."""

    policy = "mixed"
    opt_out: Collection[str] = ()
    kernel_options: Mapping[str, object] = {
        # A token budget below the seats is refused by its own configuration.
        "max_num_batched_tokens": lambda config: max(
            config["max_num_seqs"], config["max_num_batched_tokens"]
        ),
    }

    def start(self, config: Mapping[str, Any]) -> None:
        """Builds its scheduler over `num_blocks` blocks besides the placeholder."""
        self._config = config
        utils = import_module("vllm.v1.core.kv_cache_utils")
        hash_function = import_module("vllm.utils.hashing").sha256
        utils.init_none_hash(hash_function)
        self._hasher = utils.get_request_block_hasher(config["block_size"], hash_function)
        scheduler = import_module("vllm.v1.core.sched.scheduler").Scheduler
        self.scheduler = scheduler(
            self._settings(config),
            self._kv_cache_config(config),
            _Settings(accept_tokens=lambda *_: True),
            config["block_size"],
        )
        self._live: dict[int, Any] = {}
        self._step: Any = None

    def _settings(self, config: Mapping[str, Any]) -> _Settings:
        budget, seats = config["max_num_batched_tokens"], config["max_num_seqs"]
        return _Settings(
            scheduler_config=_Settings(
                max_num_seqs=seats,
                max_num_batched_tokens=budget,
                policy="fcfs",
                enable_chunked_prefill=True,
                long_prefill_token_threshold=0,
                prefill_schedule_interval=1,
                scheduler_reserve_full_isl=True,
                watermark=0.0,
                max_model_len=config["max_model_len"],
            ),
            cache_config=_Settings(
                num_gpu_blocks=config["num_blocks"] + 1,
                enable_prefix_caching=config["enable_prefix_caching"],
                block_size=config["block_size"],
            ),
            model_config=_Settings(max_model_len=config["max_model_len"], runner_type="generate"),
            parallel_config=_Settings(
                decode_context_parallel_size=1,
                prefill_context_parallel_size=1,
                pipeline_parallel_size=1,
                data_parallel_size=1,
                data_parallel_index=0,
            ),
            observability_config=_Settings(),
            aux_output_config=_Settings(enabled=False),
            ec_manager_config=_Settings(get_encoder_cache_manager_obj=lambda: None),
            num_speculative_tokens=0,
            num_lookahead_tokens=0,
            num_prefill_lookahead_tokens=0,
            num_hash_lookahead_tokens=0,
            max_in_flight_tokens=budget,
            max_concurrent_batches=1,
        )

    def _kv_cache_config(self, config: Mapping[str, Any]) -> Any:  # noqa: ANN401
        interface = import_module("vllm.v1.kv_cache_interface")
        torch = import_module("torch")
        spec = interface.FullAttentionSpec(
            block_size=config["block_size"], num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        group = interface.KVCacheGroupSpec(["layer"], spec)
        return interface.KVCacheConfig(
            num_blocks=config["num_blocks"] + 1, kv_cache_tensors=[], kv_cache_groups=[group]
        )

    def add(
        self,
        request_id: int,
        prompt: Sequence[int],
        max_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> None:
        """Queues; the front end refuses a prompt that the model or the pool can never hold."""
        config = self._config
        room = min(max_tokens, config["max_model_len"] - len(prompt))
        if room < 1:
            raise ValueError("longer than the model allows")
        if -(-(len(prompt) + room - 1) // config["block_size"]) > config["num_blocks"]:
            raise ValueError("larger than the pool")
        params = import_module("vllm.sampling_params").SamplingParams(
            max_tokens=max_tokens, stop_token_ids=list(stop_token_ids), ignore_eos=True
        )
        request = import_module("vllm.v1.request").Request(
            str(request_id), list(prompt), params, None, block_hasher=self._hasher
        )
        self._live[request_id] = request
        self.scheduler.add_request(request)

    def abort(self, request_id: int) -> None:
        """Ends a request between steps."""
        status = import_module("vllm.v1.request").RequestStatus
        self.scheduler.finish_requests(str(request_id), status.FINISHED_ABORTED)
        del self._live[request_id]

    def schedule(self) -> Sequence[tuple[int, int, int]]:
        """Its step; it counts a token as computed as soon as it is scheduled."""
        self._step = self.scheduler.schedule()
        entries = []
        for name, count in self._step.num_scheduled_tokens.items():
            request = self._live[int(name)]
            entries.append((int(name), request.num_computed_tokens - count, count))
        return entries

    def commit(self, tokens: Mapping[int, int]) -> Sequence[tuple[int, str]]:
        """Its update from a model output that holds these tokens."""
        names = list(self._step.num_scheduled_tokens)
        output = import_module("vllm.v1.outputs").ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[
                [tokens[int(name)]] if int(name) in tokens else [] for name in names
            ],
        )
        ended = []
        for client in self.scheduler.update_from_output(self._step, output).values():
            for told in client.outputs:
                if told.finish_reason is not None:
                    ended.append((int(told.request_id), str(told.finish_reason)))
                    del self._live[int(told.request_id)]
        return ended

    def waiting(self) -> Sequence[int]:
        """Front first."""
        return [int(request.request_id) for request in self.scheduler.waiting]

    def running(self) -> Sequence[int]:
        """Oldest first."""
        return [int(request.request_id) for request in self.scheduler.running]

    def block_table(self, request_id: int) -> Sequence[int]:
        """Its table of the only group, counted from vLLM's block 1."""
        if request_id not in self._live:
            return []
        [table] = self.scheduler.kv_cache_manager.get_block_ids(str(request_id))
        return [block - 1 for block in table]

    def num_free_blocks(self) -> int:
        """As its pool says."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def free_blocks(self) -> Sequence[int]:
        """Its free queue, the next one first."""
        queue = self.scheduler.kv_cache_manager.block_pool.free_block_queue
        return [block.block_id - 1 for block in queue.get_all_free_blocks()]
