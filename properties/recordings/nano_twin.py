"""The one condition under which a recording of nano-vLLM is set aside: its unreachable twin.

nano-vLLM's prefix map has one entry per key. A second copy of some content takes the entry over;
when that copy is handed out for new content the entry is deleted, and the first copy cannot be
found although it still holds the content. Lockstep finds every copy (LAW-K3), so from the first
lookup that such a twin shortens, the two may decide differently.

The condition is computed from the recording alone: the map, the blocks' contents and the waiting
queue are followed beside the recorded steps, without the kernel under test.
"""

from __future__ import annotations

from collections import deque

from engine.core.request import RequestId
from properties.recordings.recording import Step, Workload

CONDITION = "nano-vLLM's unreachable twin"


def twin_steps(workload: Workload) -> frozenset[int]:
    """Indices of the recorded steps in which a lookup missed content that a block still held."""
    if workload.policy != "prefill_first":
        return frozenset()
    model = _NanoCache(workload)
    found: set[int] = set()
    for index, step in enumerate(workload.steps):
        try:
            if model.step_has_short_lookup(step):
                found.add(index)
        except (LookupError, ValueError, TypeError, StopIteration):
            break  # the recording contradicts itself here, which excuses nothing
    return frozenset(found)


class _NanoCache:
    """nano-vLLM's prefix map and block contents, driven by its recorded steps."""

    def __init__(self, workload: Workload) -> None:
        self._block_size: int = workload.config["block_size"]
        self._budget: int = workload.config["max_num_batched_tokens"]
        self._max_num_seqs: int = workload.config["max_num_seqs"]
        self._arrivals = deque(workload.requests)
        self._tokens = {r.request.request_id: list(r.request.prompt) for r in workload.requests}
        self._outputs = {r.request.request_id: iter(r.outputs) for r in workload.requests}
        self._tables: dict[RequestId, list[int]] = {}
        self._computed: dict[RequestId, int] = {}
        self._waiting: deque[RequestId] = deque()
        # A key stands for a whole prefix: equal keys, equal tokens from the start on.
        self._keys: dict[tuple[int, tuple[int, ...]], int] = {}
        self._map: dict[int, int] = {}  # key -> the one block that nano-vLLM can find
        self._contents: dict[int, int] = {}  # block -> key of what it holds
        self._copies: dict[int, set[int]] = {}  # key -> every block that holds it

    def step_has_short_lookup(self, step: Step) -> bool:
        """Follows one recorded step; True if one of its lookups missed a copy."""
        while self._arrivals and self._arrivals[0].arrival_step <= step["step"]:
            self._waiting.append(self._arrivals.popleft().request.request_id)
        is_prefill = bool(step["batch"]) and step["batch"][0][0] in self._waiting
        hits = {entry[0]: entry[1] // self._block_size for entry in step["admitted"]}
        short = False
        if not is_prefill:
            # The prefill pass came first and looked up the head of waiting in vain.
            short = self._head_is_short(0, 0)
        for entry, blocks in zip(step["batch"], step["new_blocks"], strict=True):
            if entry[0] in hits:
                short |= self._is_short(entry[0])
                self._tables[entry[0]] = []
                self._computed[entry[0]] = entry[1]
            self._take(entry[0], blocks, hits.get(entry[0], 0))
            if is_prefill and entry[1] + entry[2] == len(self._tokens[entry[0]]):
                self._waiting.remove(entry[0])
        if is_prefill:
            used = sum(entry[2] for entry in step["batch"])
            short |= self._head_is_short(len(step["batch"]), used)
        for request_id in step["preempted"]:
            del self._tables[request_id], self._computed[request_id]
            self._waiting.appendleft(request_id)
        self._end_step(step)
        return short

    def _head_is_short(self, num_chosen: int, used: int) -> bool:
        """Whether the prefill pass ended with a lookup that failed to admit, and it was short."""
        if not self._waiting or num_chosen >= self._max_num_seqs or used >= self._budget:
            return False
        head = self._waiting[0]
        return head not in self._tables and self._is_short(head)

    def _is_short(self, request_id: RequestId) -> bool:
        tokens = self._tokens[request_id]
        for key in self._chain(request_id, (len(tokens) - 1) // self._block_size):
            if key not in self._map:
                return bool(self._copies.get(key))
        return False

    def _chain(self, request_id: RequestId, num_blocks: int) -> list[int]:
        size, tokens = self._block_size, self._tokens[request_id]
        chain: list[int] = []
        parent = -1
        for begin in range(0, num_blocks * size, size):
            link = (parent, tuple(tokens[begin : begin + size]))
            parent = self._keys.setdefault(link, len(self._keys))
            chain.append(parent)
        return chain

    def _take(self, request_id: RequestId, blocks: list[int], num_hits: int) -> None:
        self._tables[request_id].extend(blocks)
        for block in blocks[num_hits:]:
            key = self._contents.pop(block, None)
            if key is None:
                continue
            self._copies[key].discard(block)
            if self._map.get(key) == block:
                del self._map[key]

    def _end_step(self, step: Step) -> None:
        for request_id, first, num_tokens in step["batch"]:
            end = first + num_tokens
            full = range(first // self._block_size, end // self._block_size)
            for index, key in zip(
                full, self._chain(request_id, full.stop)[full.start :], strict=True
            ):
                block = self._tables[request_id][index]
                self._contents[block] = key
                self._copies.setdefault(key, set()).add(block)
                self._map[key] = block
            self._computed[request_id] = end
            if end == len(self._tokens[request_id]):
                self._tokens[request_id].append(next(self._outputs[request_id]))
            if request_id in step["finished"]:
                del self._tables[request_id], self._computed[request_id]
