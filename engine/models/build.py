"""Building a model from its configuration."""

from __future__ import annotations

import importlib.util

import torch

from engine.attention.base import AttentionBackend
from engine.core.errors import ConfigError
from engine.distributed.group import TpGroup
from engine.layers.fp8_config import ON_LOAD, QUANTIZATIONS, Fp8Config, check_on_gpu
from engine.layers.moe_config import check_expert_split
from engine.layers.sharding import check_tp_size
from engine.models.config import DTYPES, ModelConfig
from engine.models.decoder import Decoder


def resolve_dtype(option: str | torch.dtype, config: ModelConfig) -> torch.dtype:
    """The dtype to run in; "auto" means the checkpoint's own."""
    if isinstance(option, torch.dtype):
        option = str(option).removeprefix("torch.")
    name = config.dtype if option == "auto" else option
    if name not in DTYPES:
        raise ConfigError("dtype", option, f"must be auto or one of {', '.join(DTYPES)}")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def resolve_quantization(option: str | None, config: ModelConfig) -> Fp8Config | None:
    """How matrices are kept: as the checkpoint stores them, or quantised if the option says so."""
    if option is not None and option not in QUANTIZATIONS:
        raise ConfigError("quantization", option, f"must be one of {', '.join(QUANTIZATIONS)}")
    return ON_LOAD if config.fp8 is None and option == "fp8" else config.fp8


def build_model(
    config: ModelConfig,
    group: TpGroup,
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    max_position: int | None = None,
    fused: bool | None = None,
    expert_parallel: bool = False,
    quantization: str | None = None,
) -> Decoder:
    """This rank's shard of the model, weights not yet loaded, in inference form.

    `max_position` bounds the rotary table (default: the model's limit). `fused` chooses the Triton
    kernels of the layers; by default they run on CUDA where Triton is installed. With
    `expert_parallel` each rank holds whole experts instead of a part of each. `quantization`
    quantises the matrices of a 16-bit checkpoint while loading.
    """
    check_tp_size(config, group.size)
    check_expert_split(config.moe, group.size, expert_parallel)
    device = torch.device(device)
    limit = config.max_position_embeddings
    if max_position is not None and max_position > limit:
        raise ConfigError("max_model_len", max_position, f"the model reaches {limit} positions")
    if fused is None:
        fused = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    if fused:
        check_on_gpu(config.fp8)
    with torch.no_grad():
        model = Decoder(
            config,
            group,
            backend,
            dtype,
            device,
            fused,
            max_position or limit,
            expert_parallel,
            resolve_quantization(quantization, config),
        )
    return model.eval()
