"""One rank's runner: model, KV cache and device state; computes commands, knows no requests.

`launch` starts a step without waiting for the device and `collect` gives the result of the oldest
one, so the host can prepare a step while the device computes the one before.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.attention.base import AttentionMetadata
from engine.distributed.group import TpGroup
from engine.options import EngineOptions
from engine.sampler import Logprobs, compute_logprobs
from engine.worker.batch_state import BatchState
from engine.worker.command import StepCommand, StepResult
from engine.worker.device import device_name, installed_versions
from engine.worker.graphs import (
    DecodeGraphs,
    GraphPool,
    PromptGraphs,
    can_pad_prompts,
    graph_batch_sizes,
)
from engine.worker.info import RunnerInfo
from engine.worker.inputs import mixed_step_inputs
from engine.worker.kv_cache import allocate_pool, table_width
from engine.worker.prompt_logprobs import prompt_logprobs
from engine.worker.row_sampler import RowSampler, to_step_logprobs
from engine.worker.startup import LoadedModel, MemoryPlan, load_model, plan_memory

if TYPE_CHECKING:
    from engine.worker.few_rows import FewRows
    from engine.worker.prompt_steps import PromptSteps

_MAX_STEPS_UNDER_WAY = 2
_ON_THE_DEVICE = (
    *("graphs", "prompt_graphs", "_prompts", "prompt_hidden"),
    *("model", "kv_caches", "_pool", "state", "_sampler", "hidden"),
)


@dataclass(slots=True)
class _Launched:
    """A step under way: where its tokens arrive, and when the device is done with it."""

    num_samples: int
    tokens: Tensor  # int64 on the host; valid once the step is over
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None
    started: torch.cuda.Event | None
    ended: torch.cuda.Event | None
    host_time_ns: int


class ModelRunner:
    """Everything that one rank holds on its device."""

    def __init__(self, options: EngineOptions, group: TpGroup, device: torch.device) -> None:
        """Loads the model, sizes and allocates the KV cache, and captures the decode graphs."""
        self.device = device
        self.group = group
        self._is_cuda = device.type == "cuda"
        self._launched: deque[_Launched] = deque()
        loaded = load_model(options, group, device)
        self.model = loaded.model
        self.max_rows = min(options.max_num_seqs, options.max_num_batched_tokens)
        plan = plan_memory(options, loaded, group, self.max_rows)
        self.max_model_len = plan.max_model_len
        self.state = BatchState(
            num_slots=options.max_num_seqs,
            max_rows=self.max_rows,
            width=table_width(plan.max_model_len, options.block_size),
            block_size=options.block_size,
            device=device,
        )
        self._pool = allocate_pool(plan.shape, plan.num_blocks, loaded.kv_dtype, device)
        self.kv_caches = [self._pool[:, layer] for layer in range(plan.shape.num_layers)]
        hidden_size = loaded.config.hidden_size
        self.hidden = torch.zeros(self.max_rows, hidden_size, dtype=loaded.dtype, device=device)
        self.sampled = torch.zeros(self.max_rows, dtype=torch.int64, device=device)
        self.model.few_rows = self._few_rows(loaded)
        self._prompts = self._padded_prompts(options, loaded)
        num_rows = 0 if self._prompts is None else self._prompts.sizes[-1]
        # Of the last padded step with chunks, all rows.
        self.prompt_hidden = torch.zeros(num_rows, hidden_size, dtype=loaded.dtype, device=device)
        self._sampler = RowSampler(self.state, group, self.model.local_vocab)
        self._host_tokens = self._token_buffers()
        self._next_buffer = 0
        started = time.perf_counter()
        reserved_bytes = torch.cuda.memory_reserved(device) if self._is_cuda else 0
        self.graphs, self.prompt_graphs = self._capture(options)
        if self.graphs is not None:
            used = torch.cuda.memory_reserved(device) - reserved_bytes
            plan.memory_bytes["graph_bytes"] = used
        plan.start_up_s["graphs"] = time.perf_counter() - started
        self.info = self._describe(options, loaded, plan)

    def launch(self, command: StepCommand) -> None:
        """Starts a step."""
        assert len(self._launched) < _MAX_STEPS_UNDER_WAY, "a step must be collected first"
        started_ns = time.perf_counter_ns()
        started, ended = self._events()
        if started is not None:
            started.record()
        with torch.inference_mode():
            self.state.apply(command)
            num_samples = command.num_samples
            prompt = None
            if command.num_prompt_logprobs is not None:
                prompt = self._run_chunks_eagerly(command)
            elif command.chunks:
                self._run_chunks(command)
            else:
                self._run_decode(command.num_decodes)
            logprobs = self._sample(command) if num_samples else None
            tokens = self._fetch(num_samples)
        if ended is not None:
            ended.record()
        elapsed_ns = time.perf_counter_ns() - started_ns
        self._launched.append(
            _Launched(num_samples, tokens, logprobs, prompt, started, ended, elapsed_ns)
        )

    def collect(self) -> StepResult:
        """Waits for the oldest step and returns its tokens."""
        step = self._launched.popleft()
        device_time_ns = step.host_time_ns
        if step.started is not None and step.ended is not None:
            step.ended.synchronize()
            device_time_ns = int(step.started.elapsed_time(step.ended) * 1e6)
        token_ids = array("q", step.tokens[: step.num_samples].numpy().tobytes())
        logprobs = None if step.logprobs is None else to_step_logprobs(step.logprobs)
        prompt = None if step.prompt_logprobs is None else to_step_logprobs(step.prompt_logprobs)
        return StepResult(token_ids, device_time_ns, logprobs, prompt)

    def drop_steps(self) -> None:
        """Forgets the steps under way, after waiting for what the device still does."""
        self._launched.clear()
        if self._is_cuda:
            torch.cuda.synchronize(self.device)

    def state_digest(self) -> str:
        """Digest of the device state that all ranks must share."""
        digest = hashlib.sha256()
        for tensor in (self.state.block_tables, self.state.last_tokens, self.state.row_slots):
            digest.update(tensor.cpu().numpy().tobytes())
        return digest.hexdigest()

    def close(self) -> None:
        """Frees the device memory; a second call does nothing."""
        try:
            self.drop_steps()
        finally:  # a device in error still lets go of what is here
            for name in _ON_THE_DEVICE:
                if hasattr(self, name):
                    delattr(self, name)
        if self._is_cuda:
            torch.cuda.empty_cache()

    # Parts of a step -----------------------------------------------------------------------

    def _run_decode(self, num_rows: int) -> None:
        if self.graphs is not None:
            self.graphs.replay_model(num_rows)
        else:
            self._model_on_rows(num_rows)

    def _model_on_rows(self, num_rows: int) -> None:
        """The model over the first decode rows; works on persistent buffers only."""
        ids, positions, mapping, tables, context_lens = self.state.decode_rows(num_rows)
        meta = AttentionMetadata(
            slot_mapping=mapping,
            num_decodes=num_rows,
            decode_block_tables=tables,
            decode_context_lens=context_lens,
            max_decode_context=self.max_model_len,
        )
        hidden = self.model(ids, positions, self.kv_caches, meta)
        self.hidden[:num_rows].copy_(hidden)

    def _run_chunks(self, command: StepCommand) -> None:
        size = None if self._prompts is None else self._prompts.bucket(command)
        if self._prompts is not None and size is not None:
            self._prompts.take(command)
            if self.prompt_graphs is not None:
                self.prompt_graphs.replay(size)
            else:
                self._model_on_prompts(size, command.num_decodes)
            return
        self._run_chunks_eagerly(command)

    def _run_chunks_eagerly(self, command: StepCommand) -> Logprobs | None:
        inputs = mixed_step_inputs(command, self.state, self.max_model_len)
        hidden = self.model(inputs.input_ids, inputs.positions, self.kv_caches, inputs.meta)
        num_samples = command.num_samples
        torch.index_select(hidden, 0, inputs.sampled_rows, out=self.hidden[:num_samples])
        if command.num_prompt_logprobs is None:
            return None
        return prompt_logprobs(self.model, hidden, command, self.state, self.max_rows)

    def _model_on_prompts(self, size: int, num_decodes: int = 0) -> None:
        """The model over a padded step with chunks; works on persistent buffers only."""
        assert self._prompts is not None
        inputs = self._prompts.lay_out(size, num_decodes)
        hidden = self.model(inputs.input_ids, inputs.positions, self.kv_caches, inputs.meta)
        self.prompt_hidden[:size].copy_(hidden)
        num_samples = min(size, self.max_rows)
        rows = self._prompts.sampled_rows[:num_samples]
        torch.index_select(hidden, 0, rows, out=self.hidden[:num_samples])

    def _sample(self, command: StepCommand) -> Logprobs | None:
        num_rows = command.num_samples
        if command.is_plain:
            if self.graphs is not None:
                self.graphs.replay_sampling(num_rows)
            else:
                self._sample_rows(num_rows)
            return None
        hidden = self.hidden[:num_rows]
        if not command.needs_all_logits:
            local_logits = self.model.compute_local_logits(hidden)
            self._keep(self._sampler.draw_unbanned(local_logits, command))
            return None
        logits = self.model.compute_logits(hidden)
        tokens = self._sampler.draw(logits, command)
        self._keep(tokens)
        if command.num_logprobs is None:
            return None
        return compute_logprobs(logits, tokens.clamp(min=0), command.num_logprobs)

    def _sample_rows(self, num_rows: int) -> None:
        """LM head and plain sampling of the marked rows; works on persistent buffers only."""
        hidden, few_rows = self.hidden[:num_rows], self.model.few_rows
        if few_rows is not None and few_rows.takes_logits(num_rows):
            local_logits = few_rows.logits(self.model, hidden)
        else:
            local_logits = self.model.compute_local_logits(hidden)
        if not self._sampler.draw_in_place(local_logits, self.sampled[:num_rows]):
            self._keep(self._sampler.draw_plain(local_logits))

    def _keep(self, tokens: Tensor) -> None:
        num_rows = tokens.numel()
        self.sampled[:num_rows].copy_(tokens)
        self.state.keep_sampled(num_rows, tokens)

    def _fetch(self, num_samples: int) -> Tensor:
        """Starts the copy of the sampled ids to the host."""
        buffer = self._host_tokens[self._next_buffer]
        self._next_buffer = (self._next_buffer + 1) % len(self._host_tokens)
        buffer[:num_samples].copy_(self.sampled[:num_samples], non_blocking=True)
        return buffer

    # Parts of the start ---------------------------------------------------------------------

    def _padded_prompts(self, options: EngineOptions, loaded: LoadedModel) -> PromptSteps | None:
        if not self._is_cuda or not can_pad_prompts(loaded.backend_name, self.group.size):
            return None
        from engine.worker.prompt_steps import make_prompt_steps

        return make_prompt_steps(options, loaded, self.state, self.kv_caches[0])

    def _few_rows(self, loaded: LoadedModel) -> FewRows | None:
        if not self._is_cuda or loaded.backend_name != "triton":
            return None
        from engine.worker.few_rows import FewRows, serves

        if not serves(self.model, loaded.backend_name, self.kv_caches[0]):
            return None
        return FewRows(loaded.shape.num_kv_heads, self.device)

    def _capture(self, options: EngineOptions) -> tuple[DecodeGraphs | None, PromptGraphs | None]:
        if options.enforce_eager or not self._is_cuda:
            return None, None
        pool, prompts = GraphPool(), None
        with torch.inference_mode():
            if self._prompts is not None:
                self._prompts.clear()
                prompts = PromptGraphs(self._prompts.sizes, self._model_on_prompts, pool)
            sizes = graph_batch_sizes(self.max_rows)
            return DecodeGraphs(sizes, self._model_on_rows, self._sample_rows, pool), prompts

    def _describe(
        self, options: EngineOptions, loaded: LoadedModel, plan: MemoryPlan
    ) -> RunnerInfo:
        memory = dict(plan.memory_bytes)
        if self._is_cuda:
            memory["allocated_bytes"] = torch.cuda.memory_allocated(self.device)
            memory["reserved_bytes"] = torch.cuda.memory_reserved(self.device)
        return RunnerInfo(
            num_blocks=plan.num_blocks,
            block_size=options.block_size,
            max_model_len=plan.max_model_len,
            device=str(self.device),
            device_name=device_name(self.device),
            dtype=str(loaded.dtype).removeprefix("torch."),
            attention_backend=loaded.backend_name,
            tensor_parallel_size=self.group.size,
            has_fast_all_reduce=self.group.fast is not None,
            graph_sizes=() if self.graphs is None else self.graphs.sizes,
            memory_bytes=memory,
            start_up_s=plan.start_up_s,
            versions=installed_versions(self.device),
        )

    def _token_buffers(self) -> list[Tensor]:
        return [
            torch.zeros(self.max_rows, dtype=torch.int64, pin_memory=self._is_cuda)
            for _ in range(_MAX_STEPS_UNDER_WAY + 1)
        ]

    def _events(self) -> tuple[torch.cuda.Event | None, torch.cuda.Event | None]:
        if not self._is_cuda:
            return None, None
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        return started, ended
