"""Cost models and physics: skipping equals stepping, and nothing beats the data sheet."""

import pytest
from sim_testing import deployment, ours, rows_workload, run, synthetic

from engine.core import ConfigError, InputError, KernelConfig, Prompt, Request, Scheduler
from sim.cost.features import RunCostModel, StepFeatures, plan_features
from sim.cost.physics import Physics
from sim.cost.roofline import RooflineCost, RooflineOptions
from sim.cost.simple import ConstantCost, ExponentialCost, ReplayCost, TableCost
from sim.run.deployment import build
from sim.specs.hardware import HARDWARE, hardware_named
from sim.specs.models import model_named

IDEAL = RooflineOptions(
    memory_efficiency=1.0,
    compute_efficiency=1.0,
    attention_compute_efficiency=1.0,
    host_step_ns=0,
    host_seq_ns=0,
)


@pytest.mark.parametrize("rows", [1, 7, 256])
@pytest.mark.parametrize("hardware", ["h200", "l4"])
@pytest.mark.parametrize("shared", [0, 512])
@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3-30b-a3b"])
def test_a_decode_run_equals_its_steps_exactly(rows, hardware, shared, model):
    cost = RooflineCost(model_named(model), hardware_named(hardware))
    start = rows * 700
    run_ns = cost.decode_run_ns(rows, start, 300, shared)
    steps_ns = [
        cost.step_time_ns(StepFeatures(rows, start + i * rows, (), rows, shared))
        for i in range(300)
    ]
    assert run_ns == steps_ns
    assert all(isinstance(duration, int) for duration in run_ns)


FEATURES = [
    StepFeatures(1, 1, (), 1),
    StepFeatures(256, 256 * 4000, (), 256),
    StepFeatures(0, 0, ((0, 2048),), 1),
    StepFeatures(0, 0, ((30_000, 2048),), 0),
    StepFeatures(100, 90_000, ((500, 900), (0, 1000)), 102),
]


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b", "mixtral-8x7b"])
def test_a_roofline_at_full_efficiency_never_beats_physics(features, hardware, tp, model):
    shape, sheet = model_named(model), hardware_named(hardware)
    physics = Physics(shape, sheet, tp)
    floor_ns = physics.floor_ns(physics.step_work(features))
    ideal_ns = RooflineCost(shape, sheet, tp, IDEAL).step_time_ns(features)
    assert ideal_ns + 1 >= floor_ns
    assert RooflineCost(shape, sheet, tp).step_time_ns(features) > floor_ns


def test_the_work_of_a_step_is_the_textbook_sum():
    shape = model_named("qwen3-8b")
    physics = Physics(shape, hardware_named("h200"))
    work = physics.step_work(StepFeatures(2, 300, ((100, 50),), 3))
    pairs = 300 + 50 * 100 + 50 * 51 // 2
    attention = 4 * 36 * 32 * 128 * pairs
    assert work.flops == 2 * shape.body_params * 52 + 2 * shape.head_params * 3 + attention
    assert work.num_bytes == 2 * (shape.body_params + shape.head_params) + 450 * 147_456


def test_the_floor_of_a_mixture_holds_however_tokens_are_routed():
    """Each token reads its own experts; at worst for the floor all tokens read the same."""
    shape = model_named("mixtral-8x7b")
    expert = 3 * 4096 * 14336
    for ranks in (1, 4):
        physics = Physics(shape, hardware_named("h200"), 1, ranks)
        one, many = (physics.step_work(StepFeatures(n, n, (), n)) for n in (1, 64))
        dense = 2 * (shape.body_params + shape.head_params)
        assert one.num_bytes == dense + 131_072 + 2 * 32 * 2 * expert // ranks
        assert many.num_bytes == one.num_bytes + 63 * 131_072
        assert physics.expert_token_flops == 2 * 32 * 2 * expert // ranks
        for num_tokens in (1, 2, 8, 1000):
            assert physics.expert_least_bytes <= physics.expert_bytes * shape.routed_share(
                num_tokens
            ) * (1 + 1e-12)


def test_more_tokens_never_make_the_experts_faster():
    cost = RooflineCost(model_named("qwen3-30b-a3b"), hardware_named("h200"))
    times = [cost.experts_ns(num_tokens) for num_tokens in range(3000)]
    assert times == sorted(times) and times[0] == 0.0
    # A large batch reads every expert once; more tokens only add arithmetic.
    token_ns = cost.physics.expert_token_flops / 989.4e12 / 0.65e-9
    read_ns = cost.physics.expert_bytes / 4.8e12 * 1e9 / 0.8
    assert times[200] == pytest.approx(read_ns + 200 * token_ns, rel=1e-4)
    assert times[2999] == pytest.approx(read_ns + 2999 * token_ns)


def test_blocks_that_sequences_share_are_read_once_in_the_floor():
    physics = Physics(model_named("qwen3-8b"), hardware_named("h200"))
    apart = physics.step_work(StepFeatures(4, 4096, (), 4, 0))
    together = physics.step_work(StepFeatures(4, 4096, (), 4, 3000))
    assert apart.num_bytes - together.num_bytes == 3000 * 147_456
    assert apart.flops == together.flops


def test_tensor_parallel_splits_the_work_and_adds_communication():
    shape, sheet = model_named("qwen3-32b"), hardware_named("h100")
    features = StepFeatures(64, 64 * 1000, (), 64)
    one = RooflineCost(shape, sheet, 1, IDEAL).step_time_ns(features)
    four = RooflineCost(shape, sheet, 4, IDEAL).step_time_ns(features)
    assert one / 4 < four < one


def test_features_count_contexts_with_the_token_that_is_computed():
    scheduler = Scheduler(KernelConfig(num_blocks=64, max_model_len=512, block_size=4))
    scheduler.add(Request("a", Prompt(range(10)), 5))
    first = scheduler.schedule()
    assert plan_features(first) == StepFeatures(0, 0, ((0, 10),), 1)
    scheduler.commit(first, [100])
    scheduler.add(Request("b", Prompt(range(50, 57)), 5))
    second = scheduler.schedule()
    assert plan_features(second) == StepFeatures(1, 11, ((0, 7),), 2)
    assert plan_features(second).chunk_attention_pairs == 28
    scheduler.commit(second, [101, 102])
    third = scheduler.schedule()
    assert plan_features(third).decode_context_sum == 12 + 8


def test_an_impossibly_fast_cost_is_reported_with_its_worst_step():
    table = (_Table(1000),)
    finished = run(rows_workload((0, 500, 50)), costs=table)
    floor = ours(finished)["physical_floor"]
    assert floor["checked"] and floor["violations"] == 50
    assert 0 < floor["worst_ratio"] < 1 and "ms" in floor["worst_step"]


class _Table:
    """A cost model that claims to be physical and is not."""

    name = "too-fast"

    def __init__(self, step_ns: int) -> None:
        self._step_ns = step_ns

    def step_time_ns(self, features: StepFeatures) -> int:
        return self._step_ns

    def describe(self) -> dict[str, object]:
        return {}


@pytest.mark.parametrize("name", ["poisson", "agent", "sessions"])
def test_no_step_of_an_ideal_machine_breaks_the_floor_even_with_shared_blocks(name):
    shape, sheet = model_named("qwen3-0.6b"), hardware_named("rtx4090")
    finished = run(
        synthetic(name, num_requests=60, rate=50.0, shared_prefix=256),
        model="qwen3-0.6b",
        hardware="rtx4090",
        max_model_len=40_000,
        num_kv_blocks=20_000,
        costs=(RooflineCost(shape, sheet, 1, IDEAL),),
    )
    floor = ours(finished)["physical_floor"]
    assert floor["checked"] and floor["violations"] == 0


def test_models_without_physics_are_not_checked():
    finished = run(rows_workload((0, 500, 50)), costs=(ConstantCost(10),))
    assert ours(finished)["physical_floor"] == {
        "checked": False, "violations": 0, "worst_ratio": 1.0, "worst_step": "",
    }  # fmt: skip


def test_exponential_costs_repeat_with_their_seed_and_have_the_mean():
    features = StepFeatures(1, 1, (), 1)
    first, again = ExponentialCost(10**6, 5), ExponentialCost(10**6, 5)
    times = [first.step_time_ns(features) for _ in range(20_000)]
    assert times[:100] == [again.step_time_ns(features) for _ in range(100)]
    assert sum(times) / len(times) == pytest.approx(10**6, rel=0.03)
    assert not isinstance(first, RunCostModel)


def test_a_replay_ends_with_an_error_when_steps_run_out():
    cost = ReplayCost([5, 6], "steps.jsonl")
    features = StepFeatures(1, 1, (), 1)
    assert [cost.step_time_ns(features) for _ in range(2)] == [5, 6]
    with pytest.raises(InputError, match=r"steps\.jsonl: .* 2 recorded steps"):
        cost.step_time_ns(features)


def test_a_table_interpolates_and_counts_what_lies_outside(tmp_path):
    path = tmp_path / "times.csv"
    path.write_text("num_tokens,time_us\n1,1000\n11,2000\n100,20000\n")
    cost = TableCost(path)
    times = [cost.step_time_ns(StepFeatures(n, n, (), n)) for n in (1, 6, 11, 100)]
    assert times == [1_000_000, 1_500_000, 2_000_000, 20_000_000]
    assert cost.num_extrapolated == 0
    assert cost.step_time_ns(StepFeatures(189, 1, (), 1)) == 38_000_000
    assert cost.num_extrapolated == 1
    finished = run(rows_workload((0, 300, 2)), cost=f"table:{path}")
    assert ours(finished)["num_extrapolated_steps"] == 1


@pytest.mark.parametrize(
    "text", ["", "num_tokens,time_us\n", "num_tokens,time_us\n1,1\n1,2\n", "a,b\n1,2\n",
             "num_tokens,time_us\n1,-1\n2,3\n", "num_tokens,time_us\nx,1\n2,3\n"]
)  # fmt: skip
def test_a_bad_table_is_an_input_error(tmp_path, text):
    path = tmp_path / "times.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=r"times\.csv"):
        TableCost(path)


def test_impossible_roofline_options_are_refused():
    with pytest.raises(ConfigError, match="memory_efficiency"):
        RooflineOptions(memory_efficiency=1.2)
    with pytest.raises(ConfigError, match="host_step_ns"):
        RooflineOptions(host_step_ns=-1)
    assert deployment().roofline == RooflineOptions()


def test_attention_has_the_memory_efficiency_of_the_rest_unless_it_is_given():
    features = StepFeatures(8, 8 * 1000, (), 8)

    def time_ns(**options):
        sheet = hardware_named("h200")
        cost = RooflineCost(model_named("qwen3-8b"), sheet, options=RooflineOptions(**options))
        return cost.step_time_ns(features)

    assert time_ns() == time_ns(attention_memory_efficiency=0.8)
    read_ns = 8000 * 147_456 / 4.8e12 * 1e9
    slower_ns = time_ns(attention_memory_efficiency=0.4) - time_ns()
    assert slower_ns == pytest.approx(read_ns / 0.4 - read_ns / 0.8, abs=2)
    assert "attention_memory_efficiency" not in RooflineOptions().given()
    with pytest.raises(ConfigError, match="attention_memory_efficiency"):
        RooflineOptions(attention_memory_efficiency=0.0)


@pytest.mark.parametrize(
    ("text", "part"),
    [("[]", "roofline"), ("{", "JSON"), ('{"roofline": {"speed": 1}}', "speed"),
     ('{"roofline": {"link_efficiency": "x"}}', "link_efficiency='x'"),
     ('{"roofline": {"memory_efficiency": 2}}', "memory_efficiency")],
)  # fmt: skip
def test_a_wrong_file_of_roofline_parameters_is_named(tmp_path, text, part):
    path = tmp_path / "fit.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"fit\.json") as caught:
        deployment_cost(f"roofline:{path}")
    assert part in str(caught.value)


def deployment_cost(cost):
    return build(deployment(cost=cost), 0).costs[0]
