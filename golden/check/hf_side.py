"""Loading HF models one after the other, whole or layer by layer, and what they say."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from engine.core.errors import InputError
from engine.models.config import ModelConfig
from golden.check.check_prompts import CheckPrompt
from golden.check.eight_bits import EightBits, eight_bit_arithmetic, quantise_matrices
from golden.check.hf_states import Truth, make_truth
from golden.reference import cast, load_hf, quiet_transformers


def hf_truth(
    folder: Path,
    config: ModelConfig,
    prompts: Sequence[CheckPrompt],
    max_tokens: int,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    by_layer: bool,
    eight_bits: EightBits | None = None,
) -> Truth:
    """Truth in float32 and yardsticks in the 16-bit dtypes, freed when this returns.

    With `eight_bits` the yardsticks are HF with that, in float32 too.
    """
    quiet_transformers()
    if by_layer and eight_bits:
        raise InputError(
            f"{folder}: the float32 truth does not fit into memory, and 8-bit yardsticks are not "
            "computed layer by layer"
        )
    if by_layer:
        return _by_layer(folder, config, prompts, max_tokens, dtypes, device)
    model = _loaded(folder, device)
    truth = make_truth(model, prompts, max_tokens)
    wanted = [dtype for dtype in dtypes if eight_bits or dtype != torch.float32]
    for number, dtype in enumerate(wanted):
        if number:  # what one dtype has rounded is no start for the next
            del model
            release()
            model = _loaded(folder, device)
        if eight_bits and eight_bits.matrices:
            quantise_matrices(model)
        with eight_bit_arithmetic(model, eight_bits or _NOTHING):
            truth.add_yardstick(cast(model, dtype))
    del model
    release()
    return truth


_NOTHING = EightBits(matrices=False, kv=False)


def _loaded(folder: Path, device: torch.device) -> nn.Module:
    try:
        return load_hf(folder, torch.float32, device)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        text = str(error).splitlines()[0]
        raise InputError(f"{folder}: Transformers cannot load it: {text}") from error


def release() -> None:
    """Gives memory back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _by_layer(
    folder: Path,
    config: ModelConfig,
    prompts: Sequence[CheckPrompt],
    max_tokens: int,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> Truth:
    if config.moe is not None or config.fp8 is not None:
        raise InputError(
            f"{folder}: the float32 truth does not fit into memory, and only dense 16-bit models "
            "are computed layer by layer: make a reference on a larger machine (golden record)"
        )
    with streamed(folder, config, torch.float32, device) as model:
        truth = make_truth(model, prompts, max_tokens, generates=False)
    for dtype in dtypes:
        if dtype != torch.float32:
            with streamed(folder, config, dtype, device) as model:
                truth.add_yardstick(model)
    release()
    return truth


@contextmanager
def streamed(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Iterator[Any]:
    """An HF model of which only one layer's weights are in memory at a time."""
    import transformers

    raw = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            raw, dtype=dtype, attn_implementation="sdpa"
        )
    inner = model.model
    # Its frequencies are computed, not stored, so it must not be on the meta device.
    inner.rotary_emb = type(inner.rotary_emb)(config=raw).to(device)
    stored = _Stored(folder, dtype, device)
    stored.fill(inner.embed_tokens, "model.embed_tokens.")
    stored.fill(inner.norm, "model.norm.")
    if config.tie_word_embeddings:
        model.lm_head.weight = inner.embed_tokens.weight
    else:
        stored.fill(model.lm_head, "lm_head.")
    hooks = []
    for number, layer in enumerate(inner.layers):
        prefix = f"model.layers.{number}."
        hooks.append(layer.register_forward_pre_hook(_filler(stored, prefix)))
        hooks.append(layer.register_forward_hook(_emptier))
    try:
        yield model.eval()
    finally:
        for handle in hooks:
            handle.remove()


def _filler(stored: _Stored, prefix: str) -> Any:  # noqa: ANN401 (torch's hook)
    return lambda layer, _inputs: stored.fill(layer, prefix)


def _emptier(layer: nn.Module, _inputs: object, _output: object) -> None:
    layer.to("meta")


class _Stored:
    """Tensors of a folder by name, read when they are asked for."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device
        self._files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self._files.update(dict.fromkeys(file.keys(), path))

    def fill(self, module: nn.Module, prefix: str) -> None:
        """Gives a module its weights."""
        state = {name: self._read(prefix + name) for name in module.state_dict()}
        module.load_state_dict(state, assign=True)

    def _read(self, name: str) -> Tensor:
        if name not in self._files:
            raise InputError(f"{self._folder}: tensor {json.dumps(name)} is missing")
        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor.to(device=self._device, dtype=self._dtype)
