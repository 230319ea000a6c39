"""8-bit checkpoints in every published form, and what HF computes from their numbers.

The reference is HF in float32 with the dequantised matrices, whose inputs are rounded as the
engine rounds its activations: it differs from the engine by the order of sums alone, except where
a quotient lies on the border of two 8-bit floats.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from engine.layers.fp8 import FP8, FP8_MAX, dequantised_matrix, quantise_rows

FORMS = ("block", "channel", "tensor")
KV_ATTENTION = "lockstep_fp8_kv"
_MATRIX = re.compile(r".*\.((q|k|v|o|gate|up|down)_proj|w[123])\.weight")


def quantization_config(form: str, block: tuple[int, int]) -> dict[str, Any]:
    """The entry of config.json, as Qwen3-8B-FP8, llm-compressor and AutoFP8 write it."""
    if form == "block":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(block),
        }
    if form == "tensor":
        return {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    assert form == "channel", form
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight, "strategy": "channel", "dynamic": False},
        "input_activations": {**eight, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
    }


def quantised_checkpoint(
    folder: Path, out: Path, form: str, block: tuple[int, int] = (16, 16)
) -> Path:
    """Writes the HF model of `folder` in an 8-bit form to the new folder `out`."""
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if _MATRIX.fullmatch(name) is None:
            stored[name] = tensor
            continue
        stored[name], scales = _quantised(tensor.float(), form, block)
        stored |= {name.removesuffix("weight") + end: scale for end, scale in scales.items()}
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = quantization_config(form, block)
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return out


def _quantised(
    weight: Tensor, form: str, block: tuple[int, int]
) -> tuple[Tensor, dict[str, Tensor]]:
    if form == "block":
        rows, columns = weight.shape
        tiles = weight.view(rows // block[0], block[0], columns // block[1], block[1])
        scale = tiles.abs().amax((1, 3)).clamp(min=1e-10) / FP8_MAX
        spread = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        return (weight / spread).clamp(-FP8_MAX, FP8_MAX).to(FP8), {"weight_scale_inv": scale}
    if form == "channel":
        quantised = quantise_rows(weight)
        return quantised.values, {"weight_scale": quantised.scale}
    scale = weight.abs().amax() / FP8_MAX
    values = (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return values, {"weight_scale": scale, "input_scale": torch.tensor(0.02)}


def dequantised_weights(folder: Path, block: tuple[int, int] = (16, 16)) -> dict[str, Tensor]:
    """The checkpoint's tensors as float32 numbers, without scales."""
    tensors = load_file(folder / "model.safetensors")
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if "scale" in name.rsplit(".", 1)[-1]:
            continue
        module = name.removesuffix("weight")
        scale = tensors.get(f"{module}weight_scale_inv")
        if scale is not None:
            plain[name] = dequantised_matrix(tensor, scale, block)
        elif tensor.dtype == FP8:
            scale = tensors[f"{module}weight_scale"].float()
            plain[name] = dequantised_matrix(tensor, scale.expand(tensor.shape[0], 1)[:, 0], None)
        else:
            plain[name] = tensor.float()
    return plain


def dequantised_model(folder: Path, scratch: Path, block: tuple[int, int] = (16, 16)) -> nn.Module:
    """HF in float32 with the numbers of an 8-bit checkpoint."""
    from golden.reference import load_hf

    plain = scratch / f"{folder.name}-dequantised"
    if not plain.exists():
        plain.mkdir(parents=True)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        del config["quantization_config"]
        (plain / "config.json").write_text(json.dumps(config), encoding="utf-8")
        weights = dequantised_weights(folder, block)
        save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    return load_hf(plain, torch.float32)


@contextmanager
def rounded_inputs(model: nn.Module, group: int | None) -> Iterator[None]:
    """Makes HF round the inputs of every quantised matrix as the engine does."""

    def rounded(x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return quantise_rows(flat, group).dequantised().reshape(x.shape).to(x.dtype)

    def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (rounded(inputs[0]), *inputs[1:])

    hooks = [
        module.register_forward_pre_hook(hook)
        for name, module in model.named_modules()
        if name.endswith("_proj") and isinstance(module, nn.Linear)
    ]
    experts = [m for m in model.modules() if type(m).__name__.endswith("Experts")]
    for block in experts:
        block.forward = _expert_forward(block, rounded)
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()
        for block in experts:
            del block.forward


def _expert_forward(block: Any, rounded: Any) -> Any:  # noqa: ANN401 (untyped library)
    def forward(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(block.num_experts):
            rows, slots = (chosen == expert).nonzero(as_tuple=True)
            wide = functional.linear(rounded(x[rows]), block.gate_up_proj[expert])
            gate, up = wide.chunk(2, dim=-1)
            hidden = rounded(functional.silu(gate) * up)
            share = functional.linear(hidden, block.down_proj[expert])
            out.index_add_(0, rows, share * weights[rows, slots, None])
        return out

    return forward


def register_kv_attention() -> str:
    """Makes HF know an attention whose keys and values are 8-bit floats; gives its name."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *rest: object,
        **options: object,
    ) -> object:
        key, value = (t.clamp(-FP8_MAX, FP8_MAX).to(FP8).to(query.dtype) for t in (key, value))
        return sdpa_attention_forward(module, query, key, value, *rest, **options)

    AttentionInterface.register(KV_ATTENTION, forward)
    AttentionMaskInterface.register(KV_ATTENTION, sdpa_mask)
    return KV_ATTENTION


def share_of_close_positions(
    found: Sequence[Tensor], truth: Sequence[Tensor], tolerance: float
) -> tuple[float, float]:
    """(share of positions within `tolerance` of the largest logit, largest relative error)."""
    errors = torch.cat(
        [
            (a - b).abs().amax(-1) / b.abs().amax(-1).clamp(min=1e-6)
            for a, b in zip(found, truth, strict=True)
        ]
    )
    return float((errors <= tolerance).float().mean()), float(errors.max())
