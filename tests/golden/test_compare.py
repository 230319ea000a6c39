"""The golden rules accept what rounding explains and refuse what it does not."""

import pytest
import torch

from golden.compare import LogitComparison, Rules, kl_divergence
from golden.vector_rules import three_way


def logits(rows=40, vocab=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * 4


def noisy(truth, size, seed):
    generator = torch.Generator().manual_seed(seed)
    return truth + torch.randn(truth.shape, generator=generator) * size


def judge(engine, truth, yardstick, dtype=torch.bfloat16, rules=None, drawn=None, others=()):
    comparison = LogitComparison(dtype, rules or Rules(max_kl_mean=1.0))
    comparison.add("a", torch.arange(truth.shape[0]), engine, truth, yardstick, drawn, others)
    return comparison.finish()


def test_an_engine_as_good_as_hf_passes():
    truth = logits()
    stats = judge(noisy(truth, 0.05, 1), truth, noisy(truth, 0.05, 2))
    assert stats.passed
    assert 0.8 < stats.pooled_ratio < 1.25
    assert stats.num_positions == 40


def test_an_engine_five_times_worse_than_hf_fails_and_its_c_is_reported():
    truth = logits()
    stats = judge(noisy(truth, 0.5, 1), truth, noisy(truth, 0.1, 2))
    assert not stats.passed
    assert stats.observed_c > 2
    assert stats.pooled_ratio == pytest.approx(5, rel=0.2)


def test_one_bad_position_is_named():
    truth = logits()
    engine = noisy(truth, 0.05, 1)
    engine[17, 3] += 9
    stats = judge(engine, truth, noisy(truth, 0.05, 2))
    assert any("1 of 40 positions, first a position 17" in text for text in stats.violations)


def test_a_second_yardstick_counts_where_it_errs_more_and_nowhere_else():
    truth = logits()
    engine, yardstick = noisy(truth, 0.05, 1), noisy(truth, 0.05, 2)
    engine[17, 3] += 9
    engine[30, 5] -= 9
    other = noisy(truth, 0.02, 3)
    other[17, 9] += 6
    alone = judge(engine, truth, yardstick)
    both = judge(engine, truth, yardstick, others=[other])
    assert any("2 of 40 positions, first a position 17" in text for text in alone.violations)
    assert any("1 of 40 positions, first a position 30" in text for text in both.violations)
    assert both.strict_c == alone.strict_c
    assert both.pooled_ratio == alone.pooled_ratio, "the pooled ratio keeps to the first"
    better = judge(noisy(truth, 0.05, 1), truth, yardstick, others=[noisy(truth, 0.01, 3)])
    assert better.observed_c == judge(noisy(truth, 0.05, 1), truth, yardstick).observed_c


def test_observed_c_is_the_smallest_that_passes():
    truth = logits()
    engine, yardstick = noisy(truth, 0.3, 1), noisy(truth, 0.1, 2)
    needed = max(
        judge(engine, truth, yardstick).observed_c, judge(engine, truth, yardstick).centred_c
    )

    def error_violations(c):
        stats = judge(engine, truth, yardstick, rules=Rules(c=c, max_kl_mean=1.0))
        return [text for text in stats.violations if "error above bound" in text]

    assert not error_violations(needed * 1.001)
    assert error_violations(needed * 0.99)


def test_a_shift_of_all_logits_counts_as_error_only_beyond_the_rule():
    truth = logits()
    yardstick = noisy(truth, 0.05, 2)
    assert judge(truth + 0.1, truth, yardstick).centred_c == 0
    assert not judge(truth + 3.0, truth, yardstick).passed


def test_float32_allows_machine_precision_only():
    truth = logits()
    assert judge(truth + 3e-5, truth, None, torch.float32).passed
    assert not judge(truth + 1e-3, truth, None, torch.float32).passed


def test_another_token_despite_a_clear_gap_fails():
    truth = logits()
    drawn = truth.argmax(-1)
    gaps = truth.topk(2, -1).values
    clear = int((gaps[:, 0] - gaps[:, 1]).argmax())
    drawn[clear] = (drawn[clear] + 1) % truth.shape[1]
    stats = judge(truth.clone(), truth, None, torch.float32, drawn=drawn)
    assert [text for text in stats.violations if text.startswith("other token")]


def test_another_token_within_the_gap_is_accepted_and_counted():
    truth = logits()
    truth[5, 0] = truth[5].max() + 1.0
    truth[5, 1] = truth[5, 0] - 1e-6
    drawn = truth.argmax(-1)
    drawn[5] = 1
    stats = judge(truth.clone(), truth, None, torch.float32, drawn=drawn)
    assert stats.passed
    assert stats.gap_decided_share == pytest.approx(1 / 40)
    assert stats.agreement == pytest.approx(39 / 40)


def test_a_vacuous_token_rule_fails():
    flat = logits() * 1e-7
    stats = judge(flat.clone(), flat, None, torch.float32, Rules(max_close_share=0.02))
    assert any("vacuous" in text for text in stats.violations)


def test_too_many_tokens_decided_by_the_gap_fail():
    truth = logits()
    top = truth.topk(2, -1)
    truth.scatter_(-1, top.indices[:, :1], top.values[:, 1:] + 1e-6)
    stats = judge(truth.clone(), truth, None, torch.float32, drawn=top.indices[:, 1])
    assert any("differ within the gap" in text for text in stats.violations)


def test_a_mean_divergence_above_its_bound_fails():
    truth = logits()
    rules = Rules(max_kl_mean=1e-4)
    stats = judge(noisy(truth, 0.3, 1), truth, noisy(truth, 0.3, 2), rules=rules)
    assert any(text.startswith("mean KL") for text in stats.violations)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_fail(value):
    truth = logits()
    engine = truth.clone()
    engine[2, 2] = value
    stats = judge(engine, truth, noisy(truth, 0.1, 2))
    assert stats.violations[0].startswith("logits are not finite at 1 of 40")


def test_a_comparison_leaves_its_inputs_alone():
    truth, engine, yardstick = logits(), logits(seed=1), logits(seed=2)
    before = truth.clone(), engine.clone(), yardstick.clone()
    judge(engine, truth, yardstick)
    assert all(
        torch.equal(now, then) for now, then in zip((truth, engine, yardstick), before, strict=True)
    )


def test_an_empty_comparison_is_an_error():
    with pytest.raises(ValueError, match="nothing"):
        LogitComparison(torch.float32).finish()


def test_divergence_is_zero_for_equal_and_right_for_known_distributions():
    p = torch.tensor([[0.5, 0.5]]).log()
    q = torch.tensor([[0.25, 0.75]]).log()
    assert float(kl_divergence(p, p)) == 0
    expected = 0.5 * torch.tensor(2.0).log() + 0.5 * torch.tensor(2 / 3).log()
    assert float(kl_divergence(p, q)) == pytest.approx(float(expected))


def test_three_way_on_components_refuses_numbers_that_are_none():
    truth = logits()
    bad = truth.clone()
    bad[0, 0] = float("nan")
    assert three_way(bad, truth, truth, torch.float16).violations
