"""Cost model from operator tables: what vLLM's kernels were measured to take, put together."""

from __future__ import annotations

from sim.cost.features import StepFeatures
from sim.cost.operator_tables import tables_of
from sim.cost.physics import Physics
from sim.cost.terms import VLLM_GRAPH_SIZES, Graphs
from sim.cost.trust import Trust

# What the tables leave out of a step on an H200: sampling, copies of inputs, gaps between graphs.
# The mean by which decode periods of one recorded run (conv_40 of vLLM 0.33.0) exceed them.
BESIDE_NS = 300_000.0
# Decodes in a step with prompts take longer than in one of their own; the mean of the same run.
DECODE_BESIDE_PROMPTS = 1.55
GRAPHS = Graphs(VLLM_GRAPH_SIZES, VLLM_GRAPH_SIZES[-1])
# Measured with benchmarks/asynchronous_runs.py on the runs of vLLM 0.33.0, the H200 and Qwen3-8B.
OPTABLE_TRUST = Trust("optable", "vLLM 0.33.0 on H200; other GPUs and models unchecked", -10, 5)


class OptableCost:
    """Device times of steps; no time lies below the data sheet's limit."""

    name = "optable"
    trust = OPTABLE_TRUST

    def __init__(self, physics: Physics) -> None:
        self.physics = physics
        self._tables = tables_of(physics.model, physics.hardware, physics.tp)

    def step_time_ns(self, features: StepFeatures) -> int:
        """Duration of one step."""
        tables = self._tables
        tokens = GRAPHS.padded(features.num_tokens, bool(features.chunks))
        time_ns = BESIDE_NS + tables.dense_ns(tokens)
        if features.num_sampled:
            time_ns += tables.logits_ns(features.num_sampled)
        if features.num_decodes:
            decode_ns = tables.decode_attention_ns(
                features.num_decodes, features.decode_context_sum
            )
            time_ns += decode_ns * (DECODE_BESIDE_PROMPTS if features.chunks else 1.0)
        if features.chunks:
            time_ns += tables.chunk_attention_ns(features.chunks)
        floor_ns = self.physics.floor_ns(self.physics.step_work(features))
        return int(max(time_ns, floor_ns)) + 1

    def decode_run_ns(
        self, num_rows: int, context_sum: int, steps: int, kv_shared_tokens: int = 0
    ) -> list[int]:
        """Durations of consecutive pure decode steps."""
        tables, physics = self._tables, self.physics
        fixed = BESIDE_NS + tables.dense_ns(GRAPHS.padded(num_rows, False))
        fixed += tables.logits_ns(num_rows)
        work = physics.step_work(
            StepFeatures(num_rows, context_sum, (), num_rows, kv_shared_tokens)
        )
        growth = physics.run_growth(num_rows)
        sheet = physics.hardware
        byte_ns, flop_ns = 1e9 / sheet.memory_bytes_per_s, 1e9 / sheet.flops_per_s
        times = []
        for step in range(steps):
            context = context_sum + step * num_rows
            time_ns = fixed + tables.decode_attention_ns(num_rows, context)
            floor_ns = max(
                (work.num_bytes + step * growth.num_bytes) * byte_ns,
                (work.flops + step * growth.flops) * flop_ns,
            )
            times.append(int(max(time_ns, floor_ns)) + 1)
        return times

    def describe(self) -> dict[str, object]:
        """Name and constants."""
        return {
            "name": self.name,
            "tables": "aiconfigurator-core, vllm",
            "beside_ns": BESIDE_NS,
            "decode_beside_prompts": DECODE_BESIDE_PROMPTS,
        }
