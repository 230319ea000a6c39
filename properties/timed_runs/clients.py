"""When each request was sent and when it left, from the workload and the ends of the served ones.

The client of the definitions, written down once more: rows come at their time or behind their
predecessor, wait where too many are in flight, and some are refused.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count

from properties.timed_runs.facts import Facts
from sim.metrics.requests import COMPLETED, REJECTED, STARVED, Ledger
from sim.metrics.stability import is_closed_loop, is_stable
from sim.workloads.table import Workload

_END, _ARRIVAL = 0, 1  # at one time ends come first


@dataclass
class Lives:
    """Arrivals by row, refusals, and the greatest number of requests at one time."""

    workload: Workload
    arrival_ns: dict[int, int] = field(default_factory=dict)
    rejected: dict[int, str] = field(default_factory=dict)
    refused_after_ns: dict[int, int] = field(default_factory=dict)
    peak: int = 0

    def is_stable(self, scheduled_ns: Mapping[int, int], finish_ns: Mapping[int, int]) -> bool:
        """The judgement on this run's columns, filled in from the log."""
        ledger = Ledger(len(self.workload))
        for row in range(len(ledger)):
            ledger.status[row] = STARVED
        for row, time_ns in self.arrival_ns.items():
            ledger.arrival_ns[row] = time_ns
            ledger.status[row] = REJECTED if row in self.rejected else COMPLETED
        for row, time_ns in scheduled_ns.items():
            ledger.first_scheduled_ns[row] = time_ns
        for row, time_ns in finish_ns.items():
            ledger.finish_ns[row] = time_ns
        return is_stable(ledger, is_closed_loop(self.workload))


def _refusal(facts: Facts, row: int) -> str | None:
    """Why a request can never be served as the trace has it."""
    config = facts.config
    total = facts.workload.prompt_tokens[row] + facts.workload.output_tokens[row]
    if total > config.max_model_len:
        return "exceeds_max_model_len"
    needed = -(-(total - 1) // config.block_size)
    return "pool_too_small" if needed > config.num_blocks else None


def lives_of(facts: Facts, finish_ns: Mapping[int, int]) -> Lives:
    """Follows the client through the run."""
    workload, limit = facts.workload, facts.max_concurrency
    lives = Lives(workload)
    ends = {row: place for place, row in enumerate(finish_ns)}  # in the log's order
    events = [(t, _ARRIVAL, row, row) for row, t in enumerate(workload.arrival_ns) if t >= 0]
    heapq.heapify(events)
    places = count(len(workload))  # behind those of the same time that were known before
    waiting: deque[int] = deque()
    inside = in_flight = 0

    def send_successor(row: int, now: int) -> None:
        successor = workload.successor(row)
        if successor >= 0:
            think_ns = workload.think_ns[successor] if workload.think_ns else 0
            heapq.heappush(events, (now + think_ns, _ARRIVAL, next(places), successor))

    while events:
        now, kind, _, row = heapq.heappop(events)
        if kind == _ARRIVAL:
            lives.arrival_ns[row] = now
            inside += 1
            lives.peak = max(lives.peak, inside)
            waiting.append(row)
        else:
            inside -= 1
            in_flight -= 1
            send_successor(row, now)
        while waiting and (limit is None or in_flight < limit):
            sent = waiting.popleft()
            reason = _refusal(facts, sent)
            if reason is None:
                in_flight += 1
                heapq.heappush(events, (finish_ns[sent], _END, ends[sent], sent))
                continue
            inside -= 1
            lives.rejected[sent] = reason
            lives.refused_after_ns[sent] = now - lives.arrival_ns[sent]
            if workload.sessions is None:
                send_successor(sent, now)
    return lives
