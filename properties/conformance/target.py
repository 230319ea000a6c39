"""Turns an adapter into a target: checks every value and derives what the laws need to see."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine.core.config import KernelConfig
from engine.core.errors import RequestRejected
from engine.core.plan import Admission, Entry, Finished, NewBlocks, StepOutcome
from engine.core.request import Request, RequestId
from properties.conformance.protocol import AdapterCrash, AdapterProblem, ConfigurationRefused

# Adapters do not tell where hits lay; the follower skips counts that are negative.
UNTOLD = -1


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """A step as far as an adapter tells it; the rest is derived from its tables and queues."""

    entries: tuple[Entry, ...]
    new_blocks: tuple[NewBlocks, ...]
    admitted: tuple[Admission, ...]
    preempted: tuple[RequestId, ...]
    # Preemptions of each sampled request so far; after a further one its token is not awaited.
    epochs: tuple[int, ...] = ()

    @property
    def sampled_ids(self) -> tuple[RequestId, ...]:
        """Ids of the entries that reach the end of their known tokens."""
        return tuple(entry.request_id for entry in self.entries if entry.samples)


@dataclass
class _Known:
    """What the kit knows of a live request."""

    tokens: int
    outputs: list[int]
    table: tuple[int, ...] = ()
    computed: int = 0
    decodes: bool = False
    preemptions: int = 0
    pending: int = 0  # sampled tokens that are still on their way (asynchronous adapters)


class AdapterTarget:
    """A scheduler under test behind `SchedulerAdapter`."""

    def __init__(self, adapter: Any, config: KernelConfig) -> None:  # noqa: ANN401
        self._adapter = adapter
        self._live: dict[int, _Known] = {}
        self._open: deque[AdapterPlan] = deque()
        self._call("start", asdict(config))
        if config.hash_bits < 64 and hasattr(adapter, "weaken_hash"):
            self._call("weaken_hash", config.hash_bits)

    def _call(self, name: str, *args: object) -> Any:  # noqa: ANN401
        call = f"{name}({', '.join(map(repr, args))})"
        method: Callable[..., Any] | None = getattr(self._adapter, name, None)
        if not callable(method):
            raise AdapterProblem(f"{name}()", "the adapter lacks this call")
        try:
            return method(*args)
        except Exception as error:
            if name == "add" and isinstance(error, ValueError):
                raise  # its way to reject
            if name == "start" and isinstance(error, ValueError):
                raise ConfigurationRefused(str(error)) from error
            raise AdapterCrash(call, f"{type(error).__name__}: {error}") from error

    def _ids(self, name: str) -> list[RequestId]:
        ids = self._call(name)
        if isinstance(ids, str) or not isinstance(ids, Sequence):
            raise AdapterProblem(f"{name}()", f"returned {ids!r}, not a sequence of ids")
        for request_id in ids:
            if request_id not in self._live:
                raise AdapterProblem(f"{name}()", f"names {request_id!r}, which is not live", "S4")
        return list(ids)

    def _table(self, request_id: int) -> tuple[int, ...]:
        table = self._call("block_table", request_id)
        if isinstance(table, str) or not isinstance(table, Sequence):
            raise AdapterProblem(f"block_table({request_id})", f"returned {table!r}, not block ids")
        for block in table:
            if not isinstance(block, int) or isinstance(block, bool):
                problem = f"holds {block!r}, which is no block id"
                raise AdapterProblem(f"block_table({request_id})", problem)
        return tuple(table)

    # ---- what the driver uses ----

    @property
    def has_work(self) -> bool:
        """Whether anything is live."""
        return bool(self._live)

    @property
    def num_free_blocks(self) -> int:
        """As told."""
        told = self._call("num_free_blocks")
        if not isinstance(told, int) or isinstance(told, bool) or told < 0:
            problem = f"returned {told!r}, not a count"
            raise AdapterProblem("num_free_blocks()", problem, "LAW-B1 to LAW-B4, LAW-L5")
        return told

    def free_order(self) -> list[int] | None:
        """As told, or None if the adapter cannot say."""
        if not hasattr(self._adapter, "free_blocks"):
            return None
        return list(self._call("free_blocks"))

    def waiting_ids(self) -> list[RequestId]:
        """As told."""
        return self._ids("waiting")

    def running_ids(self) -> list[RequestId]:
        """As told."""
        return self._ids("running")

    def block_table(self, request_id: RequestId) -> tuple[int, ...]:
        """As told."""
        assert isinstance(request_id, int)
        return self._table(request_id)

    def num_computed_tokens(self, request_id: RequestId) -> int:
        """As far as the adapter's own entries say."""
        assert isinstance(request_id, int)
        return self._live[request_id].computed

    def add(self, request: Request) -> None:
        """Queues; a ValueError is a rejection."""
        name = request.request_id
        assert isinstance(name, int)
        stops = sorted(request.stop_token_ids)
        try:
            self._call("add", name, list(request.prompt), request.max_tokens, stops)
        except ValueError as error:
            raise RequestRejected(name, "adapter", str(error)) from error
        self._live[name] = _Known(len(request.prompt), [])

    def abort(self, request_id: RequestId) -> Finished | None:
        """Aborts."""
        assert isinstance(request_id, int)
        self._call("abort", request_id)
        known = self._live.pop(request_id)
        return Finished(request_id, "abort", tuple(known.outputs))

    def schedule(self) -> AdapterPlan:
        """Asks for a step and derives admissions, preemptions and new blocks."""
        told = self._call("schedule")
        if isinstance(told, str) or not isinstance(told, Sequence):
            raise AdapterProblem("schedule()", f"returned {told!r}, not a batch")
        batch: dict[int, tuple[int, int]] = {}
        for entry in told:
            if not isinstance(entry, Sequence) or len(entry) != 3:
                raise AdapterProblem("schedule()", f"{entry!r} is not (id, first position, count)")
            name, first, count = entry
            if name not in self._live:
                raise AdapterProblem("schedule()", f"names {name!r}, which is not live", "S4")
            if not isinstance(first, int) or not isinstance(count, int):
                raise AdapterProblem("schedule()", f"{entry!r} does not hold integers")
            if name in batch:
                raise AdapterProblem("schedule()", f"names {name!r} twice", "W5")
            batch[name] = (first, count)
        plan = self._derive(batch)
        self._open.append(plan)
        return plan

    def _derive(self, batch: dict[int, tuple[int, int]]) -> AdapterPlan:
        entries, new_blocks, admitted = [], [], []
        tables = {name: self._table(name) for name in self._live}
        waiting = [name for name in self._ids("waiting") if isinstance(name, int)]
        # Newest first: the last victim stands in front of waiting.
        victims = [
            name for name in reversed(waiting) if self._live[name].table and not tables[name]
        ]
        for name in victims:
            known = self._live[name]
            known.table, known.computed = (), 0
            known.decodes, known.pending = False, 0
            known.preemptions += 1
        for name, (first, count) in batch.items():
            known, table = self._live[name], tables[name]
            if not known.table:
                known.computed = first
                admitted.append(
                    Admission(name, first, UNTOLD, UNTOLD, UNTOLD, known.preemptions > 0)
                )
            if table[len(known.table) :]:
                gained = table[len(known.table) :]
                new_blocks.append(NewBlocks(name, len(known.table), gained))
            samples = first + count == known.tokens + known.pending
            is_decode = known.decodes or known.pending > 0
            entries.append(Entry(name, first, count, samples, is_decode))
            known.table, known.computed = table, first + count
            known.pending += samples
        epochs = [self._live[int(e.request_id)].preemptions for e in entries if e.samples]
        return AdapterPlan(
            tuple(entries), tuple(new_blocks), tuple(admitted), tuple(victims), tuple(epochs)
        )

    def commit(
        self, plan: AdapterPlan, token_ids: Sequence[int], stopped: Collection[RequestId] = ()
    ) -> StepOutcome:
        """Books tokens; the outputs of the ended are what the kit handed over."""
        oldest = self._open.popleft()
        assert plan is oldest, "steps are committed in the order in which they were decided"
        tokens = {int(name): t for name, t in zip(plan.sampled_ids, token_ids, strict=True)}
        told = self._call("commit", tokens)
        sampled: list[int] = []
        for (name, token), epoch in zip(tokens.items(), plan.epochs, strict=True):
            if name not in self._live:
                continue  # it had ended when this step was already decided
            known = self._live[name]
            sampled.append(name)
            known.outputs.append(token)
            known.tokens += 1
            if known.preemptions == epoch:
                known.pending -= 1
                known.decodes = True
        if isinstance(told, str) or not isinstance(told, Sequence):
            raise AdapterProblem("commit()", f"returned {told!r}, not the ended requests", "L6")
        ended = []
        for pair in told:
            if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
                raise AdapterProblem("commit()", f"{pair!r} is not (id, reason)", "L6")
            if pair[0] not in self._live:
                raise AdapterProblem("commit()", f"ends {pair[0]!r}, which is not live", "L6")
            known = self._live.pop(pair[0])
            ended.append(Finished(pair[0], str(pair[1]), tuple(known.outputs)))
        return StepOutcome(0, sampled, [tokens[name] for name in sampled], tuple(ended))

    def discard(self, plan: AdapterPlan) -> tuple[Finished, ...]:
        """Adapters have no failing steps."""
        raise NotImplementedError
