"""The model's calls on the real kernel, and the kernel's state in the model's words."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.core import Finished, KernelConfig, Prompt, Request, Scheduler
from engine.core.hashing import ChainNode
from properties.models.calls import GONE, Call, Ended, RequestState, State

BLOCK_SIZE = 2  # of the model


@dataclass(frozen=True)
class Scope:
    """The sizes for which the model was checked."""

    requests: int
    blocks: int
    most_prompt: int
    most_output: int
    seats: int
    budget: int

    def macros(self) -> list[str]:
        """The same for Spin."""
        names = {
            "N": self.requests,
            "M": self.blocks,
            "MOST_PROMPT": self.most_prompt,
            "MOST_OUTPUT": self.most_output,
            "SEATS": self.seats,
            "BUDGET": self.budget,
        }
        return [f"-D{name}={value}" for name, value in names.items()]


class Disagreement(AssertionError):
    """Kernel and model differ after a call."""


class Replay:
    """One kernel that makes the model's calls.

    All tokens of a request are the number of its class, so that requests of a class have equal
    tokens at equal positions, as in the model.
    """

    def __init__(self, scope: Scope, make: Callable[[KernelConfig], Scheduler] = Scheduler) -> None:
        self.scope = scope
        self.kernel = make(
            KernelConfig(
                num_blocks=scope.blocks,
                block_size=BLOCK_SIZE,
                max_model_len=scope.most_prompt + scope.most_output + 1,
                max_num_seqs=scope.seats,
                max_num_batched_tokens=scope.budget,
                async_scheduling=True,
            )
        )
        self._classes: dict[int, int] = {}
        self._lengths: dict[int, int] = {}

    def step(self, call: Call) -> None:
        """Makes a call and compares everything.

        Raises:
            Disagreement: with what the model and what the kernel says.
        """
        ended = self._make(call)
        if sorted(ended) != sorted(call.ended):
            raise Disagreement(f"{call.name}{call.arguments}: ended {ended}, model {call.ended}")
        if (state := self.state()) != call.after:
            raise Disagreement(f"{call.name}{call.arguments}:\nkernel {state}\nmodel  {call.after}")

    def _make(self, call: Call) -> list[Ended]:
        kernel, arguments = self.kernel, call.arguments
        if call.name == "run":
            return []  # the device's business
        if call.name == "add":
            self._add(*arguments)
            return []
        if call.name == "abort":
            finished = kernel.abort(arguments[0])
            return self._ended([finished] if finished else [])
        if call.name == "schedule":
            kernel.schedule()
            return []
        plan = kernel.open_plans[0]
        if call.name == "discard":
            return self._ended(kernel.discard(plan))
        tokens = [self._classes[int(request_id)] for request_id in plan.sampled_ids]
        stopped = [r for r in range(self.scope.requests) if arguments[0] >> r & 1]
        return self._ended(kernel.commit(plan, tokens, stopped).finished)

    def _add(self, length: int, outputs: int, kind: int) -> None:
        request_id = len(self._classes)
        self._classes[request_id] = kind
        self._lengths[request_id] = length
        self.kernel.add(Request(request_id, Prompt([kind] * length), outputs))

    def _ended(self, finished: Iterable[Finished]) -> list[Ended]:
        return [
            Ended(int(f.request_id), f.reason, self._length(f.request_id) + len(f.output_token_ids))
            for f in finished
        ]

    def _length(self, request_id: int | str) -> int:
        return self._lengths[int(request_id)]

    def state(self) -> State:
        """The kernel's state in the model's words."""
        kernel = self.kernel
        node_of = kernel.state.manager.pool.node_of
        return State(
            len(kernel.open_plans),
            tuple(kernel.free_order()),
            tuple(self._key(node_of(block)) for block in range(self.scope.blocks)),
            tuple(self._request(request_id) for request_id in range(self.scope.requests)),
        )

    def _key(self, node: ChainNode | None) -> int:
        if node is None:
            return 0
        assert isinstance(node.content, bytes), "equal tokens are no range"
        kind, depth = node.content[0], 0
        while node.parent is not None:
            node, depth = node.parent, depth + 1
        return kind * self.scope.blocks + depth

    def _request(self, request_id: int) -> RequestState:
        kernel = self.kernel
        if request_id not in kernel.state.sequences:
            return GONE
        running = request_id in kernel.running_ids()
        assert running != (request_id in kernel.waiting_ids())
        known = self._lengths[request_id] + len(kernel.output_token_ids(request_id))
        return RequestState(
            "running" if running else "waiting",
            known,
            kernel.num_tokens(request_id) - known,
            kernel.num_computed_tokens(request_id),
            kernel.state.sequences[request_id].num_cached_blocks,
            kernel.block_table(request_id),
        )


def replay(
    scope: Scope, calls: Sequence[Call], make: Callable[[KernelConfig], Scheduler] = Scheduler
) -> None:
    """One trace from the beginning."""
    kernel = Replay(scope, make)
    for call in calls:
        kernel.step(call)


def replay_graph(scope: Scope, calls: Iterable[Call]) -> int:
    """All calls of a depth-first search, each on a copy of the kernel that it starts from."""
    path = [(-1, Replay(scope))]
    num_calls = 0
    for call in calls:
        while path[-1][0] >= call.depth:
            path.pop()
        after = path[-1][1]
        if call.name != "run":
            after = copy.deepcopy(after)
            after.step(call)
            num_calls += 1
        path.append((call.depth, after))
    return num_calls
