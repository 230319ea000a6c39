"""What one replica's records of a step log say, counted one by one (for LAW-M11)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from engine.core.request import RequestId
from engine.steplog.api import AddRecord, StepRecord
from properties.timed_runs.facts import Facts, ratio
from sim.cost.features import StepFeatures

Json = dict[str, Any]
NS_PER_S = 10**9


class ReplicaLog:
    """What one replica's steps say, counted one by one."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.steps: list[StepRecord] = []  # those that took the device
        self.features: list[StepFeatures] = []
        self.tokens_ns: dict[RequestId, list[int]] = {}
        self.finish_ns: dict[RequestId, int] = {}
        self.queued_until: dict[RequestId, int] = {}  # first admission
        self.preempted_ns: Counter[RequestId] = Counter()  # time back in the queue
        self.preemptions: Counter[RequestId] = Counter()
        self.cache = [0, 0, 0, 0]  # hit, queried; the same of first admissions
        self._since: dict[RequestId, int] = {}
        self._tables: dict[RequestId, list[int]] = {}
        self._known: dict[RequestId, int] = {}
        self._calls: list[int] = []  # when each step was decided
        self._log: list[StepRecord] = []

    def add(self, record: AddRecord) -> None:
        """A request came."""
        self._known[record.request.request_id] = len(record.request.prompt)

    def step(self, record: StepRecord) -> None:
        """A step was decided, ran and was committed."""
        self._log.append(record)
        self._calls.append(self._call_ns(record))
        self._queues(record, self._calls[-1])
        for gain in record.new_blocks:
            self._tables.setdefault(gain.request_id, []).extend(gain.block_ids)
        end_ns = record.start_ns + record.duration_ns
        for request_id in record.sampled_ids:
            self.tokens_ns.setdefault(request_id, []).append(end_ns)
            self._known[request_id] += 1
        for ended in record.finished:
            self.finish_ns[ended.request_id] = end_ns
        if record.num_tokens or not self.facts.config.async_scheduling:
            self.steps.append(record)
            self.features.append(self._features(record))

    def _call_ns(self, record: StepRecord) -> int:
        """While a step runs, the next one is decided when the one before it is committed."""
        if not record.open_plans:
            return record.start_ns
        if not self._log[-2].open_plans:
            return self._calls[-1]
        before = self._log[-3]
        return before.start_ns + before.duration_ns

    def _queues(self, record: StepRecord, now: int) -> None:
        for victim in record.preempted:
            self.preemptions[victim] += 1
            self._since[victim] = now
            self._tables[victim] = []
            if victim in self.finish_ns:  # since then a token in flight has ended it in the queue
                self.preempted_ns[victim] += self.finish_ns[victim] - now
        in_flight = [step.sampled_ids for step in self._log[-1 - record.open_plans : -1]]
        for admission in record.admitted:
            name = admission.request_id
            known = self._known[name] - sum(ids.count(name) for ids in in_flight)
            self.cache[0] += admission.hit_tokens
            self.cache[1] += known
            if name in self.queued_until:
                self.preempted_ns[name] += now - self._since.pop(name)
            else:
                self.queued_until[name] = now
                self.cache[2] += admission.hit_tokens
                self.cache[3] += known

    def _features(self, record: StepRecord) -> StepFeatures:
        tables = [self._tables[entry.request_id] for entry in record.entries]
        shared = sum(map(len, tables)) - len({block for table in tables for block in table})
        decodes = len(record.decode_ids)
        return StepFeatures(
            decodes,
            sum(record.decode_positions) + decodes,
            tuple([(chunk.first_position, chunk.num_tokens) for chunk in record.chunks]),
            decodes + sum([chunk.samples for chunk in record.chunks]),
            shared * self.facts.config.block_size,
        )

    # Figures ------------------------------------------------------------------------------

    @property
    def busy_ns(self) -> int:
        """Time in which steps ran."""
        return sum([step.duration_ns for step in self.steps])

    @property
    def used_blocks(self) -> list[int]:
        """Blocks in use in each step."""
        return [self.facts.config.num_blocks - step.num_free_blocks for step in self.steps]

    @property
    def block_ns(self) -> int:
        """Integral of the blocks in use over the steps."""
        pairs = zip(self.used_blocks, self.steps, strict=True)
        return sum([used * step.duration_ns for used, step in pairs])

    def stages(self) -> dict[str, list[float]]:
        """FLOPs, bytes and seconds of pure decode steps, of the others, and of all."""
        sums = {"": [0, 0, 0], "decode_": [0, 0, 0], "prefill_": [0, 0, 0]}
        for step, features in zip(self.steps, self.features, strict=True):
            work = self.facts.physics.step_work(features)
            for name in ("", "prefill_" if step.chunks else "decode_"):
                parts = (work.flops, work.num_bytes, step.duration_ns)
                sums[name] = [a + b for a, b in zip(sums[name], parts, strict=True)]
        return {name: [*map(float, parts)] for name, parts in sums.items()}

    def too_fast(self) -> list[tuple[float, str]]:
        """(duration / least possible duration, words) of steps that beat the data sheet."""
        found = []
        for step, features in zip(self.steps, self.features, strict=True):
            floor_ns = self.facts.physics.floor_ns(self.facts.physics.step_work(features))
            if floor_ns > step.duration_ns + 1:
                words = (
                    f"{len(step.decode_ids)} decodes and {features.num_chunk_tokens} prompt tokens"
                    f" in {step.duration_ns / 1e6:.4f} ms, the data sheet allows"
                    f" {floor_ns / 1e6:.4f} ms"
                )
                found.append((step.duration_ns / floor_ns, words))
        return found

    def figures(self, end_ns: int) -> Json:
        """The replica's own part of the summary."""
        blocks = self.facts.config.num_blocks
        return {
            "completed": len(self.finish_ns),
            "num_steps": len(self.steps),
            "busy_s": self.busy_ns / NS_PER_S,
            "utilisation": ratio(self.busy_ns, end_ns),
            "mean_kv_utilisation": ratio(self.block_ns, blocks * end_ns),
            "peak_kv_utilisation": max(self.used_blocks, default=0) / blocks,
            "computed_tokens": sum([step.num_tokens for step in self.steps]),
            "decode_steps": sum([not step.chunks for step in self.steps]),
        }
