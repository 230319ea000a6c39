"""The GPU run: every golden suite in 16-bit dtypes, on the backends and shapes that users run.

One failing case never stops the others. With `device="cpu"` and `tiny=True` the very same code
runs on a CPU in small shapes, so that a GPU run cannot fail on trivialities.
"""

from __future__ import annotations

import gc
import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from engine.attention.select import select_backend
from engine.core.errors import ConfigError
from golden.cases import (
    ForcedSequence,
    ModelCase,
    qwen3_shape,
    random_batch,
    tiny_model,
    with_heads_of_16,
)
from golden.components.eight_bits import eight_bit_results
from golden.components.layers import Place
from golden.components.sampling import sampler_results
from golden.fp8_suite import GROUP as FP8
from golden.fp8_suite import fp8_results
from golden.invariance import Cell, Matrix, cells, make_workload
from golden.models import Reference, engine_options, full_reference
from golden.parts import (
    BATCH_LENGTHS,
    batch_reference,
    canary_results,
    component_cases,
    label_of,
    real_model_results,
    saved_tiny_model,
    shard_results,
)
from golden.reference import cast, load_hf, random_hf_model, save_config, save_model
from golden.results import Case, CaseResult, run_case, skipped
from golden.smollm2 import GROUP as SMOLLM2
from golden.smollm2 import Variant, each_dtype
from golden.tensor_parallel import rank_results

SHAPES = ("qwen3-0.6b", "qwen3-8b")
DTYPES = (torch.bfloat16, torch.float16)
# Lengths around the block and chunk boundaries of both backends; the last shares its prefix.
SHAPE_LENGTHS = (1, 17, 255, 256, 300, 700)
LARGE_SHAPE_LENGTHS = (17, 256, 500)
FORCED_TOKENS = 16
# On a GPU HF's own implementations of attention differ, and on real text more than c allows.
OTHER_ATTENTIONS = ("eager",)
RANK_TIMEOUT_S = 300.0  # kernels may have to be compiled by every rank
# A head size that every build of every backend serves.
SMALL_MODEL = "qwen3-head-64"
SPARSE_MODELS = ("qwen3-moe", "qwen3-moe-ties", "qwen2-moe-shared", "mixtral")


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """What to run and where."""

    device: str = "cuda"
    tiny: bool = False
    quick: bool = False
    tp: int = 1
    smollm2: Path | None = None
    shapes: tuple[str, ...] = ()  # only these large shapes, and nothing else

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes under test."""
        return DTYPES[:1] if self.quick else DTYPES

    @property
    def backends(self) -> dict[str, int]:
        """Attention backends and the block size that each is run with."""
        if self.device == "cpu":
            return {"triton": 16, "flash_attn": 256, "torch": 16}
        return {"triton": 16, "flash_attn": 256}

    def variants(self, max_model_len: int, budget: int) -> list[Variant]:
        """Backends, each with CUDA graphs and without."""
        found = []
        for backend, block_size in self.backends.items():
            for eager in (False, True):
                changes: dict[str, object] = {
                    "attention_backend": backend,
                    "block_size": block_size,
                    "enforce_eager": eager,
                    "max_num_batched_tokens": budget,
                    "max_model_len": max_model_len,
                    "num_kvcache_blocks": 8 * -(-max_model_len // block_size),
                }
                graphs = "eager" if eager else "graphs"
                found.append(Variant(f"{backend}, block {block_size}, {graphs}", changes))
        return found


def gpu_results(plan: GpuPlan) -> Iterator[CaseResult]:
    """All results, as they come."""
    with tempfile.TemporaryDirectory(prefix="lockstep-golden-") as name:
        for group, case_name, case in gpu_cases(plan, Path(name)):
            yield from run_case(group, case_name, case)
            _free_memory()


def gpu_cases(plan: GpuPlan, scratch: Path) -> Iterator[tuple[str, str, Case]]:
    """Every case by group and name; small ones first, so that an early end still tells much."""
    if plan.shapes:
        for shape in plan.shapes:
            yield shape, shape, partial(_shape, plan, scratch, shape)
        yield "tensor parallel", "ranks", partial(_ranks, plan, scratch)
        return
    for dtype in plan.dtypes:
        yield from _components(plan, dtype)
    yield "sampler", "sampler", lambda: sampler_results(torch.device(plan.device))
    yield "canaries", "canaries", partial(_canaries, plan, scratch)
    yield "tensor parallel", "shards", partial(_shards, scratch)
    for name in SPARSE_MODELS:
        yield "mixtures", name, partial(_sparse, plan, scratch, name)
    yield FP8, FP8, partial(_fp8, plan, scratch)
    yield "qwen3-0.6b", "qwen3-0.6b", partial(_shape, plan, scratch, "qwen3-0.6b")
    yield SMOLLM2, SMOLLM2, partial(_smollm2, plan, scratch)
    if not plan.quick:
        yield "qwen3-8b", "qwen3-8b", partial(_shape, plan, scratch, "qwen3-8b")
    yield "tensor parallel", "ranks", partial(_ranks, plan, scratch)
    yield "invariance", "invariance", partial(_invariance, plan, scratch)


def _components(plan: GpuPlan, dtype: torch.dtype) -> Iterator[tuple[str, str, Case]]:
    on_gpu = plan.device == "cuda"
    has_kernels = on_gpu and importlib.util.find_spec("triton") is not None
    sizes = {name: (256,) if name == "flash_attn" else (16, 256) for name in plan.backends}
    place = Place(torch.device(plan.device), dtype, has_kernels)
    yield from component_cases(place, {"torch": (16, 256), **sizes})


def _shape_case(plan: GpuPlan, name: str) -> ModelCase:
    """A published shape, or in a tiny run a small model with the same features."""
    if not plan.tiny:
        return qwen3_shape(name)
    tiny = {"qwen3-0.6b": "qwen3-gqa-tied", "qwen3-8b": "qwen3-untied-bias-yarn"}
    return tiny_model(tiny[name])


def _shape_sequences(plan: GpuPlan, case: ModelCase, name: str) -> list[ForcedSequence]:
    if plan.tiny:
        lengths: tuple[int, ...] = (1, 17, 60)
    else:
        lengths = SHAPE_LENGTHS if name == "qwen3-0.6b" else LARGE_SHAPE_LENGTHS
    return random_batch(case.settings["vocab_size"], lengths, FORCED_TOKENS)


def _shape(plan: GpuPlan, scratch: Path, name: str) -> Iterator[CaseResult]:
    """A Qwen3 shape with random weights that exist on the device only."""
    case = _shape_case(plan, name)
    model = random_hf_model(case, 0, plan.device)
    reference = Reference(_shape_sequences(plan, case, name))
    reference.add_truth(model)
    folders = {
        dtype: save_config(case, scratch / f"{name}-{label_of(dtype)}", dtype)
        for dtype in plan.dtypes
    }
    longest = max(len(item.tokens) for item in reference.sequences)
    yield from each_dtype(
        name,
        model,
        reference,
        plan.dtypes,
        plan.variants(longest + 1, 40 if plan.tiny else 512),
        lambda dtype, changes: engine_options(
            folders[dtype], dtype, plan.device, load_format="dummy", **changes
        ),
        plan.device,
        weights_from_model=True,
    )


def _sparse(plan: GpuPlan, scratch: Path, name: str) -> Iterator[CaseResult]:
    """A tiny mixture of experts in float32, where it must choose experts as HF does."""
    case = with_heads_of_16(tiny_model(name))
    _, folder = saved_tiny_model(case, scratch)
    model = load_hf(folder, torch.float32, plan.device)
    reference = Reference(random_batch(case.settings["vocab_size"], BATCH_LENGTHS, 14))
    reference.add_truth(model)
    longest = max(len(item.tokens) for item in reference.sequences)
    yield from each_dtype(
        "mixtures",
        model,
        reference,
        (torch.float32,),
        [replace(one, label=f"{name}, {one.label}") for one in plan.variants(longest + 1, 40)],
        lambda dtype, changes: engine_options(folder, dtype, plan.device, **changes),
        plan.device,
        weights_from_model=False,
    )


def _fp8(plan: GpuPlan, scratch: Path) -> Iterator[CaseResult]:
    """8-bit products by themselves, and models with 8-bit KV.

    Behind the products of a whole model, sums of 14 bits round some activations to the other side,
    so that a model is no test of them: its weights in 8 bits are judged on a CPU.
    """
    if plan.device == "cpu":
        yield skipped(FP8, FP8, "on a CPU golden/tests/test_fp8.py runs them")
        return
    yield from eight_bit_results(torch.device(plan.device))
    options = {"attention_backend": "triton", "block_size": 16}
    yield from fp8_results(scratch, plan.device, ("kv",), **options)


def _smollm2(plan: GpuPlan, scratch: Path) -> Iterator[CaseResult]:
    if plan.tiny:
        yield skipped(SMOLLM2, SMOLLM2, "a tiny run has no time for the real model")
        return
    variants = plan.variants(2049, 512)
    yield from real_model_results(
        scratch, plan.smollm2, plan.device, plan.dtypes, variants, OTHER_ATTENTIONS
    )


def _canaries(plan: GpuPlan, scratch: Path) -> Iterator[CaseResult]:
    """Each planted defect must be caught in each dtype, and the healthy model must pass."""
    case = tiny_model(SMALL_MODEL)
    _, folder = saved_tiny_model(case, scratch)
    for dtype in plan.dtypes:
        # From the folder: weights that are drawn on another device are other weights.
        model = load_hf(folder, torch.float32, plan.device)
        backend, block_size = _first_backend(plan, dtype)
        # Graphs would be captured before the defect is planted.
        options = engine_options(
            folder,
            dtype,
            plan.device,
            attention_backend=backend,
            block_size=block_size,
            enforce_eager=True,
            max_model_len=512,
            num_kvcache_blocks=8 * -(-512 // block_size),
        )
        reference = batch_reference(case, model, (dtype,))
        yield from canary_results(options, reference, dtype, plan.device)


def _first_backend(plan: GpuPlan, dtype: torch.dtype) -> tuple[str, int]:
    for name, block_size in plan.backends.items():
        if _unavailable(name, block_size, dtype, plan.device) is None:
            return name, block_size
    return "torch", 16


def _shards(scratch: Path) -> Iterator[CaseResult]:
    yield from shard_results(scratch, "qwen3-gqa-tied", (2, 4, 8))
    yield from shard_results(scratch, "qwen3-untied-bias-yarn", (2, 4))


def _ranks(plan: GpuPlan, scratch: Path) -> Iterator[CaseResult]:
    """Real ranks: NCCL on GPUs, gloo on a CPU."""
    if plan.tp == 1:
        yield skipped("tensor parallel", "ranks", "not asked for (--tp N)")
        return
    shapes = plan.shapes or SHAPES
    if "qwen3-0.6b" in shapes:
        yield from _ranks_of(plan, scratch, "qwen3-0.6b", plan.dtypes, list(plan.backends))
    if "qwen3-8b" in shapes and not plan.quick:
        # Writing and loading 16 GB takes its time: one dtype, one backend.
        yield from _ranks_of(plan, scratch, "qwen3-8b", plan.dtypes[:1], ["triton"])


def _ranks_of(
    plan: GpuPlan,
    scratch: Path,
    shape: str,
    dtypes: Sequence[torch.dtype],
    backends: Sequence[str],
) -> Iterator[CaseResult]:
    """All variants of one shape on `plan.tp` ranks."""
    case = _shape_case(plan, shape)
    for dtype in dtypes:
        folder = scratch / f"tp-{shape}-{label_of(dtype)}"
        model = random_hf_model(case, 0, plan.device)
        # The shorter list: rank 0 hands its logits over through a pipe.
        reference = Reference(_shape_sequences(plan, case, "qwen3-8b"))
        reference.add_truth(model)
        cast(model, dtype)
        reference.add_yardstick(model)
        save_model(model, folder)
        del model
        _free_memory()
        longest = max(len(item.tokens) for item in reference.sequences)
        for variant in plan.variants(longest + 1, 40 if plan.tiny else 512):
            label = f"{shape}, {plan.tp} ranks, {label_of(dtype)}, {variant.label}"
            backend = str(variant.changes["attention_backend"])
            if backend not in backends:
                continue
            reason = _unavailable(backend, plan.backends[backend], dtype, plan.device)
            if reason is not None:
                yield skipped("tensor parallel", label, reason)
                continue
            options = engine_options(
                folder, dtype, plan.device, tensor_parallel_size=plan.tp, **variant.changes
            )
            case_of_ranks = partial(
                rank_results, label, options, reference, dtype, plan.device, RANK_TIMEOUT_S
            )
            yield from run_case("tensor parallel", label, case_of_ranks)


def _invariance(plan: GpuPlan, scratch: Path) -> Iterator[CaseResult]:
    """The matrix on a small model: bfloat16 under graphs, float16 without."""
    case = tiny_model(SMALL_MODEL)
    _, folder = saved_tiny_model(case, scratch)
    for dtype in plan.dtypes:
        for backend, block_size in plan.backends.items():
            label = f"{backend}, {label_of(dtype)}"
            reason = _unavailable(backend, block_size, dtype, plan.device)
            if reason is not None:
                yield skipped("invariance", f"all cells of {label}", reason)
                continue
            sizes = (16, 32) if block_size == 16 else (block_size,)
            workload = make_workload(case.settings["vocab_size"], max(sizes))
            model = load_hf(folder, torch.float32, plan.device)
            reference = full_reference(model, workload.all_sequences, (dtype,))
            matrix = Matrix(folder, reference, workload, dtype, plan.device)
            policies: Sequence[str] = ("mixed", "prefill_first")
            if plan.quick or dtype == torch.float16:
                policies, sizes = policies[:1], sizes[:1]
            for cell in cells({backend: sizes}, policies):
                eager = dtype == torch.float16
                name = f"{cell.label} ({label})"
                yield from run_case("invariance", name, partial(_one_cell, matrix, cell, eager))


def _one_cell(matrix: Matrix, cell: Cell, eager: bool) -> Iterator[CaseResult]:
    yield matrix.run(cell, eager)


def _unavailable(backend: str, block_size: int, dtype: torch.dtype, device: str) -> str | None:
    """Why a backend cannot be used here, or None."""
    try:
        select_backend(backend, 64, block_size, dtype, device)
    except ConfigError as error:
        return str(error)
    return None


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
