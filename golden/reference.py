"""HF Transformers as the reference: models of random weights, and teacher-forced logits.

Always computed in the same job on the same machine as the engine's numbers; nothing is stored.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from golden.cases import ModelCase


def hf_config(case: ModelCase) -> Any:  # noqa: ANN401 (untyped library)
    """The HF config object of a case."""
    import transformers

    config = getattr(transformers, f"{case.family}Config")(**case.settings)
    config.architectures = [f"{case.family}ForCausalLM"]
    return config


@torch.no_grad()
def random_hf_model(case: ModelCase, seed: int, device: torch.device | str = "cpu") -> nn.Module:
    """A float32 HF model whose random weights are exact in bfloat16 and all matter.

    So one float32 truth serves every dtype under test.
    """
    import transformers

    with torch.device(device):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(
            hf_config(case), dtype=torch.float32, attn_implementation="sdpa"
        )
    tied = case.settings.get("tie_word_embeddings", False)
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    for name, parameter in model.named_parameters():
        generator = torch.Generator(device=parameter.device)
        generator.manual_seed((seed << 32) ^ zlib.crc32(name.encode()))
        if "norm" in name.split(".")[-2]:
            low, high = 1 - case.norm_spread, 1 + case.norm_spread
            parameter.uniform_(low, high, generator=generator)
        else:
            parameter.normal_(0.0, _deviation(case, name), generator=generator)
        if case.head_tail is not None and name == head:
            lengths = torch.rand(parameter.shape[0], generator=generator, device=parameter.device)
            lengths = lengths.clamp(min=1e-6).pow(-1 / case.head_tail) * case.head_scale
            parameter.mul_(lengths[:, None])
        if case.head_from_embedding is not None and name == head:
            embedding = model.get_parameter("model.embed_tokens.weight")
            parameter.copy_(embedding.roll(1, 0) * (case.head_from_embedding / embedding.std()))
        if case.twin_experts and (".mlp.experts." in name or name.endswith(".mlp.gate.weight")):
            parameter[1::2] = parameter[::2]
        parameter.copy_(parameter.to(torch.bfloat16))
    return model.eval()


def _deviation(case: ModelCase, name: str) -> float:
    if name == "model.embed_tokens.weight" and case.embedding_std is not None:
        return case.embedding_std
    writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    return case.weight_std * (case.branch_scale if writes_residual else 1.0)


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Converts the parameters in place, but not the rotary frequencies.

    `Module.to` would round those buffers too, which no loader of HF checkpoints does.
    """
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to(dtype)
    for name, buffer in model.named_buffers():
        buffer.data = kept[name].to(buffer.device)
    return model


def save_model(model: nn.Module, folder: Path) -> Path:
    """Writes an HF model folder with safetensors weights."""
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def save_config(case: ModelCase, folder: Path, dtype: torch.dtype) -> Path:
    """Writes config.json only: the weights come from memory."""
    folder.mkdir(parents=True, exist_ok=True)
    content = hf_config(case).to_dict()
    content["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def load_hf(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> nn.Module:
    """An HF model of a folder."""
    import transformers

    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    return model.to(device).eval()


@torch.inference_mode()
def hf_logits(model: nn.Module, token_ids: Sequence[int]) -> Tensor:
    """Teacher-forced logits [len - 1, vocab] in the model's dtype: row p predicts token p + 1."""
    device = next(model.parameters()).device
    ids = torch.tensor([list(token_ids[:-1])], dtype=torch.int64, device=device)
    with plain_attention(next(model.parameters()).dtype):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits[0]


@contextmanager
def attention_of(model: Any, name: str) -> Iterator[None]:  # noqa: ANN401 (untyped library)
    """Makes an HF model use another implementation of attention for a while."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def plain_attention(dtype: torch.dtype) -> Iterator[None]:
    """For the float32 truth: no fused attention kernel and no TF32."""
    if dtype != torch.float32 or not torch.cuda.is_available():
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def quiet_transformers() -> None:
    """No progress bars and no advice on the terminal."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
