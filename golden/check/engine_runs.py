"""The engine along the truth's tokens: as asked, and in every way that must change nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.core.config import KernelConfig
from engine.options import EngineOptions
from golden.cases import ForcedSequence
from golden.check.check_plan import Defect
from golden.check.hf_states import Side, Truth
from golden.check.run_judge import Rows
from golden.check.ways import WAYS, Way, unmet, way_changes, way_sequences
from golden.forced import ForcedRunner, Observed
from golden.ranks import RankJob, RankReport, run_ranks
from golden.results import CaseResult
from golden.routes import ForcedRoutes, ScoreErrors
from golden.tensor_parallel import judge_ranks

RANK_TIMEOUT_S = 600.0
BASE = "as asked"


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One run: its rows, or why it could not be."""

    name: str
    rows: Sequence[Rows] = ()
    shared: frozenset[str] = frozenset()  # sequences that all ways have
    unmet: str = ""
    errors: ScoreErrors | None = None  # of the routers
    layers: Side | None = None
    measured: Mapping[str, float | str] = field(default_factory=dict)


def single_runs(
    options: EngineOptions,
    sequences: Sequence[ForcedSequence],
    device: torch.device,
    defect: Defect | None = None,
    truth: Truth | None = None,
) -> Iterator[EngineRun]:
    """All runs on one rank, which loads the model once.

    With the `truth` beside it the engine takes the truth's experts in 16 bits, and the states
    after each layer are kept.
    """
    few = way_sequences(sequences)
    shared = frozenset(item.name for item in few)
    with ForcedRunner(options, device=device) as runner:
        if defect is not None:
            defect(runner)
        forced = None
        if truth is not None and truth.routes and runner.runner.hidden.dtype != torch.float32:
            forced = ForcedRoutes(runner, truth.routes)
        observed = runner.run(sequences)
        errors = None if forced is None else forced.errors
        yield EngineRun(
            BASE, rows_of(runner, observed), shared, errors=errors, measured=_facts(observed)
        )
        layers = None if truth is None else engine_layers(runner, truth)
        for number, way in enumerate(WAYS):
            changes = way_changes(runner.config, way, few)
            if changes is None:
                yield EngineRun(way.name, unmet=_NO_POOL)
                continue
            observed = _serve(runner, way, few, changes)
            reason = unmet(way, (item.events for item in observed.values()))
            yield EngineRun(
                way.name,
                rows_of(runner, observed),
                shared,
                reason,
                layers=layers if number == 0 else None,
                measured=_facts(observed),
            )


_NO_POOL = "no pool size makes the kernel preempt one of these prompts"


def _serve(
    runner: ForcedRunner, way: Way, sequences: Sequence[ForcedSequence], changes: dict[str, object]
) -> dict[str, Observed]:
    runner.reset(**changes)
    try:
        if way.alone:
            alone: dict[str, Observed] = {}
            for item in sequences:
                alone |= runner.run([item])
            return alone
        if way.hit:
            runner.run(sequences)
        return runner.run(sequences)
    finally:
        runner.reset()


def rows_of(runner: ForcedRunner, observed: Mapping[str, Observed]) -> list[Rows]:
    """What a forced run computed, for a judge."""
    rows = []
    for item in observed.values():
        hidden = item.hidden()

        def logits(part: slice, hidden: Tensor = hidden) -> Tensor:
            return runner.logits(hidden[part])

        rows.append(Rows(item.sequence, item.positions, logits, item.drawn))
    return rows


def _facts(observed: Mapping[str, Observed]) -> dict[str, float | str]:
    events = [item.events for item in observed.values()]
    return {
        "num_prompts": len(events),
        "num_chunks": sum(event.num_chunks for event in events),
        "num_decodes": sum(event.num_decodes for event in events),
        "num_preemptions": sum(event.num_preemptions for event in events),
        "hit_tokens": sum(event.hit_tokens for event in events),
    }


@torch.inference_mode()
def engine_layers(runner: ForcedRunner, truth: Truth) -> Side | None:
    """The residual stream after each layer of the layered sequences, each computed whole.

    None where the engine runs other code than its layers' own (CUDA graphs, fused few rows).
    """
    if runner.runner.graphs is not None or runner.model.few_rows is not None:
        return None
    side = Side(truth.truth.head, truth.truth.dtype)
    states: list[Tensor] = []

    def keep(_layer: object, _inputs: object, output: tuple[Tensor, Tensor]) -> None:
        states.append((output[0] + output[1]).float())

    budget = runner.config.max_num_batched_tokens
    hooks = [layer.register_forward_hook(keep) for layer in runner.model.layers]
    try:
        for name in truth.layered:
            item = next(item for item in truth.sequences if item.name == name)
            whole = ForcedSequence(name, item.tokens[:-1], item.tokens[-1:])
            if len(whole.prompt) > budget:
                continue
            runner.reset(enable_prefix_caching=False)
            states.clear()
            runner.run([whole])
            side.layers[name] = list(states)
    finally:
        runner.reset()
        for handle in hooks:
            handle.remove()
    return side


def rank_runs(
    options: EngineOptions,
    sequences: Sequence[ForcedSequence],
    device: torch.device,
    defect: str | None,
    cases: list[CaseResult],
) -> Iterator[EngineRun]:
    """All runs on tensor-parallel ranks; that ranks agree among themselves is added to `cases`."""
    few = tuple(way_sequences(sequences))
    shared = frozenset(item.name for item in few)
    names, jobs = [BASE], [RankJob(options, tuple(sequences), defect)]
    config = _config_of(options)
    for way in WAYS:
        changes = way_changes(config, way, few)
        if changes is None:
            yield EngineRun(way.name, unmet=_NO_POOL)
            continue
        names.append(way.name)
        runs = 2 if way.hit else 1
        jobs.append(RankJob(options, few, defect, changes, way.alone, runs))
    size = options.tensor_parallel_size
    reports = run_ranks(jobs, size, device.type, RANK_TIMEOUT_S)
    by_name = {way.name: way for way in WAYS}
    for name, job, of_ranks in zip(names, jobs, reports, strict=True):
        first = of_ranks[0]
        cases.append(judge_ranks(f"{name}: {size} ranks agree", of_ranks))
        reason = unmet(by_name[name], first.events.values()) if name in by_name else ""
        yield EngineRun(name, _rank_rows(job, first), shared, reason)


def _config_of(options: EngineOptions) -> KernelConfig:
    assert options.num_kvcache_blocks is not None and options.max_model_len is not None
    return KernelConfig(
        num_blocks=options.num_kvcache_blocks,
        max_model_len=options.max_model_len,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        policy=options.policy,
        enable_prefix_caching=options.enable_prefix_caching,
    )


def _rank_rows(job: RankJob, report: RankReport) -> list[Rows]:
    assert report.logits is not None and report.positions is not None
    rows = []
    for item in job.sequences:
        logits = torch.from_numpy(report.logits[item.name])
        drawn = report.drawn[item.name]
        rows.append(Rows(item, report.positions[item.name], logits.__getitem__, drawn))
    return rows
