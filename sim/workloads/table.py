"""The table that every workload becomes, and the token ids of its requests.

Token ids are synthetic and lazy. Three disjoint id spaces: hash ids of a trace below 2**40,
prefixes that sessions share, and one stripe per request for its own prompt and output tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from engine.core.request import Request
from engine.core.tokens import Prompt
from sim.workloads.arrivals import check_span

HASH_SPACE = 1 << 40
_SHARED_BASE = 1 << 41
_STRIPE_BASE = 1 << 42
_STRIPE = 1 << 24
_OUTPUT_OFFSET = 1 << 23
MAX_TOKENS = _OUTPUT_OFFSET
# Arrival of a row that is sent when the row before it in its chain has finished.
AFTER_PREDECESSOR = -1


def prompt_stripe(row: int, num_tokens: int) -> range:
    """Ids that only this row's prompt has."""
    base = _STRIPE_BASE + row * _STRIPE
    return range(base, base + num_tokens)


def output_stripe(row: int, num_tokens: int) -> range:
    """Ids of this row's output."""
    base = _STRIPE_BASE + row * _STRIPE + _OUTPUT_OFFSET
    return range(base, base + num_tokens)


def answered_row(span: range) -> int | None:
    """The row whose output begins with these ids; None where they are no output."""
    row, place = divmod(span.start - _STRIPE_BASE, _STRIPE)
    return row if row >= 0 and place == _OUTPUT_OFFSET else None


def shared_stripe(group: int, num_tokens: int) -> range:
    """Ids of a prefix that the requests of a group share."""
    base = _SHARED_BASE + group * _STRIPE
    return range(base, base + num_tokens)


@dataclass(frozen=True, slots=True)
class HashedPrefixes:
    """Hash ids of all rows, end to end; row i owns ids offsets[i] .. offsets[i + 1] - 1."""

    block_tokens: int
    ids: array[int]
    offsets: array[int]
    # Blocks that hold an answer, or part of one: the spans of their tokens.
    answers: dict[int, tuple[range, ...]] = field(default_factory=dict)

    def prompt(self, row: int, num_tokens: int) -> Prompt:
        """Spans of ids, one per hash id, joined where hash ids count upwards."""
        length, answers = self.block_tokens, self.answers
        spans: list[range] = []
        left = num_tokens
        for hash_id in self.ids[self.offsets[row] : self.offsets[row + 1]]:
            taken = min(length, left)
            if hash_id in answers:
                spans.extend(first_tokens(answers[hash_id], taken))
            else:
                spans.append(range(hash_id * length, hash_id * length + taken))
            left -= taken
        return Prompt.from_spans(spans)

    def block_spans(self, hash_id: int) -> tuple[range, ...]:
        """The tokens of a block."""
        own = range(hash_id * self.block_tokens, (hash_id + 1) * self.block_tokens)
        return self.answers.get(hash_id, (own,))

    def from_row(self, first: int, last: int) -> HashedPrefixes:
        """Rows `first` to `last` as rows of their own; answers of rows before are not known."""
        offsets = self.offsets[first : last + 2]
        answers = {}
        for hash_id, spans in self.answers.items():
            moved = [_moved(span, first) for span in spans]
            if None not in moved:
                answers[hash_id] = tuple(span for span in moved if span is not None)
        return HashedPrefixes(self.block_tokens, self.ids, offsets, answers)


def _moved(span: range, rows: int) -> range | None:
    """The span when each row's number falls by `rows`; None of a row that is then gone."""
    if span.start < _STRIPE_BASE:
        return span
    shift = rows * _STRIPE
    if span.start - shift < _STRIPE_BASE:
        return None
    return range(span.start - shift, span.stop - shift)


def first_tokens(spans: Iterable[range], num_tokens: int) -> Iterator[range]:
    """The spans of the first tokens."""
    for span in spans:
        if num_tokens <= 0:
            return
        yield span[:num_tokens]
        num_tokens -= len(span)


@dataclass(frozen=True, slots=True)
class Sessions:
    """Chains of turns: each prompt repeats the whole conversation before it.

    `previous[row]` is the turn before, or -1; `shared_tokens` open every prompt.
    """

    previous: array[int]
    new_tokens: array[int]
    shared_tokens: int

    def prompt(self, row: int, output_tokens: array[int]) -> Prompt:
        """Shared prefix, all earlier prompts and answers, and the new tokens."""
        spans: list[range] = [prompt_stripe(row, self.new_tokens[row])]
        turn = self.previous[row]
        while turn >= 0:
            spans.append(output_stripe(turn, output_tokens[turn]))
            spans.append(prompt_stripe(turn, self.new_tokens[turn]))
            turn = self.previous[turn]
        spans.append(shared_stripe(0, self.shared_tokens))
        return Prompt.from_spans(reversed(spans))


@dataclass(frozen=True, slots=True)
class Texts:
    """Token ids of each row's own text, end to end; `previous[row]` is the turn before, or -1.

    A prompt repeats all earlier texts and answers of its conversation.
    """

    ids: array[int]
    offsets: array[int]
    previous: array[int]

    def prompt(self, row: int, output_tokens: array[int]) -> Prompt:
        """Earlier texts and answers, and the row's own text."""
        spans: list[range | array[int]] = [self._own(row)]
        turn = self.previous[row]
        while turn >= 0:
            spans.append(output_stripe(turn, output_tokens[turn]))
            spans.append(self._own(turn))
            turn = self.previous[turn]
        return Prompt.from_spans(reversed(spans))

    def _own(self, row: int) -> array[int]:
        return self.ids[self.offsets[row] : self.offsets[row + 1]]


@dataclass(slots=True)
class Workload:
    """Requests as columns, in order of arrival where the arrival is known.

    A row with arrival `AFTER_PREDECESSOR` is sent `think_ns[row]` after the row whose `next_row`
    it is has finished. `left_out` counts rows of a trace by why they are not here; `notes` are
    sentences about how it was read.
    """

    name: str
    arrival_ns: array[int]
    prompt_tokens: array[int]
    output_tokens: array[int]
    request_ids: list[str] | None = None
    next_row: array[int] | None = None
    think_ns: array[int] | None = None
    hashed: HashedPrefixes | None = None
    sessions: Sessions | None = None
    texts: Texts | None = None
    priorities: array[int] | None = None
    num_sessions: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    parameters: dict[str, object] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def prompt(self, row: int) -> Prompt:
        """The lazy prompt of a row."""
        if self.hashed is not None:
            return self.hashed.prompt(row, self.prompt_tokens[row])
        if self.sessions is not None:
            return self.sessions.prompt(row, self.output_tokens)
        if self.texts is not None:
            return self.texts.prompt(row, self.output_tokens)
        return Prompt(prompt_stripe(row, self.prompt_tokens[row]))

    def request_id(self, row: int) -> int | str:
        """The trace's id of a row, else its number."""
        return row if self.request_ids is None else self.request_ids[row]

    def request(self, row: int) -> Request:
        """What is sent to a server."""
        outputs, priority = self.output_tokens[row], self.priority(row)
        return Request(self.request_id(row), self.prompt(row), outputs, priority=priority)

    def priority(self, row: int) -> int:
        """The priority of a row; 0 where the workload has none."""
        return 0 if self.priorities is None else self.priorities[row]

    def successor(self, row: int) -> int:
        """The row that waits for this one, or -1."""
        return -1 if self.next_row is None else self.next_row[row]

    def scale_arrivals(self, factor: float) -> None:
        """Divides all arrival times, for a rate `factor` times as high.

        Raises:
            ConfigError: the last one would lie beyond what the clock can count.
        """
        check_span("rate_scale", factor, max(self.arrival_ns, default=0) / factor)
        self.arrival_ns = array(
            "q", [time if time < 0 else round(time / factor) for time in self.arrival_ns]
        )
        self.parameters["rate_scale"] = factor

    def mean_rate(self) -> float | None:
        """Rows / (last - first arrival), or None where that is not defined."""
        times = [time for time in self.arrival_ns if time >= 0]
        if len(times) < 2 or times[-1] == times[0]:
            return None
        return len(times) / ((times[-1] - times[0]) / 1e9)
