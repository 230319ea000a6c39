"""The kernel's own state as a value: equal if and only if the kernel must go on in the same way.

Everything that the scheduler holds goes in, field by field, also fields that are added later. What
only names things is renamed in order of appearance (request ids, blocks), what only counts from a
beginning is made relative (clock, admissions) or left out, and each such choice is listed here with
its reason. A field that is forgotten here makes states finer, never coarser.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from engine.core.block_manager import BlockManager
from engine.core.block_pool import BlockPool
from engine.core.decode_set import DecodeSet
from engine.core.hashing import ChainNode, PrefixIndex
from engine.core.plan import DecodeBatch, StepPlan
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from engine.core.step import OpenStep
from engine.core.tokens import Prompt

# Numbers that count from the beginning of the run and decide nothing.
COUNTERS = {
    "Scheduler": {"_next_step"},
    "KernelState": {"_next_admission", "_next_arrival"},
    "DecodeSet": {"_generation", "clock"},
    "StepPlan": {"step", "clock"},
    "DecodeBatch": {"generation"},
}
# The same in every state of one enumeration.
CONSTANT = {"Scheduler": {"config"}, "KernelState": {"config"}}


def kernel_state(scheduler: Scheduler) -> object:
    """The canonical state."""
    return _Walk(scheduler).value(scheduler)


class _Walk:
    """One walk over a scheduler; objects that were seen already are told by their number."""

    def __init__(self, scheduler: Scheduler) -> None:
        state = scheduler.state
        self._decodes, self._running = state.decodes, state.running
        arrivals = sorted(state.sequences.values(), key=lambda s: (s.arrival, s.arrival_index))
        self._arrivals = {sequence.request_id: rank for rank, sequence in enumerate(arrivals)}
        order = [*scheduler.running_ids(), *scheduler.waiting_ids(), *state.sequences]
        batches = [plan.decode for plan in scheduler.open_plans] + [state.decodes.batch]
        # Ended requests live on in plans and rows for a while; they have names as well.
        left = [entry.request_id for plan in scheduler.open_plans for entry in plan.entries]
        left += [sequence.request_id for sequence in state.decodes._rows]
        left += [name for batch in batches for name in batch.request_ids]
        self._ids = {name: place for place, name in enumerate(dict.fromkeys([*order, *left]))}
        pool = state.manager.pool
        blocks = [b for name in order for b in scheduler.block_table(name)]
        blocks += scheduler.free_order() + list(range(pool.num_blocks))
        self._blocks = {block: place for place, block in enumerate(dict.fromkeys(blocks))}
        self._seen: dict[int, int] = {}
        self._special: dict[type, Callable[[Any], dict[str, Any]]] = {
            Sequence: self._sequence,
            DecodeSet: self._decode_set,
            BlockManager: lambda manager: {"cached_in_step": self._renamed(manager.cached_in_step)},
            BlockPool: self._pool,
            PrefixIndex: self._index,
            OpenStep: lambda step: {"cached": self._renamed(step.cached)},
            StepPlan: self._plan,
            DecodeBatch: lambda batch: {
                "base_positions": [base + self._decodes.clock for base in batch.base_positions]
            },
        }

    def value(self, found: Any) -> object:  # noqa: ANN401
        """Any value that a kernel holds."""
        if found is None or isinstance(found, bool | int | float | bytes):
            return found
        if isinstance(found, str):
            return self._ids.get(found, found)
        if isinstance(found, dict):
            return tuple((self.value(key), self.value(item)) for key, item in found.items())
        if isinstance(found, set | frozenset):
            return tuple(sorted(map(repr, map(self.value, found))))
        if isinstance(found, ChainNode):
            return self._identity(found)
        if isinstance(found, Prompt):
            return tuple(found)
        if isinstance(found, type) or callable(found):
            return getattr(found, "__qualname__", "")
        if hasattr(found, "__len__") and hasattr(found, "__getitem__"):
            return tuple([self.value(item) for item in found])
        if isinstance(found, deque):
            return tuple([self.value(item) for item in found])
        return self._object(found)

    def _object(self, found: object) -> object:
        if id(found) in self._seen:
            return ("seen", self._seen[id(found)])
        self._seen[id(found)] = len(self._seen)
        kind = _kernel_class(type(found))
        known = vars(found) if hasattr(found, "__dict__") else {}
        names = {*known, *_slots(type(found))}
        names -= COUNTERS.get(kind.__name__, set()) | CONSTANT.get(kind.__name__, set())
        special = self._special.get(kind)
        changes = special(found) if special is not None else {}
        held = [
            (name, changes[name] if name in changes else getattr(found, name)) for name in names
        ]
        held += [(n, item) for n, item in changes.items() if n not in names]
        return (kind.__name__, *((n, self.value(item)) for n, item in sorted(held)))

    def _renamed(self, blocks: Any) -> list[int]:  # noqa: ANN401
        return [self._blocks[block] for block in blocks]

    def _identity(self, node: ChainNode) -> tuple[object, ...]:
        """A key is its contents from the root on; hash and bucket only find it."""
        contents: list[object] = []
        walk: ChainNode | None = node
        while walk is not None:
            contents.append(walk.content)
            walk = walk.parent
        return ("key", *map(str, reversed(contents)))

    def _sequence(self, found: Sequence) -> dict[str, Any]:
        """`base`, `row` and `num_synced` mean something in the decode set only."""
        place = list(self._running).index(found.request_id) if self._runs(found) else None
        in_row = found.decoding
        return {
            "block_table": self._renamed(found.block_table),
            "admission_index": place,
            "arrival": self._arrivals.get(found.request_id),
            "arrival_index": None,
            "base": found.base + self._decodes.clock if found.decoding else None,
            "row": found.row if in_row else None,
            "num_synced": None,  # told by the decode set's columns
            # Whether it was preempted is told with its next admission, how often nowhere.
            "num_preemptions": found.num_preemptions > 0,
            "root": None,  # of all its keys' chains
        }

    def _runs(self, found: Sequence) -> bool:
        return self._running.get(found.request_id) is found

    def _decode_set(self, found: DecodeSet) -> dict[str, Any]:
        """Phases relative to the clock; of the heap, whose limits it watches and nothing else."""
        clock, size = found.clock, found.block_size
        phases = {
            (phase + clock) % size: sorted(map(str, members))
            for phase, members in found._phases.items()
            if members
        }
        awaited = {  # tokens that a row has not taken over yet; the columns only carry them
            row.request_id: [column[place] for column in found._columns[row.num_synced :]]
            for place, row in enumerate(found._rows)
            if row.decoding
        }
        watched = {  # early entries are put right when they come up
            self._ids[name]
            for _, admission, name in found._limits
            if name in found.members and found.members[name].admission_index == admission
        }
        return {
            "members": [member.request_id for member in found.members.values()],
            "_rows": [row.request_id for row in found._rows],
            "_columns": awaited,
            "_phases": [(phase, [self._ids[n] for n in phases[phase]]) for phase in sorted(phases)],
            "_limits": sorted(watched),
        }

    def _pool(self, found: BlockPool) -> dict[str, Any]:
        """Blocks in the order of their new names; the free queue as one list."""
        blocks = sorted(self._blocks, key=self._blocks.__getitem__)
        return {
            "_ref_counts": [found.ref_count(block) for block in blocks],
            "_nodes": [found.node_of(block) for block in blocks],
            "_free_uncached": self._renamed(found.free_order()),
            "_released": None,
            "_index": None,  # walked as the manager's
        }

    def _index(self, found: PrefixIndex) -> dict[str, Any]:
        """All live keys with their copies; the order within a bucket decides nothing."""
        nodes = [
            (self._identity(node), node.ref_count, tuple(self._renamed(node.blocks)))
            for node in found.nodes()
        ]
        return {"_buckets": sorted(map(repr, nodes)), "_roots": None}

    def _plan(self, found: StepPlan) -> dict[str, Any]:
        gains = [(gain[0], gain[1], self._renamed(gain[2])) for gain in found.new_blocks]
        return {"new_blocks": gains}


def _kernel_class(kind: type) -> type:
    """The kernel's class behind a planted subclass."""
    for base in kind.__mro__:
        if base.__module__.startswith("engine.core"):
            return base
    return kind


def _slots(kind: type) -> frozenset[str]:
    if is_dataclass(kind):
        return frozenset(field.name for field in fields(kind))
    slots = [getattr(base, "__slots__", ()) for base in kind.__mro__]
    return frozenset(name for names in slots for name in names)
