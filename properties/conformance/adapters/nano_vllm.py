"""nano-vLLM's scheduler, block manager and sequences (package `nanovllm`, bb823b3).

    lockstep verify conformance --target properties.conformance.adapters.nano_vllm:NanoVllm

The package's `__init__` imports its model runner, which needs a GPU; only the three scheduling
modules are loaded here.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any


def scheduling_module(name: str) -> Any:  # noqa: ANN401 (untyped package)
    """A module of `nanovllm` without the package's own imports."""
    if "nanovllm" not in sys.modules:
        spec = find_spec("nanovllm")
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError("the package nanovllm is not installed")
        package = ModuleType("nanovllm")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["nanovllm"] = package
    return import_module(f"nanovllm.{name}")


class NanoVllm:
    """Claims every law; what it breaks by design is in the record."""

    policy = "prefill_first"
    opt_out: Collection[str] = ()
    kernel_options: Mapping[str, object] = {
        "block_size": range(2, 17),  # its rule for growing tables does not know a block of one
        "enable_prefix_caching": True,
        "bound_holders": False,
        "bound_decode_tokens": False,
        "bound_model_len": False,
    }

    def start(self, config: Mapping[str, Any]) -> None:
        """Builds its scheduler; the block size is an attribute of its sequence class."""
        self._sequences = scheduling_module("engine.sequence")
        self._sequences.Sequence.block_size = config["block_size"]
        settings = SimpleNamespace(
            max_num_seqs=config["max_num_seqs"],
            max_num_batched_tokens=config["max_num_batched_tokens"],
            eos=-1,
            kvcache_block_size=config["block_size"],
            num_kvcache_blocks=config["num_blocks"],
        )
        self.scheduler = scheduling_module("engine.scheduler").Scheduler(settings)
        self._live: dict[int, Any] = {}
        self._ids: dict[int, int] = {}  # by its own sequence ids
        self._stops: dict[int, int] = {}
        self._batch: list[Any] = []
        self._is_prefill = False

    def weaken_hash(self, bits: int) -> None:
        """Cuts the hash of its block manager."""
        manager = self.scheduler.block_manager
        full = manager.compute_hash
        manager.compute_hash = lambda tokens, prefix=-1: full(tokens, prefix) % 2**bits

    def add(
        self,
        request_id: int,
        prompt: Sequence[int],
        max_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> None:
        """Queues; it never refuses. It has one EOS, which is set for each request in turn."""
        params = scheduling_module("sampling_params").SamplingParams(
            max_tokens=max_tokens, ignore_eos=not stop_token_ids
        )
        sequence = self._sequences.Sequence(list(prompt), params)
        self._live[request_id], self._ids[sequence.seq_id] = sequence, request_id
        self._stops[request_id] = stop_token_ids[0] if stop_token_ids else -1
        self.scheduler.add(sequence)

    def schedule(self) -> Sequence[tuple[int, int, int]]:
        """Its batch; computed tokens are what it calls cached."""
        self._batch, self._is_prefill = self.scheduler.schedule()
        entries = []
        for sequence in self._batch:
            first = sequence.num_cached_tokens if self._is_prefill else sequence.num_tokens - 1
            entries.append((self._ids[sequence.seq_id], first, sequence.num_scheduled_tokens))
        return entries

    def commit(self, tokens: Mapping[int, int]) -> Sequence[tuple[int, str]]:
        """Its postprocessing, request by request in batch order."""
        ended = []
        for sequence in self._batch:
            name = self._ids[sequence.seq_id]
            self.scheduler.eos = self._stops[name]
            token = tokens.get(name, 0)  # it drops the token of an unfinished chunk
            self.scheduler.postprocess([sequence], [token], self._is_prefill)
            if sequence.is_finished:
                stopped = not sequence.ignore_eos and token == self._stops[name]
                ended.append((name, "stop" if stopped else "length"))
                del self._live[name]
        return ended

    def waiting(self) -> Sequence[int]:
        """Front first; a half-done prompt is among them."""
        return [self._ids[sequence.seq_id] for sequence in self.scheduler.waiting]

    def running(self) -> Sequence[int]:
        """Oldest first."""
        return [self._ids[sequence.seq_id] for sequence in self.scheduler.running]

    def block_table(self, request_id: int) -> Sequence[int]:
        """Its table."""
        return list(self._live[request_id].block_table) if request_id in self._live else []

    def num_free_blocks(self) -> int:
        """Length of its free queue."""
        return len(self.scheduler.block_manager.free_block_ids)

    def free_blocks(self) -> Sequence[int]:
        """Its free queue, the next one first."""
        return list(self.scheduler.block_manager.free_block_ids)
