"""The calibrated model in use: physical, monotone, honest about its range."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recording_testing import (
    NAMES,
    make_workload,
)

from engine.cli import main
from engine.core import InputError
from sim.cluster.simulation import RunOptions
from sim.cost.calibrated import CalibratedCost
from sim.cost.features import StepFeatures
from sim.cost.noise import Noise
from sim.cost.physics import Physics
from sim.cost.profile import shipped_profiles
from sim.cost.terms import HOST_NAMES, STEP_NAMES, step_row
from sim.cost.work import next_recent, work_row
from sim.run.deployment import Deployment, build
from sim.run.run import RunPlan, run_plan
from sim.specs.hardware import hardware_named
from sim.specs.models import model_named

(PROFILE,) = shipped_profiles()
MODEL, HARDWARE = model_named("qwen3-8b"), hardware_named("h200")
PHYSICS = Physics(MODEL, HARDWARE)


def cost(profile=PROFILE, seed=None):
    noise = None if seed is None else Noise(profile.noise, seed)
    return CalibratedCost(profile, PHYSICS, noise)


def features(decodes=8, context=None, chunks=(), shared=0):
    context = 500 * decodes if context is None else context
    sampled = decodes + len(chunks)
    return StepFeatures(decodes, context, tuple(chunks), sampled, shared)


steps = st.builds(
    features,
    st.integers(1, 256),
    st.integers(256, 400_000),
    st.lists(st.tuples(st.integers(0, 8000), st.integers(1, 700)), max_size=3),
)


class TestModel:
    def test_coefficients_are_times(self):
        assert all(value >= 0 for value in (*PROFILE.step_ns, *PROFILE.host_ns))
        assert PROFILE.step_ns[STEP_NAMES.index("kv_read")] > 0
        assert PROFILE.host_ns[HOST_NAMES.index("added")] > 0

    @settings(max_examples=200, deadline=None)
    @given(step=steps, more=st.integers(1, 4000), recent=st.integers(0, 2048))
    def test_more_work_never_takes_less_time(self, step, more, recent):
        def time_ns(work):
            model = cost()
            model.observe(features(0, 0, [(0, recent)] if recent else []), 1)
            return model.step_time_ns(work)

        before = time_ns(step)
        context = step.decode_context_sum
        assert time_ns(replace(step, decode_context_sum=context + more)) >= before
        assert time_ns(features(step.num_decodes + 1, context + 1, step.chunks)) >= before
        assert time_ns(features(step.num_decodes, context, (*step.chunks, (more, 1)))) >= before
        if step.chunks:
            (first, length), *others = step.chunks
            for bigger in ((first + more, length), (first, length + more)):
                assert time_ns(replace(step, chunks=(bigger, *others))) >= before

    @settings(max_examples=200, deadline=None)
    @given(step=steps, recent=st.sampled_from([0, 2048]), shared=st.sampled_from([0, 160]))
    def test_the_simulator_predicts_what_the_fit_does(self, step, recent, shared):
        """The fit multiplies columns of terms, the simulator keeps what it can."""
        step = replace(step, kv_shared_tokens=shared)
        model = cost()
        if recent:
            model.observe(features(0, 0, [(0, recent)]), 1)
        terms = step_row(work_row(step, next_recent(0.0, recent)), PROFILE.graphs)
        expected = float(np.dot(terms, PROFILE.step_ns)) + model.gap_ns(step)
        expected = max(expected, PHYSICS.floor_ns(PHYSICS.step_work(step)))
        assert model.step_time_ns(step) == pytest.approx(expected, abs=3)

    @settings(max_examples=100, deadline=None)
    @given(step=steps, shared=st.integers(0, 100_000))
    def test_shared_context_costs_less_and_not_nothing(self, step, shared):
        shared = min(shared, step.decode_context_sum // 2)
        time_ns = cost().step_time_ns(replace(step, kv_shared_tokens=shared))
        assert time_ns <= cost().step_time_ns(step)
        unique = replace(step, decode_context_sum=step.decode_context_sum - shared)
        assert time_ns >= cost().step_time_ns(unique)

    @settings(max_examples=100, deadline=None)
    @given(
        rows=st.integers(1, 256),
        context=st.integers(256, 300_000),
        count=st.integers(1, 80),
        recent=st.sampled_from([0, 1, 700, 2048]),
        seed=st.sampled_from([None, 3]),
    )
    def test_a_decode_run_takes_what_its_steps_take(self, rows, context, count, recent, seed):
        together, alone = cost(seed=seed), cost(seed=seed)
        for model in (together, alone):
            if recent:
                model.observe(features(0, 0, [(0, recent)]), 1)
        run = together.decode_run_ns(rows, context, count, 16)
        single = []
        for offset in range(count):
            step = StepFeatures(rows, context + offset * rows, (), rows, 16)
            single.append(alone.step_time_ns(step))
            alone.observe(step, 1)
        assert run == single
        together.observe(StepFeatures(rows, context, (), rows, 16), count)
        after = features(rows, context + 7)
        assert together.step_time_ns(after) == alone.step_time_ns(after)

    def test_planned_steps_that_did_not_run_leave_no_trace(self):
        model, fresh = cost(seed=1), cost(seed=1)
        model.decode_run_ns(8, 4000, 50)
        model.step_time_ns(features(chunks=[(0, 500)]))
        assert model.step_time_ns(features()) == fresh.step_time_ns(features())

    @settings(max_examples=100, deadline=None)
    @given(step=steps, seed=st.integers(0, 20))
    def test_no_step_beats_the_data_sheet(self, step, seed):
        fast = replace(
            PROFILE,
            step_ns=tuple(value / 1000 for value in PROFILE.step_ns),
            host_ns=tuple(0.0 for _ in PROFILE.host_ns),
        )
        floor_ns = PHYSICS.floor_ns(PHYSICS.step_work(step))
        assert cost(fast).step_time_ns(step) >= floor_ns
        assert cost(fast, seed).step_time_ns(step) >= floor_ns
        assert cost(PROFILE, seed).step_time_ns(step) >= floor_ns

    def test_prefill_slows_the_steps_after_it_down_for_a_while(self):
        model = cost()
        rested = model.step_time_ns(features())
        model.observe(features(chunks=[(0, 2048)]), 1)
        times = []
        for _ in range(60):
            times.append(model.step_time_ns(features()))
            model.observe(features(), 1)
        assert times == sorted(times, reverse=True)
        assert times[0] > rested == times[-1]


class TestRange:
    def test_steps_outside_are_counted_and_refused_above_a_share(self):
        model = cost()
        model.observe(features(), 95)
        model.check_range()
        model.observe(features(context=PROFILE.limits["kv_tokens"] + 1), 5)
        model.check_range()
        assert model.num_extrapolated == 5
        model.observe(features(decodes=PROFILE.limits["sequences"] + 1), 5)
        with pytest.raises(InputError, match=r"9\.5% of 105 steps lie outside"):
            model.check_range()

    def test_a_run_that_is_mostly_outside_is_not_waited_for(self):
        model, outside = cost(), features(context=PROFILE.limits["kv_tokens"] + 1)
        model.observe(features(), 600)
        model.observe(outside, 500)  # the first check: fewer than half
        with pytest.raises(InputError, match="outside the range"):
            model.observe(outside, 1_200)

    def test_every_limit_counts(self):
        tokens = PROFILE.limits["tokens"]
        for step in (
            features(1, 10, [(0, tokens)]),
            features(1, 10, [(PROFILE.limits["kv_tokens"], 1)]),
            features(1, 10, [(PROFILE.limits["chunk_pairs"] // 1000, 1001)]),
        ):
            model = cost()
            model.observe(step, 1)
            assert model.num_extrapolated == 1

    def test_a_run_far_outside_exits_2(self, capsys):
        words = ["sim", "run", "--workload", "poisson", "--rate", "1000", "--num-requests", "600"]
        words += ["--hardware", "h200", "--max-num-seqs", "600", "--prompt-len", "20"]
        assert main([*words, "--output-len", "300", "--cost", "calibrated"]) == 2
        assert "outside the range" in capsys.readouterr().err


class TestServer:
    def test_fast_forward_equals_step_by_step(self):
        runs = []
        for step_by_step in (False, True):
            plan = RunPlan(
                make_workload(), Deployment(hardware="h200", cost="calibrated"),
                RunOptions(step_by_step=step_by_step),
            )  # fmt: skip
            runs.append(run_plan(plan))
        first, second = (run.result.ledger for run in runs)
        assert first.finish_ns == second.finish_ns
        assert first.first_token_ns == second.first_token_ns

    def test_taking_in_a_request_delays_its_first_step(self):
        plan = RunPlan(make_workload(1), Deployment(hardware="h200", cost="calibrated"))
        run = run_plan(plan)
        intake_ns = cost().intake_ns(plan.workload.prompt_tokens[0])
        assert intake_ns > 0
        assert run.result.ledger.first_scheduled_ns[0] == intake_ns

    def test_the_default_is_calibrated_only_where_a_profile_fits(self):
        def name(**options):
            return build(Deployment(**options), 0).costs[0].name

        assert name(model="qwen3-8b", hardware="h200") == "calibrated"
        assert name(model="qwen3-8b", hardware="h100") == "roofline"
        assert name(model="qwen3-4b", hardware="h200") == "roofline"
        assert name(model="qwen3-8b", hardware="h200", tp=2) == "roofline"

    def test_the_summary_says_which_and_from_what(self):
        plan = RunPlan(make_workload(5), Deployment(hardware="h200"))
        described = run_plan(plan).summary.sim.provenance.cost
        assert described["name"] == "calibrated"
        assert described["engine"] == "vllm 0.25.1"
        assert described["sources"] == [f"{name}.json.gz" for name in NAMES]
