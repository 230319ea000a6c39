"""What one committed step gave: the loop makes it, requests and measurements read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.plan import StepOutcome, StepPlan
from engine.core.request import RequestId


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Log probabilities of the sampled rows, one entry per row in every column."""

    sampled: list[float]
    ranks: list[int]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


@dataclass(frozen=True, slots=True)
class PromptRows:
    """A part of a prompt whose log probabilities a step gave: `count` tokens from `first` on."""

    request_id: RequestId
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """One step after its commit; tokens and logprobs are in the order of `plan.sampled_ids`,
    voided entries included. `prompt_logprobs` has a row per token of `prompt_rows`."""

    plan: StepPlan
    token_ids: Sequence[int]
    outcome: StepOutcome
    start_ns: int
    end_ns: int
    duration_ns: int
    host_ns: int
    device_ns: int | None
    graph_bucket: int | None
    logprobs: StepLogprobs | None = None
    prompt_rows: tuple[PromptRows, ...] = ()
    prompt_logprobs: StepLogprobs | None = None
