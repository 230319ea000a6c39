"""All prompts of a reference at one load after the other, judged and compared with each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch

from golden.endpoint.dialect import (
    Dialect,
    Place,
    PromptAnswer,
    TextAnswer,
    ask_prompt,
    ask_text,
    find_dialect,
)
from golden.endpoint.http_client import Client, EndpointProblem, Refused
from golden.stored.reference_file import StoredReference, StoredSequence, check_dtype
from golden.stored.stored_rules import Seen, StoredJudge, StoredStats

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EndpointPlan:
    """What to ask of which server. `levels` are requests at a time."""

    client: Client
    model: str | None
    dtype: str
    levels: tuple[int, ...] = (1, 8)
    repeats: int = 2


@dataclass(frozen=True, slots=True)
class Answers:
    """What a server said of one sequence."""

    prompt: PromptAnswer | None
    text: TextAnswer


@dataclass(frozen=True, slots=True)
class LevelResult:
    """One pass over all prompts at one load.

    The last three compare it with the first pass: answers that are not the same numbers, their
    largest difference, and greedy texts that differ.
    """

    concurrency: int
    repeat: int
    stats: StoredStats
    num_answers: int
    num_other: int
    largest_difference: float
    num_other_texts: int

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.concurrency} at a time, pass {self.repeat}"


@dataclass(frozen=True, slots=True)
class EndpointOutcome:
    """Everything that was found of a server."""

    model: str
    dialect: Dialect
    dtype: str
    refused: tuple[str, ...]
    results: tuple[LevelResult, ...]

    @property
    def passed(self) -> bool:
        """Whether no rule is broken at any load."""
        return all(result.stats.passed for result in self.results)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "model": self.model,
            "dialect": self.dialect.name,
            "tells": self.dialect.tells,
            "dtype": self.dtype,
            "refused": list(self.refused),
            "passes": [{"name": result.name, **asdict(result)} for result in self.results],
        }


def check_endpoint(plan: EndpointPlan, reference: StoredReference, say: Say) -> EndpointOutcome:
    """Asks for all prompts at every load.

    Raises:
        EndpointProblem: the server does not answer, or tells nothing that can be judged.
    """
    check_dtype(reference, plan.dtype)
    model = plan.model or plan.client.models()[0]
    probe = min(
        (item for item in reference.sequences if len(item.sequence.prompt) > 1),
        key=lambda item: len(item.sequence.prompt),
        default=reference.sequences[0],
    )
    dialect = find_dialect(plan.client, model, probe.sequence.prompt)
    say(f"{plan.client.url}: {model}, asked by {dialect.name}: tells {dialect.tells}")
    results: list[LevelResult] = []
    refused: dict[str, str] = {}
    first: dict[str, Answers] | None = None
    for level in plan.levels:
        for repeat in range(1, plan.repeats + 1):
            answers = _ask_all(plan.client, model, dialect, reference, level, refused)
            first = answers if first is None else first
            result = _judge(plan.dtype, reference, level, repeat, answers, first)
            results.append(result)
            say(f"  {'pass' if result.stats.passed else 'fail'}: {result.name}")
    return EndpointOutcome(model, dialect, plan.dtype, tuple(refused.values()), tuple(results))


def _ask_all(
    client: Client,
    model: str,
    dialect: Dialect,
    reference: StoredReference,
    level: int,
    refused: dict[str, str],
) -> dict[str, Answers]:
    def ask(item: StoredSequence) -> Answers | Refused:
        sequence = item.sequence
        try:
            prompt = None
            if dialect.prompt_fields is not None:
                # The whole sequence is the prompt, so that every place is judged on its own.
                prompt = ask_prompt(client, model, dialect, sequence.tokens)
            text = ask_text(client, model, dialect, sequence.prompt, len(sequence.forced))
            return Answers(prompt, text)
        except Refused as error:
            return error

    with ThreadPoolExecutor(level) as pool:
        found = list(pool.map(ask, reference.sequences))
    answers: dict[str, Answers] = {}
    for item, answer in zip(reference.sequences, found, strict=True):
        if isinstance(answer, Refused):
            refused.setdefault(item.name, f"{item.name}: {answer}")
        else:
            answers[item.name] = answer
    if not answers:
        raise EndpointProblem(f"{next(iter(refused.values()))}: every prompt was refused")
    return answers


def _judge(
    dtype: str,
    reference: StoredReference,
    level: int,
    repeat: int,
    answers: dict[str, Answers],
    first: dict[str, Answers],
) -> LevelResult:
    judge = StoredJudge(reference, dtype)
    for item in reference.sequences:
        if item.name in answers:
            for seen in seen_of(item, answers[item.name]):
                judge.add(seen)
    compared = [name for name in answers if name in first]
    differences = [_difference(answers[name], first[name]) for name in compared]
    other_texts = [
        name for name in compared if _words(answers[name].text) != _words(first[name].text)
    ]
    return LevelResult(
        concurrency=level,
        repeat=repeat,
        stats=judge.finish(),
        num_answers=len(compared),
        num_other=sum(value > 0 for value in differences),
        largest_difference=max(differences, default=0.0),
        num_other_texts=len(other_texts),
    )


def _words(text: TextAnswer) -> object:
    return text.text if text.token_ids is None else text.token_ids


def _difference(mine: Answers, first: Answers) -> float:
    """Largest difference of a log-probability, as far as both went the same way."""
    pairs: list[tuple[float | None, float | None]] = []
    if mine.prompt is not None and first.prompt is not None:
        pairs += zip(mine.prompt.tokens, first.prompt.tokens, strict=False)
    if _words(mine.text) == _words(first.text):
        pairs += zip(mine.text.tokens, first.text.tokens, strict=False)
    return max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=0.0)


def seen_of(item: StoredSequence, answers: Answers) -> Iterator[Seen]:
    """An answer in the reference's columns: the prompt's, and the text's as far as it follows."""
    told = answers.prompt
    if told is not None:
        rows = list(range(len(told.tokens)))
        best = {row: token for row, token in enumerate(told.best) if token is not None}
        yield _seen(item, rows, told.tokens, told.places, best, follows=False)
    text, sequence = answers.text, item.sequence
    if text.token_ids is None:
        return
    start = len(sequence.prompt) - 1
    drawn: dict[int, int] = {}
    for output, (token, wanted) in enumerate(zip(text.token_ids, sequence.forced, strict=False)):
        drawn[start + output] = token
        if token != wanted:
            break
    rows = sorted(drawn)
    count = len(rows)
    # A log-probability of another token than the reference's is found among the likeliest.
    tokens = [
        value if drawn[row] == sequence.tokens[row + 1] else None
        for row, value in zip(rows, text.tokens[:count], strict=True)
    ]
    places = [
        place if value is None else {**place, drawn[row]: value}
        for row, place, value in zip(rows, text.places, text.tokens, strict=False)
    ]
    yield _seen(item, rows, tokens, places, drawn, follows=True)


def _seen(
    item: StoredSequence,
    rows: Sequence[int],
    tokens: Sequence[float | None],
    places: Sequence[Place],
    drawn: dict[int, int],
    follows: bool,
) -> Seen:
    nan = math.nan
    tops = [
        [place.get(token, nan) for token in item.top_ids[row].tolist()]
        for row, place in zip(rows, places, strict=True)
    ]
    return Seen(
        item.name,
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(tops, dtype=torch.float64).reshape(len(rows), item.top_ids.shape[1]),
        torch.tensor([nan if value is None else value for value in tokens], dtype=torch.float64),
        drawn,
        follows,
    )
