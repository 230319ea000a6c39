"""The growing columns of one trace: checks each row and adds it, or counts why it is left out."""

from __future__ import annotations

from array import array
from collections import Counter
from decimal import Decimal
from pathlib import Path

from engine.core.errors import InputError
from sim.workloads.blocks import BlockNames
from sim.workloads.conversations import Encode, text_of
from sim.workloads.formats import TraceFormat, arrival_time_ns
from sim.workloads.table import AFTER_PREDECESSOR
from sim.workloads.text import Row, field, time_ns, token_count, whole

NO_OUTPUT, NO_PROMPT = "it has no output tokens", "it has no prompt tokens"
ORPHAN = "its session's row before was left out"


class Columns:
    """The columns of a trace with how they are read.

    `encode` makes tokens of a text format's texts; `output_tokens` is the length of answers that
    have none. Rows outside the window, in ns from the first row, are passed over.
    """

    def __init__(
        self, path: Path, known: TraceFormat, block_units: int, chars_per_token: int,
        encode: Encode | None, output_tokens: int | None, skip_bad: bool,
        window_ns: tuple[int, int | None],
    ) -> None:  # fmt: skip
        self._path, self._format = path, known
        self._block_units, self._chars = block_units, chars_per_token
        self._encode, self._output_default = encode, output_tokens
        self._skip_bad, self._window = skip_bad, window_ns
        self.arrival_ns, self.think_ns = array("q"), array("q")
        self.prompt_tokens, self.output_tokens = array("q"), array("q")
        self.priorities, self.previous = array("q"), array("q")
        self.request_ids: list[str] = []
        self._seen: set[str] = set()
        self._last_of: dict[str, int] = {}
        self.num_roots = 0
        self.block_tokens = block_units
        if known.chars and block_units:
            self.block_tokens = max(1, block_units // chars_per_token)
        self._names = BlockNames(self.block_tokens) if block_units else None
        self.ids, self.offsets = array("q"), array("q", [0])
        self.left_out: Counter[str] = Counter()
        self.first_left_out = ""
        self.outside_window = 0
        self.past_window = False
        self._first_ns: int | None = None
        self._newest_ns = 0

    def __len__(self) -> int:
        return len(self.output_tokens)

    def append(self, row: Row) -> None:
        """Checks one row and adds it, or counts why not.

        Raises:
            InputError: a value is impossible, or the row is bad and bad rows are errors.
        """
        if row.left_out:
            self._leave_out(row, row.left_out)
            return
        follows = self._follows(row)
        arrival = AFTER_PREDECESSOR if follows else self._arrival(row)
        if not follows and not self._is_inside(arrival):
            return
        lengths = self._lengths(row)
        if lengths is None:
            return
        previous = self._previous(row)
        if follows and previous < 0:
            self._leave_out(row, ORPHAN)
            return
        if self._format.request_id:
            self._append_id(row, self._format.request_id)
        self._append_tokens(row, lengths, previous)
        self.arrival_ns.append(arrival)
        self.think_ns.append(self._think_ns(row) if follows else 0)
        self.priorities.append(whole(self._path, row, "priority", 0))
        self.previous.append(previous)
        self._remember(row)

    def _follows(self, row: Row) -> bool:
        """Whether the row waits for the one before it in its session."""
        known = self._format
        if not known.delay or row.fields.get(known.delay) is None:
            return False
        return not known.arrival or row.fields.get(known.arrival) is None

    def _think_ns(self, row: Row) -> int:
        assert self._format.delay is not None
        return time_ns(self._path, row, self._format.delay, self._format.delay_ns)

    def _arrival(self, row: Row) -> int:
        known = self._format
        if not known.arrival:
            return 0
        field(self._path, row, known.arrival)
        time = arrival_time_ns(self._path, row, known)
        if self._first_ns is None:
            self._first_ns = time
        if not known.measured and time < self._newest_ns:
            raise InputError(
                f"{self._path}:{row.line}: {known.arrival}={row.fields[known.arrival]!r}: lies"
                " before the row above; arrivals must be sorted"
            )
        self._newest_ns = time
        return time

    def _is_inside(self, time: int) -> bool:
        start, end = self._window
        if not start and end is None:
            return True
        since = time - (self._first_ns or 0)
        self.past_window = end is not None and since >= end and not self._format.measured
        if since < start or (end is not None and since >= end):
            self.outside_window += 1
            return False
        return True

    def _lengths(self, row: Row) -> tuple[int, int] | None:
        """Units of prompt and output; None where the row is left out."""
        known, path = self._format, self._path
        if known.text:
            return (1, 1) if self._has_text(row) else None
        prompt = token_count(path, row, known.prompt)
        output = token_count(path, row, known.output)
        if known.total and token_count(path, row, known.total) != prompt + output:
            raise InputError(
                f"{path}:{row.line}: {known.total}={row.fields[known.total]!r}:"
                f" is not {prompt} + {output}"
            )
        if not prompt or not output:
            column = known.output if prompt else known.prompt
            detail = f"{column}={row.fields[column]!r}: must be at least 1"
            self._leave_out(row, NO_OUTPUT if prompt else NO_PROMPT, detail)
            return None
        return prompt, output

    def _has_text(self, row: Row) -> bool:
        answer = row.fields.get(self._format.output)
        if not row.fields[self._format.prompt]:
            self._leave_out(row, NO_PROMPT)
        elif answer == "" or answer == 0:
            self._leave_out(row, NO_OUTPUT)
        elif answer is None and self._output_default is None:
            raise InputError(
                f"{self._path}:{row.line}: has no output length; give one as --output-len"
            )
        else:
            return True
        return False

    def _append_tokens(self, row: Row, lengths: tuple[int, int], previous: int) -> None:
        prompt, output = lengths
        if self._format.text:
            prompt, output = self._append_text(row, previous)
        elif self._names is not None:
            self._append_hashes(row, -(-prompt // self._block_units))
        if self._format.chars:
            per_token = self._chars
            blocks, rest = divmod(prompt, self._block_units)
            prompt = blocks * self.block_tokens
            prompt += min(self.block_tokens, -(-rest // per_token))
            output = -(-output // per_token)
        self.prompt_tokens.append(prompt)
        self.output_tokens.append(output)

    def _append_text(self, row: Row, previous: int) -> tuple[int, int]:
        assert self._encode is not None
        own = self._encode(row.fields[self._format.prompt])
        self.ids.extend(own)
        self.offsets.append(len(self.ids))
        answer = row.fields.get(self._format.output)
        text = text_of(answer)
        if answer is None:
            output = self._output_default or 1
        elif text is not None:
            output = max(1, len(self._encode(text)))
        else:
            output = token_count(self._path, row, self._format.output)
        before = 0
        if previous >= 0:
            before = self.prompt_tokens[previous] + self.output_tokens[previous]
        return before + len(own), output

    def _append_hashes(self, row: Row, num_blocks: int) -> None:
        ids = id_list(field(self._path, row, "hash_ids"))
        where = f"{self._path}:{row.line}: hash_ids"
        if ids is None:
            value = str(row.fields["hash_ids"])[:60]
            raise InputError(f"{where}={value!r}: must be a list of whole numbers")
        if len(ids) != num_blocks:
            raise InputError(
                f"{where}: has {len(ids)} ids, but the prompt has {num_blocks} blocks of"
                f" {self._block_units}; --hash-block-tokens gives another size"
            )
        assert self._names is not None
        self.ids.extend(self._names.of(ids))
        self.offsets.append(len(self.ids))

    def _append_id(self, row: Row, column: str) -> None:
        value = field(self._path, row, column)
        if isinstance(value, Decimal) or not isinstance(value, str | int) or value == "":
            raise InputError(f"{self._path}:{row.line}: {column}={value!r}: must be an id")
        name = str(value)
        if name in self._seen:
            raise InputError(f"{self._path}:{row.line}: {column}={name!r}: occurs twice")
        self._seen.add(name)
        self.request_ids.append(name)

    # Sessions ---------------------------------------------------------------------------------

    def _previous(self, row: Row) -> int:
        """The kept row that this one continues, or -1."""
        known = self._format
        if known.parent:
            return self._last_of.get(str(row.fields.get(known.parent[1])), -1)
        session = row.fields.get(known.session) if known.session else None
        return -1 if session is None else self._last_of.get(str(session), -1)

    def _remember(self, row: Row) -> None:
        known = self._format
        name = row.fields.get(known.parent[0] if known.parent else known.session or "")
        if name is None:
            return
        if self.previous[-1] < 0:
            self.num_roots += 1
        self._last_of[str(name)] = len(self) - 1

    def _leave_out(self, row: Row, reason: str, detail: str = "") -> None:
        where = f"{self._path}:{row.line}: {detail or reason}"
        if not self._skip_bad:
            raise InputError(where)
        if not self.left_out:
            self.first_left_out = where
        self.left_out[reason] += 1


def id_list(value: object) -> list[int] | None:
    """The hash ids of a row; None where they are no whole numbers."""
    if isinstance(value, str):
        try:
            return [int(part) for part in value.split()]
        except ValueError:
            return None
    if not isinstance(value, list):
        return None
    plain = all(isinstance(part, int) and not isinstance(part, bool) for part in value)
    return value if plain else None
