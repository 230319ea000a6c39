"""One check from beginning to end: truth, engine, judgement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.core.errors import InputError
from golden.check.check_plan import CheckPlan, Say, Setting, engine_for, kv_bytes_of, make_setting
from golden.check.eight_bits import eight_bits_of
from golden.check.engine_runs import EngineRun, rank_runs, single_runs
from golden.check.hf_side import hf_truth, release
from golden.check.hf_states import NUM_NUDGES, Truth
from golden.check.memory_need import need_of
from golden.check.run_judge import Judge, Judgement, latest_logits, side_errors
from golden.compare import FP32_ATOL, FP32_RTOL
from golden.results import CaseResult, judged, skipped
from golden.routes import score_violations

GROUP = "check"
# Logits by sequence and position.
ByPosition = Mapping[str, Mapping[int, Tensor]]


@dataclass(slots=True)
class CheckOutcome:
    """Everything that a check found."""

    setting: Setting
    memory: list[str]
    cases: list[CaseResult] = field(default_factory=list)
    base: Judgement | None = None
    layers: dict[str, list[float]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether no rule is broken."""
        return all(case.ok for case in self.cases)


def check_model(plan: CheckPlan, say: Say) -> CheckOutcome:
    """Runs a check; `say` gets lines for people as it goes.

    Raises:
        ConfigError, InputError: the model cannot be checked here.
    """
    setting = make_setting(plan)
    truth, memory = truth_for(setting, say)
    outcome = CheckOutcome(setting, memory)
    compare_engine(plan, setting, truth, outcome, say)
    return outcome


def truth_for(
    setting: Setting, say: Say, dtypes: Sequence[torch.dtype] = ()
) -> tuple[Truth, list[str]]:
    """HF's side of a check, after saying what memory it takes."""
    refuse_stored_eight_bits(setting)
    wanted = tuple(dtypes) or (setting.dtype,)
    num_yardsticks = sum(1 + NUM_NUDGES for dtype in wanted if dtype != torch.float32)
    need = need_of(
        setting.folder,
        setting.config,
        setting.dtype,
        setting.device,
        setting.num_positions,
        kv_bytes_of(setting),
        num_yardsticks,
        setting.options.tensor_parallel_size,
    )
    for line in need.lines():
        say(line)
    need.check()
    say(f"HF Transformers: {len(setting.prompts)} prompts, {setting.num_positions:,} positions")
    truth = hf_truth(
        setting.folder,
        setting.config,
        setting.prompts,
        setting.max_tokens,
        wanted,
        setting.device,
        need.by_layer,
        eight_bits_of(setting.options),
    )
    return truth, need.lines()


def refuse_stored_eight_bits(setting: Setting) -> None:
    """HF cannot run a checkpoint that is stored in 8 bits on every machine."""
    if setting.config.fp8 is not None:
        raise InputError(
            f"{setting.folder}: is stored in 8-bit floats, which HF does not compute on every "
            "machine: check its 16-bit original with --quantization fp8"
        )


def compare_engine(
    plan: CheckPlan, setting: Setting, truth: Truth, outcome: CheckOutcome, say: Say
) -> None:
    """The engine forced along the truth's tokens, in every way to be served."""
    has_routes = bool(truth.routes) and setting.dtype != torch.float32
    options = engine_for(plan, truth.sequences, needs_eager=has_routes)
    if options.tensor_parallel_size > 1 and has_routes:
        raise InputError(
            "mixtures of experts on several ranks are compared in float32 only (--dtype float32): "
            "their choice of experts cannot be forced across processes"
        )
    say(f"engine: {options.tensor_parallel_size} rank(s), {str(setting.dtype)[6:]}")
    if options.tensor_parallel_size > 1:
        runs = rank_runs(options, truth.sequences, setting.device, plan.rank_defect, outcome.cases)
    else:
        runs = single_runs(options, truth.sequences, setting.device, plan.defect, truth)
    base: ByPosition = {}
    for run in runs:
        if run.unmet:
            outcome.cases.append(skipped(GROUP, run.name, run.unmet))
            continue
        case, judgement, logits = judge_run(run, truth, setting.dtype, base)
        outcome.cases.append(case)
        say(f"  {case.status}: {run.name}")
        if not base:
            base, outcome.base = logits, judgement
        if run.layers is not None:
            layer_case = judge_layers(run, truth, outcome)
            outcome.cases.extend(layer_case)
    release()


def judge_run(
    run: EngineRun, truth: Truth, dtype: torch.dtype, base: ByPosition
) -> tuple[CaseResult, Judgement, ByPosition]:
    """(result, judgement, logits by position of the sequences that all ways share)."""
    judge = Judge(truth, dtype)
    logits: dict[str, dict[int, Tensor]] = {}
    for rows in run.rows:
        judge.add(rows)
        if rows.sequence.name in run.shared:
            logits[rows.sequence.name] = latest_logits(rows)
    judgement = judge.finish()
    stats = judgement.stats
    problems = list(stats.violations)
    if run.errors is not None and truth.score_errors.count:
        problems += score_violations(run.errors, truth.score_errors)
    measured: dict[str, float | str] = {**run.measured}
    if base:
        distance, over = _distance(logits, base)
        measured["distance_to_base"] = distance
        measured["bitwise"] = "yes" if distance == 0 else "no"
        if dtype == torch.float32 and over > 1 and not truth.yardsticks:
            problems.append(f"{over:.1f} x the bound away from {GROUP} as asked")
    else:
        measured["bitwise"] = "base"
        measured["distance_to_base"] = 0.0
    status = "fail" if problems else "pass"
    stats = replace(stats, violations=tuple(problems))
    case = CaseResult(GROUP, run.name, status, "; ".join(problems), stats, measured)
    return case, judgement, logits


def _distance(logits: ByPosition, base: ByPosition) -> tuple[float, float]:
    """(largest difference to the base, the largest over the float32 bound) where both computed."""
    distance = over = 0.0
    for name, rows in logits.items():
        both = sorted(rows.keys() & base[name].keys())
        if not both:
            continue
        mine, wanted = (torch.stack([side[p] for p in both]) for side in (rows, base[name]))
        difference = (mine - wanted).abs().amax(-1)
        bound = FP32_ATOL + FP32_RTOL * wanted.abs().amax(-1)
        distance = max(distance, float(difference.max()))
        over = max(over, float((difference / bound).max()))
    return distance, over


def judge_layers(run: EngineRun, truth: Truth, outcome: CheckOutcome) -> Iterator[CaseResult]:
    """Errors of the residual stream after each layer; a number to find a fault by, no rule."""
    assert run.layers is not None
    mine = side_errors(run.layers, truth.truth)
    if not mine:
        return
    outcome.layers["engine"] = [error / max(size, 1e-30) for error, size in mine]
    if truth.yardsticks:
        hf = side_errors(truth.yardsticks[0], truth.truth)
        outcome.layers["HF in the dtype"] = [error / max(size, 1e-30) for error, size in hf]
    yield judged(GROUP, "after each layer", [], worst_layer=max(outcome.layers["engine"]))
