"""How a defect is planted: the real scheduler with some of its parts replaced by subclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.core.block_manager import BlockManager, Hits
from engine.core.block_pool import BlockPool
from engine.core.config import KernelConfig
from engine.core.decode_set import DecodeSet
from engine.core.hashing import PrefixIndex
from engine.core.policies.mixed import MixedPolicy
from engine.core.policies.policy import Policy
from engine.core.policies.prefill_first import PrefillFirstPolicy
from engine.core.policies.priority import PriorityPolicy
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from engine.core.state import KernelState
from engine.core.step import Step
from engine.core.waiting import FcfsQueue


class Planted(Scheduler):
    """The kernel, assembled from parts that a subclass may replace."""

    index_class: ClassVar[type[PrefixIndex]] = PrefixIndex
    pool_class: ClassVar[type[BlockPool]] = BlockPool
    manager_class: ClassVar[type[BlockManager]] = BlockManager
    decodes_class: ClassVar[type[DecodeSet]] = DecodeSet
    state_class: ClassVar[type[KernelState]] = KernelState
    step_class: ClassVar[type[Step]] = Step
    mixed_class: ClassVar[type[MixedPolicy]] = MixedPolicy
    prefill_first_class: ClassVar[type[PrefillFirstPolicy]] = PrefillFirstPolicy
    priority_class: ClassVar[type[PriorityPolicy]] = PriorityPolicy

    def __init__(self, config: KernelConfig) -> None:
        super().__init__(config)
        policy = self._policy_class(config.policy)()
        order = (policy.unregistered_first, policy.serve_newest)
        manager = self.manager_class(config, *order)
        manager.index = self.index_class(config.hash_bits)
        manager.pool = self.pool_class(config.num_blocks, manager.index, *order)
        self.policy = policy
        self.state = self.state_class(config, manager, policy.make_waiting())
        self.state.decodes = self.decodes_class(config.block_size)
        self._ending._state = self.state

    def _policy_class(self, name: str) -> type[Policy]:
        classes: dict[str, type[Policy]] = {
            "mixed": self.mixed_class,
            "prefill_first": self.prefill_first_class,
            "priority": self.priority_class,
        }
        return classes[name]

    def _begin_step(self, tokens_open: bool) -> Step:
        step = super()._begin_step(tokens_open)
        step.__class__ = self.step_class  # its subclasses have no slots of their own
        return step


@dataclass(frozen=True, slots=True)
class Mutant:
    """A planted defect and the law that it must break."""

    law: str
    factory: type[Scheduler]
    source: str  # where it was seen, or "own"
    policy: str | None = None  # where it can show; None = all
    is_async: bool = False  # it shows only with asynchronous scheduling
    workloads: str = "random_workload"  # of properties.search.workloads

    @property
    def name(self) -> str:
        """The class that plants it."""
        return self.factory.__name__

    @property
    def what(self) -> str:
        """What is wrong, in one line."""
        return (self.factory.__doc__ or "").strip().splitlines()[0]


def fcfs(state: KernelState) -> FcfsQueue:
    """The waiting queue of a policy that serves in order of arrival."""
    assert isinstance(state.waiting, FcfsQueue)
    return state.waiting


def find_hits(manager: BlockManager, sequence: Sequence, most: int) -> Hits:
    """The kernel's lookup with the hit limit left to the caller."""
    manager._extend_chain(sequence, most)
    block_ids: list[int] = []
    for node in sequence.chain[:most]:
        if not node.blocks:
            break
        block_ids.append(manager.pool.copy_of(node))
    free = [block for block in block_ids if manager.pool.ref_count(block) == 0]
    fresh = [block for block in block_ids if block in manager.cached_in_step]
    return Hits(tuple(block_ids), len(free), len([block for block in fresh if block not in free]))
