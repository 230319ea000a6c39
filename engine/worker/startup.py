"""Start of one rank: loads the model, measures its memory peaks and sizes the KV cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from engine.attention.base import AttentionBackend, AttentionMetadata
from engine.attention.select import select_backend
from engine.core.errors import ConfigError
from engine.distributed.group import TpGroup
from engine.layers.fp8 import FP8
from engine.layers.sharding import kv_head_shard
from engine.models.build import build_model, resolve_dtype
from engine.models.config import ModelConfig, load_model_config
from engine.models.decoder import Decoder
from engine.models.loader import (
    check_weights,
    init_dummy_weights,
    load_kv_scales,
    load_weights,
)
from engine.options import EngineOptions
from engine.worker.device import CPU_KV_CACHE_BYTES
from engine.worker.graphs import (
    can_pad_prompts,
    graph_batch_sizes,
    prompt_graph_sizes,
    reserved_graph_bytes,
)
from engine.worker.kv_cache import (
    KvShape,
    MemoryProfile,
    OutOfMemoryAtStart,
    agreed_num_blocks,
    fit_model_len,
    num_blocks_in,
    table_width,
)
from engine.worker.row_sampler import warm_up_sampling

# Both graphs of a batch size keep their own kernel nodes.
_GRAPHS_PER_SIZE = 2
# Partial results of attention and the persistent buffers of padded steps, for the largest models.
_PADDED_STEP_BYTES = 128 * 1024**2


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights, and what the choice of its parts came to."""

    config: ModelConfig
    model: Decoder
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    backend_name: str
    shape: KvShape
    model_limit: int  # positions that the model and the options allow
    load_s: float


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes that all ranks agreed on, and the measurements they rest on."""

    shape: KvShape
    num_blocks: int
    max_model_len: int
    memory_bytes: dict[str, int]
    start_up_s: dict[str, float] = field(default_factory=dict)


def load_model(options: EngineOptions, group: TpGroup, device: torch.device) -> LoadedModel:
    """This rank's shard of the model, with weights.

    Raises:
        OutOfMemoryAtStart: the weights do not fit.
    """
    started = time.perf_counter()
    config = load_model_config(options.model)
    limit = config.max_position_embeddings
    if options.max_model_len is not None and options.max_model_len > limit:
        raise ConfigError("max_model_len", options.max_model_len, config.length_limit)
    dtype = resolve_dtype(options.dtype, config)
    kv_dtype = FP8 if _has_fp8_kv(options, config) else dtype
    backend = select_backend(
        options.attention_backend, config.head_dim, options.block_size, dtype, device, kv_dtype
    )
    try:
        model = _build_and_fill(options, config, group, backend, dtype, device)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise OutOfMemoryAtStart(
            f"the weights do not fit: {free:,} of {total:,} bytes are free on {device}: {error}"
        ) from error
    shape = KvShape(
        num_layers=config.num_layers,
        block_size=options.block_size,
        num_kv_heads=kv_head_shard(config.num_kv_heads, group.rank, group.size).size,
        head_dim=config.head_dim,
        dtype_bytes=kv_dtype.itemsize,
    )
    return LoadedModel(
        config=config,
        model=model,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        backend_name=backend.name,
        shape=shape,
        model_limit=limit,
        load_s=time.perf_counter() - started,
    )


def _has_fp8_kv(options: EngineOptions, config: ModelConfig) -> bool:
    if options.kv_cache_dtype != "auto":
        return True
    return config.fp8 is not None and config.fp8.has_fp8_kv


def _build_and_fill(
    options: EngineOptions,
    config: ModelConfig,
    group: TpGroup,
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device,
) -> Decoder:
    build = partial(
        build_model,
        config,
        group,
        backend,
        dtype,
        expert_parallel=options.expert_parallel,
        quantization=options.quantization,
    )
    if options.load_format == "dummy":
        model = build(device)
        init_dummy_weights(model, options.seed)
        return model
    # A faulty checkpoint is refused before the device gives any memory.
    check_weights(build("meta", max_position=1), options.model)
    kv_scales = load_kv_scales(options.model, config.num_layers)
    model = build(device)
    load_weights(model, options.model)
    if _has_fp8_kv(options, config):
        model.set_kv_scales(kv_scales)
    return model


def plan_memory(
    options: EngineOptions, loaded: LoadedModel, group: TpGroup, max_rows: int
) -> MemoryPlan:
    """Sizes the KV cache from the warm-up's measured peaks; every rank gets the same result.

    Raises:
        OutOfMemoryAtStart: no block fits. ConfigError: max_model_len does not fit the pool.
    """
    started = time.perf_counter()
    on_cuda = loaded.device.type == "cuda"
    profile = _profile(options, loaded, group, max_rows) if on_cuda else None
    warm_up_s = time.perf_counter() - started
    local = _local_num_blocks(options, loaded, profile, max_rows)
    num_blocks = _agree(local, group, loaded.device)
    max_model_len = fit_model_len(
        options.max_model_len, loaded.model_limit, num_blocks, options.block_size
    )
    memory = {} if profile is None else _memory_report(profile)
    memory["kv_block_bytes"] = loaded.shape.block_bytes
    memory["kv_cache_bytes"] = num_blocks * loaded.shape.block_bytes
    times = {"load": loaded.load_s, "warm_up": warm_up_s}
    return MemoryPlan(loaded.shape, num_blocks, max_model_len, memory, times)


def _local_num_blocks(
    options: EngineOptions, loaded: LoadedModel, profile: MemoryProfile | None, max_rows: int
) -> int:
    if options.num_kvcache_blocks is not None:
        return options.num_kvcache_blocks
    if options.kv_cache_memory_bytes is not None:
        why = f"kv_cache_memory_bytes={options.kv_cache_memory_bytes}"
        return num_blocks_in(options.kv_cache_memory_bytes, loaded.shape, why)
    if profile is None:
        # On a CPU nothing is gained by a pool that the largest batch cannot fill.
        per_request = table_width(options.max_model_len or loaded.model_limit, options.block_size)
        useful = per_request * max_rows
        return min(useful, num_blocks_in(CPU_KV_CACHE_BYTES, loaded.shape, "1 GiB on a CPU"))
    budget = profile.kv_budget_bytes(options.gpu_memory_utilization)
    return num_blocks_in(budget, loaded.shape, profile.describe(options.gpu_memory_utilization))


def _agree(num_blocks: int, group: TpGroup, device: torch.device) -> int:
    mine = torch.tensor([num_blocks], dtype=torch.int64, device=device)
    return agreed_num_blocks(group.all_gather(mine, dim=0).tolist())


def _memory_report(profile: MemoryProfile) -> dict[str, int]:
    return {
        "total_bytes": profile.total_bytes,
        "other_bytes": profile.other_bytes,
        "weight_bytes": profile.weight_bytes,
        "prefill_peak_bytes": profile.prefill_peak_bytes,
        "sampling_peak_bytes": profile.sampling_peak_bytes,
        "graph_reserve_bytes": profile.graph_bytes,
    }


def _profile(
    options: EngineOptions, loaded: LoadedModel, group: TpGroup, max_rows: int
) -> MemoryProfile:
    """Runs the largest prefill and the largest sampling batch and reads the allocator."""
    device = loaded.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    weight_bytes = torch.cuda.memory_allocated(device)
    try:
        prefill_peak = _peak_of(device, partial(warm_up_prefill, options, loaded))
        decode_peak = _peak_of(device, partial(warm_up_decode, options, loaded, max_rows))
        size = loaded.config.hidden_size
        sampling = partial(warm_up_sampling, loaded.model, group, size, loaded.dtype, max_rows)
        plain_peak = _peak_of(device, partial(sampling, filtered=False))
        filtered_peak = _peak_of(device, partial(sampling, filtered=True))
    except torch.OutOfMemoryError as error:
        other_bytes, total = _other_bytes(device)
        raise OutOfMemoryAtStart(
            f"the warm-up does not fit: {total:,} bytes in all, {other_bytes:,} used by others, "
            f"{weight_bytes:,} weights; lower max_num_batched_tokens="
            f"{options.max_num_batched_tokens} or max_num_seqs={options.max_num_seqs}: {error}"
        ) from error
    torch.cuda.empty_cache()
    # After the warm-up, which loads kernels and makes NCCL allocate its buffers.
    other_bytes, total = _other_bytes(device)
    graph_bytes = prompt_peak = 0
    if not options.enforce_eager:
        num_graphs = _GRAPHS_PER_SIZE * len(graph_batch_sizes(max_rows))
        if can_pad_prompts(loaded.backend_name, group.size):
            weights = loaded.model.num_layer_weights
            sizes = prompt_graph_sizes(options.max_num_batched_tokens, weights)
            num_graphs += len(sizes)
            share = sizes[-1] / options.max_num_batched_tokens
            prompt_peak = int(prefill_peak * share) + _PADDED_STEP_BYTES
        graph_bytes = reserved_graph_bytes(num_graphs, max(decode_peak, plain_peak, prompt_peak))
    return MemoryProfile(
        total_bytes=total,
        other_bytes=other_bytes,
        weight_bytes=weight_bytes,
        prefill_peak_bytes=prefill_peak,
        sampling_peak_bytes=max(filtered_peak, decode_peak),
        graph_bytes=graph_bytes,
    )


def _other_bytes(device: torch.device) -> tuple[int, int]:
    """What the device holds outside this process's allocator, and its size."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device), total


def _peak_of(device: torch.device, work: Callable[[], None]) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


@torch.inference_mode()
def warm_up_prefill(options: EngineOptions, loaded: LoadedModel) -> None:
    """The largest prefill step: the whole budget in as few prompts as possible, and a decode.

    There is no KV cache yet: nothing is written (slot -1) and every table points to one block. The
    decode is there so that no kernel of such a step is compiled while serving.
    """
    device = loaded.device
    budget = options.max_num_batched_tokens
    longest = min(budget, (options.max_model_len or loaded.model_limit) - 1)
    lengths = [longest] * max(1, min(budget // longest, options.max_num_seqs))
    total = sum(lengths)
    width = table_width(longest, options.block_size)
    bounds = torch.arange(0, total + 1, longest, dtype=torch.int32, device=device)
    meta = AttentionMetadata(
        slot_mapping=torch.full((total + 1,), -1, dtype=torch.int64, device=device),
        num_decodes=1,
        decode_block_tables=torch.zeros(1, width, dtype=torch.int32, device=device),
        decode_context_lens=torch.ones(1, dtype=torch.int32, device=device),
        max_decode_context=longest,
        cu_seqlens_q=bounds,
        chunk_block_tables=torch.zeros(len(lengths), width, dtype=torch.int32, device=device),
        chunk_context_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        max_seqlen_q=longest,
        max_seqlen_k=longest,
    )
    positions = torch.arange(longest, dtype=torch.int64, device=device).repeat(len(lengths))
    positions = torch.cat([positions[:1], positions])
    ids = torch.zeros(total + 1, dtype=torch.int64, device=device)
    loaded.model(ids, positions, _one_block_caches(loaded), meta)


@torch.inference_mode()
def warm_up_decode(options: EngineOptions, loaded: LoadedModel, num_rows: int) -> None:
    """The largest decode step, up to the hidden states."""
    device = loaded.device
    context = min(options.max_model_len or loaded.model_limit, loaded.model_limit)
    width = table_width(context, options.block_size)
    meta = AttentionMetadata(
        slot_mapping=torch.full((num_rows,), -1, dtype=torch.int64, device=device),
        num_decodes=num_rows,
        decode_block_tables=torch.zeros(num_rows, width, dtype=torch.int32, device=device),
        decode_context_lens=torch.ones(num_rows, dtype=torch.int32, device=device),
        max_decode_context=context,
    )
    ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
    loaded.model(ids, ids, _one_block_caches(loaded), meta)


def _one_block_caches(loaded: LoadedModel) -> list[torch.Tensor]:
    shape = loaded.shape
    dims = (2, 1, shape.block_size, shape.num_kv_heads, shape.head_dim)
    cache = torch.zeros(dims, dtype=loaded.kv_dtype, device=loaded.device)
    return [cache] * shape.num_layers
