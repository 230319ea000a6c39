"""The sampler draws from the right distribution, with numbers that depend on nothing else."""

from itertools import pairwise

import pytest
import torch
from kernel_testing import KERNEL_DEVICE as DEVICE
from scipy.stats import chisquare, kstest

from engine.kernels.race import fused_race, fused_race_keys
from engine.sampler import (
    SamplingBatch,
    ban_tokens,
    compute_logprobs,
    exponential,
    filter_logits,
    race,
    row_keys,
    sample,
    sample_keys,
    token_of_key,
    uniform,
)

ALPHA = 1e-4


def batch(rows, temperature=1.0, seeds=None, positions=None, **filters):
    def full(value, dtype):
        return torch.full((rows,), value, dtype=dtype)

    kept = {
        name: full(value, torch.int64 if name == "top_k" else torch.float32)
        for name, value in filters.items()
    }
    return SamplingBatch(
        temperatures=full(temperature, torch.float32),
        seeds=full(7, torch.int64) if seeds is None else seeds,
        positions=torch.arange(rows) if positions is None else positions,
        **kept,
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    """Chi-square on 1e5 draws; one seed, all positions."""
    num = 100_000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0])
    drawn = sample(logits.expand(num, -1), batch(num, temperature))
    counts = torch.bincount(drawn, minlength=6).double()
    expected = (logits.double() / temperature).softmax(-1) * num
    assert chisquare(counts.numpy(), expected.numpy()).pvalue > ALPHA
    wrong = (logits.double() / temperature / 1.05).softmax(-1) * num
    assert chisquare(counts.numpy(), wrong.numpy()).pvalue < ALPHA, "the test has no power"


def test_draws_over_seeds_follow_the_softmax():
    num = 100_000
    logits = torch.tensor([0.3, 0.0, -0.2, 0.9])
    same = batch(num, seeds=torch.arange(num), positions=torch.zeros(num, dtype=torch.int64))
    counts = torch.bincount(sample(logits.expand(num, -1), same), minlength=4).double()
    expected = logits.double().softmax(-1) * num
    assert chisquare(counts.numpy(), expected.numpy()).pvalue > ALPHA


def test_a_wide_vocabulary_is_drawn_evenly():
    """Equal logits over many tokens: the hash must not favour any region of the vocabulary."""
    vocab, num = 4096, 2000
    drawn = sample(torch.zeros(1, 1).expand(num, vocab), batch(num))
    counts = torch.bincount(drawn // (vocab // 64), minlength=64)
    assert chisquare(counts.numpy()).pvalue > ALPHA


def test_rare_tokens_win_as_often_as_they_should():
    """One likely token against thousands of rare ones: exact only if E is fine-grained near 0."""
    vocab, num = 1024, 8_000
    logits = torch.full((vocab,), -10.0)
    logits[5] = 0.0
    drawn = sample(logits.expand(num, -1), batch(num))
    share = 1 - logits.double().softmax(-1)[5].item()
    hits = int((drawn != 5).sum())
    assert abs(hits - num * share) < 4 * (num * share) ** 0.5


def test_uniform_numbers_pass_a_kolmogorov_smirnov_test():
    seeds = torch.arange(100) * 1_000_003
    u = uniform(seeds, torch.full((100,), 3), 1000)
    assert u.min() > 0 and u.max() < 1
    assert kstest(u.flatten().numpy(), "uniform").pvalue > ALPHA
    e = exponential(seeds, torch.full((100,), 3), 1000)
    assert kstest(e.flatten().numpy(), "expon").pvalue > ALPHA
    rows = u - u.mean(dim=1, keepdim=True)
    correlation = torch.corrcoef(rows) - torch.eye(100)
    assert correlation.abs().max() < 0.2  # 4,950 pairs of 1,000 numbers: 5 sigma is 0.16


def test_neighbouring_seeds_and_positions_give_other_keys():
    seeds = torch.arange(300).repeat_interleave(300) - 150
    positions = torch.arange(300).repeat(300)
    first, second = row_keys(seeds, positions)
    assert len(set(zip(first.tolist(), second.tolist(), strict=True))) == 300 * 300


def test_a_row_does_not_depend_on_its_batch():
    """BUG-C56: alone, between any neighbours, and in another row, the draw is equal."""
    torch.manual_seed(0)
    logits = torch.randn(5, 50)
    seeds, positions = torch.tensor([3, -9, 3, 2**62, 0]), torch.tensor([10, 2, 11, 10, 0])
    temperatures = torch.tensor([0.7, 0.0, 1.3, 0.7, 2.0])
    together = sample(logits, SamplingBatch(temperatures, seeds, positions))
    for order in ([4, 2, 0, 3, 1], [2], [0, 3]):
        part = SamplingBatch(temperatures[order], seeds[order], positions[order])
        assert torch.equal(sample(logits[order], part), together[order])
    off = torch.zeros(5, dtype=torch.int64)
    filtered = SamplingBatch(temperatures, seeds, positions, top_k=off, top_p=torch.ones(5))
    assert torch.equal(sample(logits, filtered), together), "filters that are off change nothing"


def test_greedy_is_argmax_and_prefers_the_first_of_equals():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    assert sample(logits, batch(2, 0.0)).tolist() == [1, 0]
    assert sample(logits, batch(2, 0.0, top_k=2, top_p=0.1)).tolist() == [1, 0]


def test_sampling_leaves_the_logits_alone():
    logits = torch.randn(3, 20)
    before = logits.clone()
    sample(logits, batch(3, 0.5, top_k=3, top_p=0.5, min_p=0.1))
    ban_tokens(logits, torch.tensor([0]), torch.tensor([1]))
    compute_logprobs(logits, torch.tensor([1, 2, 3]), 2)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab", [7, 2048, 5003])
def test_the_kernel_draws_the_same_tokens(vocab):
    """CPU and CUDA share one stream of random numbers."""
    torch.manual_seed(vocab)
    padded = torch.randn(9, vocab + 5) * 3
    logits = padded[:, :vocab]
    temperatures = torch.tensor([0.0, 0.6, 1.0, 0.0, 2.0, 0.1, 1.0, 1.0, 5.0])
    seeds = torch.tensor([1, -5, 2**63 - 1, 7, 0, 123456, -(2**63), 8, 9])
    positions = torch.tensor([0, 5, 100_000, 3, 1, 2, 4, 4, 4])
    arguments = (logits, temperatures, seeds, positions)
    expected = race(*arguments)
    on_device = padded.to(DEVICE)[:, :vocab], *(t.to(DEVICE) for t in arguments[1:])
    assert fused_race(*on_device).tolist() == expected.tolist()


def test_the_kernel_survives_banned_and_equal_logits():
    logits = torch.full((2, 3000), float("-inf"), device=DEVICE)
    logits[0, 2500] = -1e30
    zeros = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    for temperature in (0.0, 1.0):
        temperatures = torch.full((2,), temperature, device=DEVICE)
        assert fused_race(logits, temperatures, zeros, zeros).tolist() == [2500, 0]


@pytest.mark.parametrize("vocab", [7, 3000, 20000])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_nan_gives_no_token(vocab, temperature):
    """Token 0 would look like an answer."""
    logits = torch.randn(3, vocab)
    logits[1] = float("nan")
    columns = (
        torch.full((3,), temperature),
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(3, dtype=torch.int64),
    )
    expected = race(logits, *columns).tolist()
    assert expected[1] == -1
    assert min(expected[0], expected[2]) >= 0
    arguments = SamplingBatch(*columns)
    assert kernel_whole(logits, arguments).tolist() == expected
    for draw_keys in (sample_keys, kernel_keys):
        for split in ((0, vocab), (0, 3, vocab)):
            assert drawn_in_parts(draw_keys, logits, columns, split) == expected
    filtered = SamplingBatch(*columns, top_k=torch.full((3,), 5))
    assert sample(logits, filtered).tolist()[1] == -1


SPLITS = {
    "even": (0, 2500, 5000),
    "uneven": (0, 2048, 4999, 5000),
    "an empty part": (0, 3000, 5000, 5000),
    "many": (0, 1, 7, 64, 1000, 1001, 4096, 5000),
}


def drawn_in_parts(draw_keys, logits, columns, split):
    parts = [
        draw_keys(logits[:, first:end], SamplingBatch(*columns), first)
        for first, end in pairwise(split)
    ]
    return token_of_key(torch.stack(parts).amax(0)).tolist()


def kernel_keys(logits, batch, first_token):
    """As `sample_keys` on a GPU; in the interpreter elsewhere."""
    if logits.shape[1] == 0:
        return sample_keys(logits, batch, first_token)
    columns = (batch.temperatures, batch.seeds, batch.positions)
    keys = fused_race_keys(logits.to(DEVICE), *(c.to(DEVICE) for c in columns), first_token)
    return keys.cpu()


@pytest.mark.parametrize("draw_keys", [sample_keys, kernel_keys])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_parts_of_a_vocabulary_draw_what_the_whole_draws(split, draw_keys):
    """Whatever the parts, so the number of ranks cannot change a token; nor can the batch."""
    torch.manual_seed(3)
    logits = torch.randn(8, 5000) * 3
    logits[3].fill_(-2.5)  # equal everywhere: the first token
    logits[4] = logits[4].round()  # many equal ones
    logits[5] = torch.where(torch.arange(5000) % 2 == 1, 0.0, -0.0)  # zeros of both signs
    logits[6, :4500] = float("-inf")
    columns = (
        torch.tensor([0.0, 0.6, 1.0, 0.0, 0.0, 0.0, 2.0, 5.0]),
        torch.tensor([1, -5, 2**63 - 1, 7, 0, 123456, -(2**63), 8]),
        torch.tensor([0, 5, 100_000, 3, 1, 2, 4, 4]),
    )
    whole = sample if draw_keys is sample_keys else kernel_whole
    expected = whole(logits, SamplingBatch(*columns)).tolist()
    assert expected[3] == 0 and expected[5] == 0
    assert drawn_in_parts(draw_keys, logits, columns, split) == expected
    some = [6, 1, 4]
    fewer = [column[some] for column in columns]
    assert drawn_in_parts(draw_keys, logits[some], fewer, split) == [expected[i] for i in some]


def kernel_whole(logits, batch):
    columns = (batch.temperatures, batch.seeds, batch.positions)
    return fused_race(logits.to(DEVICE), *(c.to(DEVICE) for c in columns)).cpu()


def test_parts_cannot_be_filtered():
    with pytest.raises(AssertionError, match="whole distribution"):
        sample_keys(torch.zeros(1, 4), batch(1, top_k=2), 0)


def test_banned_tokens_are_never_drawn():
    logits = torch.tensor([[5.0, 0.0, 0.0], [5.0, 0.0, 0.0]])
    banned = ban_tokens(logits, torch.tensor([0, 0]), torch.tensor([0, 1]))
    assert sample(banned, batch(2, 0.0)).tolist() == [2, 0]
    assert set(sample(banned[:1].expand(200, -1), batch(200, 3.0)).tolist()) == {2}


def test_logprobs_are_the_models_own():
    torch.manual_seed(0)
    logits = torch.randn(4, 30)
    tokens = torch.tensor([3, 7, 29, 0])
    result = compute_logprobs(logits, tokens, 5)
    full = logits.log_softmax(-1)
    torch.testing.assert_close(result.sampled, full.gather(1, tokens[:, None])[:, 0])
    torch.testing.assert_close(result.top, full.topk(5).values)
    assert torch.equal(result.top_ids, full.topk(5).indices)
    for row, token in enumerate(tokens.tolist()):
        order = full[row].argsort(descending=True).tolist()
        assert result.ranks[row] == order.index(token) + 1


def kept(probs, **filters):
    logits = torch.tensor([probs]).log()
    out = filter_logits(logits, batch(1, **filters))
    return set(torch.nonzero(out[0] > float("-inf")).flatten().tolist())


def test_top_k_comes_before_top_p():
    """BUG-C52: with k=2 and p=.5, k first leaves one token where p first would leave two."""
    assert kept([0.1, 0.2, 0.3, 0.4], top_k=2, top_p=0.5) == {3}
    assert kept([0.1, 0.2, 0.3, 0.4], top_p=0.5) == {2, 3}


@pytest.mark.parametrize(
    ("p", "expected"),
    [(0.0, {3}), (1e-9, {3}), (0.4, {3}), (0.41, {2, 3}), (1.0, {0, 1, 2, 3})],
)
def test_top_p_keeps_at_least_the_most_likely_token(p, expected):
    """BUG-C53: zero, tiny, exactly a boundary, and one."""
    assert kept([0.1, 0.2, 0.3, 0.4], top_p=p) == expected
    assert kept([0.1, 0.2, 0.3, 0.4], top_p=p, temperature=0.0) == expected


def test_top_p_of_one_keeps_a_long_tail():
    vocab = 100_000
    logits = torch.linspace(0, -30, vocab)[None]
    assert (filter_logits(logits, batch(1, top_p=1.0)) > float("-inf")).all()


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"top_k": 0}, {0, 1, 2, 3}),
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"top_k": 1}, {3}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"min_p": 0.0}, {0, 1, 2, 3}),
        ({"min_p": 0.6}, {2, 3}),
        ({"min_p": 1.0}, {3}),
    ],
)
def test_top_k_and_min_p_edges(filters, expected):
    assert kept([0.1, 0.2, 0.3, 0.4], **filters) == expected


def test_filters_apply_after_the_temperature():
    """A high temperature flattens the distribution, so that top-p keeps more."""
    assert kept([0.01, 0.09, 0.9], top_p=0.85) == {2}
    assert kept([0.01, 0.09, 0.9], top_p=0.85, temperature=5.0) == {0, 1, 2}


def test_filtered_draws_follow_the_renormalised_distribution():
    num = 50_000
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    drawn = sample(logits.expand(num, -1), batch(num, top_k=3))
    counts = torch.bincount(drawn, minlength=4)
    assert counts[0] == 0
    expected = torch.tensor([2.0, 3.0, 4.0]).double() / 9 * num
    assert chisquare(counts[1:].numpy(), expected.numpy()).pvalue > ALPHA
