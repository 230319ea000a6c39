"""LAW-M11: every figure of a summary once more, from the step log and the requests alone.

Written against the definitions (docs/simulator.md), on purpose without the code that makes the
summary: the simulator counts while it runs, this counts afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from engine.core.request import RequestId
from engine.steplog.api import AddRecord, ExpandedRecord, StepRecord
from properties.timed_runs.clients import Lives, lives_of
from properties.timed_runs.facts import Facts, json_of, latency, ratio, without_tails
from properties.timed_runs.replica_log import ReplicaLog

Json = dict[str, Any]
Value = TypeVar("Value")
NS_PER_S = 10**9


class Recomputed:
    """All figures of one run."""

    def __init__(self, records: Iterable[ExpandedRecord], facts: Facts) -> None:
        self.facts = facts
        self.replicas = [ReplicaLog(facts) for _ in range(facts.num_replicas)]
        self.finish_ns: dict[int, int] = {}  # in the order of the log
        for record in records:
            if isinstance(record, AddRecord):
                self.replicas[record.replica].add(record)
            elif isinstance(record, StepRecord):
                self.replicas[record.replica].step(record)
                end_ns = record.start_ns + record.duration_ns
                ended = [facts.row_of[finish.request_id] for finish in record.finished]
                self.finish_ns.update(dict.fromkeys(ended, end_ns))
        self.tokens_ns = self._joined([replica.tokens_ns for replica in self.replicas])
        self.queued_until = self._joined([replica.queued_until for replica in self.replicas])
        self.preempted_ns = self._joined([replica.preempted_ns for replica in self.replicas])
        self.preemptions = self._joined([replica.preemptions for replica in self.replicas])
        ends = [s.start_ns + s.duration_ns for r in self.replicas for s in r.steps]
        self.end_ns = max([*ends, *self.finish_ns.values()])
        self.lives: Lives = lives_of(facts, self.finish_ns)

    def _joined(self, parts: Sequence[Mapping[RequestId, Value]]) -> dict[int, Value]:
        return {self.facts.row_of[name]: value for part in parts for name, value in part.items()}

    def document(self) -> Json:
        """What summary.json must hold, but for what is no figure of this run."""
        return {**self._top(), "sim": self._sim()}

    def _e2e_ns(self) -> dict[int, int]:
        return {row: end - self.lives.arrival_ns[row] for row, end in self.finish_ns.items()}

    def _ttft_ns(self) -> dict[int, int]:
        firsts = {row: times[0] for row, times in self.tokens_ns.items()}
        return {row: firsts[row] - self.lives.arrival_ns[row] for row in self.finish_ns}

    def _tpot_ns(self) -> dict[int, float]:
        """Of requests with more than one token: mean gap after the first."""
        lengths = {row: len(times) for row, times in self.tokens_ns.items()}
        first, last = self._ttft_ns(), self._e2e_ns()
        return {
            row: (last[row] - first[row]) / (lengths[row] - 1) for row in last if lengths[row] > 1
        }

    def _gaps_ns(self) -> list[int]:
        return [after - a for times in self.tokens_ns.values() for a, after in pairwise(times)]

    def _top(self) -> Json:
        seconds, tokens = self.end_ns / NS_PER_S, self.tokens_ns
        done = self.finish_ns
        inputs = sum([self.facts.workload.prompt_tokens[row] for row in done])
        outputs = sum([len(tokens[row]) for row in done])
        per_second = Counter(
            (step.start_ns + step.duration_ns) // NS_PER_S
            for replica in self.replicas
            for step in replica.steps
            for _ in step.sampled_ids
        )
        figures: Json = {
            "duration": seconds,
            "completed": len(done),
            "failed": len(self.facts.workload) - len(done),
            "total_input_tokens": inputs,
            "total_output_tokens": outputs,
            "request_throughput": len(done) / seconds,
            "output_throughput": outputs / seconds,
            "total_token_throughput": (inputs + outputs) / seconds,
            "max_output_tokens_per_s": float(max(per_second.values())),
            "max_concurrent_requests": self.lives.peak,
        }
        if self.facts.slos_ms:
            figures["request_goodput"] = len(self._within_slos()) / seconds
        shown = self._shown()
        return {
            **figures,
            **shown("ttft", self._ttft_ns().values()),
            **latency("tpot", self._tpot_ns().values()),
            **shown("e2el", self._e2e_ns().values()),
            **latency("itl", self._gaps_ns()),
        }

    def _shown(self) -> Callable[[str, Iterable[float]], Json]:
        return latency if self._is_stable() else without_tails

    def _is_stable(self) -> bool:
        return self.lives.is_stable(self.queued_until, self.finish_ns)

    def _within_slos(self) -> list[int]:
        tpot = self._tpot_ns()
        values: dict[str, Mapping[int, float]] = {
            "ttft": self._ttft_ns(),
            "e2el": self._e2e_ns(),
            "tpot": {row: tpot.get(row, 0.0) for row in self.finish_ns},
        }
        return [
            row
            for row in self.finish_ns
            if all(values[name][row] / 1e6 <= slo for name, slo in self.facts.slos_ms.items())
        ]

    def _sim(self) -> Json:
        lives = self.lives
        rejected = Counter(lives.rejected.values())
        waits = [self.queued_until[row] - lives.arrival_ns[row] for row in self.finish_ns]
        completed = len(self.finish_ns)
        unsent = len(self.facts.workload) - completed - len(lives.rejected)
        counts = {
            "pending": 0,
            "completed": completed,
            "rejected": len(lives.rejected),
            "unsent": unsent,
        }
        return {
            **self._shown()("queue", waits),
            "requests": counts,
            "rejections": dict(sorted(rejected.items())),
            "num_preemptions": sum(self.preemptions.values()),
            "num_preempted_requests": len(self.preemptions),
            **self._cache(),
            **self._load(sum(waits)),
            **self._efficiency(),
            "slo_ms": dict(self.facts.slos_ms),
            "physical_floor": self._floor(),
            "replicas": [replica.figures(self.end_ns) for replica in self.replicas],
            "stable": self._is_stable(),
            **self._priorities(),
        }

    def _cache(self) -> Json:
        hit, queried, first_hit, first_queried = [
            sum(parts) for parts in zip(*[r.cache for r in self.replicas], strict=True)
        ]
        return {
            "prefix_hit_tokens": hit,
            "prefix_queried_tokens": queried,
            "prefix_hit_rate": ratio(hit, queried),
            "first_admission_hit_tokens": first_hit,
            "first_admission_queried_tokens": first_queried,
            "first_admission_hit_rate": ratio(first_hit, first_queried),
        }

    def _load(self, waited_ns: int) -> Json:
        end_ns, replicas = self.end_ns, self.replicas
        blocks = self.facts.config.num_blocks
        steps = [step for replica in replicas for step in replica.steps]
        batches = Counter(len(list(step.entries)) for step in steps)
        running_ns = sum([step.num_running * step.duration_ns for step in steps])
        refused_ns = sum(self.lives.refused_after_ns.values())
        waiting_ns = waited_ns + sum(self.preempted_ns.values()) + refused_ns
        return {
            "mean_kv_utilisation": sum([replica.block_ns for replica in replicas])
            / (len(replicas) * blocks * end_ns),
            "peak_kv_utilisation": max([u for r in replicas for u in r.used_blocks]) / blocks,
            "mean_requests_in_system": (sum(self._e2e_ns().values()) + refused_ns) / end_ns,
            "mean_requests_waiting": waiting_ns / end_ns,
            "mean_requests_running": running_ns / end_ns,
            "num_steps": len(steps),
            "batch_size_steps": {str(size): batches[size] for size in sorted(batches)},
        }

    def _efficiency(self) -> Json:
        hardware, tp = self.facts.physics.hardware, self.facts.physics.tp
        parts = [replica.stages() for replica in self.replicas]
        figures: Json = {
            "peak_flops_per_s": hardware.flops_per_s * tp,
            "peak_memory_bytes_per_s": hardware.memory_bytes_per_s * tp,
        }
        for stage in ("", "decode_", "prefill_"):
            flops, num_bytes, busy_ns = (sum([part[stage][i] for part in parts]) for i in range(3))
            seconds = busy_ns / NS_PER_S
            figures[f"{stage}mfu"] = ratio(flops, hardware.flops_per_s * seconds)
            figures[f"{stage}mbu"] = ratio(num_bytes, hardware.memory_bytes_per_s * seconds)
        return figures

    def _floor(self) -> Json:
        breaks = [found for replica in self.replicas for found in replica.too_fast()]
        if not self.facts.is_physical:
            breaks = []
        worst = min(breaks, key=lambda found: found[0], default=(1.0, ""))
        return {
            "checked": self.facts.is_physical,
            "violations": len(breaks),
            "worst_ratio": worst[0],
            "worst_step": worst[1],
        }

    def _priorities(self) -> Json:
        priorities = self.facts.workload.priorities
        if priorities is None:
            return {}
        ttft, e2e, shown = self._ttft_ns(), self._e2e_ns(), self._shown()
        classes = []
        for priority in sorted({priorities[row] for row in self.finish_ns}):
            rows = [row for row in self.finish_ns if priorities[row] == priority]
            classes.append(
                {
                    "priority": priority,
                    "completed": len(rows),
                    **shown("ttft", [ttft[row] for row in rows]),
                    **shown("e2el", [e2e[row] for row in rows]),
                }
            )
        return {"priorities": classes}


def recomputed(records: Iterable[ExpandedRecord], facts: Facts) -> Json:
    """The figures that a summary must show."""
    return json_of(Recomputed(records, facts).document())
