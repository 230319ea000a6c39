"""The kernel's configuration and the step log's header, from options and start-up facts."""

from __future__ import annotations

from dataclasses import asdict

from engine.core.config import KernelConfig
from engine.models.config import ModelConfig
from engine.options import EngineOptions
from engine.steplog.api import LogHeader
from engine.worker.info import RunnerInfo


def kernel_config(options: EngineOptions, info: RunnerInfo) -> KernelConfig:
    """The kernel's configuration, from the sizes that all ranks agreed on."""
    return KernelConfig(
        num_blocks=info.num_blocks,
        max_model_len=info.max_model_len,
        block_size=info.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        policy=options.policy,
        enable_prefix_caching=options.enable_prefix_caching,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        watermark_blocks=options.watermark_blocks,
        async_scheduling=options.async_scheduling,
    )


def log_header(
    options: EngineOptions, model: ModelConfig, info: RunnerInfo, config: KernelConfig
) -> LogHeader:
    """What a reader of the log must know about the run."""
    return LogHeader(
        writer="engine",
        kernel=config,
        options=asdict(options),
        model={
            "architecture": model.architecture,
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_layers": model.num_layers,
            "num_heads": model.num_heads,
            "num_kv_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "tie_word_embeddings": model.tie_word_embeddings,
            "dtype": info.dtype,
            **_quantised_and_sparse(options, model),
        },
        hardware={
            "device": info.device,
            "device_name": info.device_name,
            "tensor_parallel_size": info.tensor_parallel_size,
            "attention_backend": info.attention_backend,
            "graph_sizes": list(info.graph_sizes),
            "memory": dict(info.memory_bytes),
            "start_up_s": dict(info.start_up_s),
            "versions": dict(info.versions),
        },
        seed=options.seed,
        lockstep_version=info.versions.get("lockstep-llm", ""),
    )


def _quantised_and_sparse(options: EngineOptions, model: ModelConfig) -> dict[str, object]:
    """What else decides the bytes and the arithmetic of a step; nothing for a plain dense model."""
    found: dict[str, object] = {}
    if options.quantization is not None or model.fp8 is not None:
        found["weights"] = "fp8"
    if model.moe is not None:
        found["num_experts"] = model.moe.num_experts
        found["num_experts_per_tok"] = model.moe.num_experts_per_tok
        found["moe_intermediate_size"] = model.moe.intermediate_size
        found["num_sparse_layers"] = len(model.moe.sparse_layers)
    return found
