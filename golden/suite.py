"""`lockstep golden run`: every suite in small shapes on a CPU, as `pytest golden` runs them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from golden.cases import TINY_MODELS, ModelCase, tiny_model
from golden.components.layers import Place
from golden.components.sampling import sampler_results
from golden.fp8_suite import GROUP as FP8
from golden.fp8_suite import fp8_results
from golden.invariance import Matrix, cells, make_workload
from golden.models import Reference, engine_options, full_reference, run_model
from golden.parts import (
    batch_reference,
    canary_results,
    component_cases,
    label_of,
    real_model_results,
    saved_tiny_model,
    shard_results,
)
from golden.results import Case, CaseResult, from_stats, run_case
from golden.smollm2 import GROUP as SMOLLM2
from golden.smollm2 import Variant
from golden.tensor_parallel import rank_results

CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MATRIX_SIZES = {"torch": (1, 16, 32)}
ATTENTION = {"torch": (1, 16, 256)}
# The model of the suites that need one only.
MODEL = "qwen3-gqa-tied"


def cpu_results(smollm2: Path | None = None) -> Iterator[CaseResult]:
    """All results, as they come."""
    with tempfile.TemporaryDirectory(prefix="lockstep-golden-") as name:
        for group, case_name, case in _cases(Path(name), smollm2):
            yield from run_case(group, case_name, case)


def _cases(scratch: Path, smollm2: Path | None) -> Iterator[tuple[str, str, Case]]:
    for dtype in CPU_DTYPES:
        yield from component_cases(Place(torch.device("cpu"), dtype), ATTENTION)
    yield "sampler", "sampler", lambda: sampler_results(torch.device("cpu"))
    for case in TINY_MODELS:
        yield "models", case.name, partial(tiny_model_results, case, scratch)
    yield "canaries", "canaries", partial(_canaries, scratch)
    yield "invariance", "invariance", partial(_matrix, scratch)
    yield "tensor parallel", "tensor parallel", partial(_parallel, scratch)
    yield FP8, FP8, partial(fp8_results, scratch)
    variant = Variant("torch", {"max_num_batched_tokens": 512, "max_model_len": 2049})
    real = partial(real_model_results, scratch, smollm2, "cpu", CPU_DTYPES[:2], [variant])
    yield SMOLLM2, SMOLLM2, real


def tiny_reference(case: ModelCase, scratch: Path) -> tuple[Reference, Path]:
    """HF's logits of a tiny model in every dtype of the CPU, and the model's folder."""
    model, folder = saved_tiny_model(case, scratch)
    return batch_reference(case, model, CPU_DTYPES), folder


def tiny_model_results(case: ModelCase, scratch: Path) -> Iterator[CaseResult]:
    """One tiny model in every dtype, chunked and batched."""
    reference, folder = tiny_reference(case, scratch)
    for dtype in CPU_DTYPES:
        stats, observed = run_model(engine_options(folder, dtype, "cpu"), reference, dtype)
        hits = sum(item.events.hit_tokens for item in observed.values())
        yield from_stats("models", f"{case.name}, {label_of(dtype)}", stats, hit_tokens=hits)


def _canaries(scratch: Path) -> Iterator[CaseResult]:
    reference, folder = tiny_reference(tiny_model(MODEL), scratch)
    for dtype in CPU_DTYPES:
        yield from canary_results(engine_options(folder, dtype, "cpu"), reference, dtype, "cpu")


def _matrix(scratch: Path) -> Iterator[CaseResult]:
    """The invariance matrix of a tiny model."""
    case, dtype = tiny_model(MODEL), torch.float32
    model, folder = saved_tiny_model(case, scratch)
    workload = make_workload(case.settings["vocab_size"], max(MATRIX_SIZES["torch"]))
    reference = full_reference(model, workload.all_sequences, (dtype,))
    matrix = Matrix(folder, reference, workload, dtype, "cpu")
    for cell in cells(MATRIX_SIZES):
        yield matrix.run(cell)


def _parallel(scratch: Path) -> Iterator[CaseResult]:
    """Shards of 2 to 8 ranks, and two real ranks against HF."""
    yield from shard_results(scratch, MODEL, (2, 4, 8))
    case, dtype = tiny_model(MODEL), torch.float32
    model, folder = saved_tiny_model(case, scratch)
    options = engine_options(folder, dtype, "cpu", tensor_parallel_size=2)
    reference = batch_reference(case, model, (dtype,))
    yield from rank_results("2 gloo ranks", options, reference, dtype)
