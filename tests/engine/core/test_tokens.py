from array import array

import pytest

from engine.core.tokens import Prompt, content_of, digest


def test_explicit_and_lazy_prompts_of_equal_tokens_are_equal():
    lazy = Prompt.from_spans([range(10, 14), array("q", [7, 7]), range(3, 6)])
    explicit = Prompt([10, 11, 12, 13, 7, 7, 3, 4, 5])
    assert lazy == explicit
    assert list(lazy) == list(explicit)
    assert [lazy[i] for i in range(len(lazy))] == list(explicit)
    assert lazy[-1] == 5
    assert lazy[2:7].tolist() == [12, 13, 7, 7, 3]


def test_neighbouring_ranges_are_joined_and_stay_lazy():
    prompt = Prompt.from_spans([range(0, 512), range(512, 10**9)])
    assert prompt.spans == (range(0, 10**9),)
    assert len(prompt) == 10**9
    assert prompt.content(512, 1024) == range(512, 1024)


def test_content_is_canonical_whatever_the_form_of_the_tokens():
    assert content_of(array("q", [5, 6, 7])) == range(5, 8)
    assert Prompt([5, 6, 7]).content(0, 3) == Prompt(range(5, 8)).content(0, 3)
    split = Prompt.from_spans([array("q", [5]), range(6, 8)])
    assert split.content(0, 3) == range(5, 8)
    assert isinstance(content_of(array("q", [5, 7, 6])), bytes)
    assert content_of(array("q", [5, 7, 6])) == Prompt([1, 5, 7, 6]).content(1, 4)


def test_digest_depends_on_tokens_and_on_the_parent_only():
    content = content_of(array("q", [9, 1, 4]))
    assert digest(content, 3) == digest(Prompt([9, 1, 4]).content(0, 3), 3)
    assert digest(content, 3) != digest(content, 4)
    # A fixed value: the same chain has the same hash in any process and run (LAW-K2).
    assert digest(range(0, 4), 0) == 8293653440993966571
    assert digest(content, 3) == 13452884853051873092


def test_out_of_range_positions_raise():
    prompt = Prompt(range(3))
    with pytest.raises(IndexError):
        prompt[3]
    with pytest.raises(IndexError):
        prompt[-4]
    with pytest.raises(ValueError, match="step 1"):
        Prompt.from_spans([range(0, 10, 2)])
    assert prompt[2] == 2
    with pytest.raises(IndexError, match="token index out of range"):
        Prompt.from_spans([range(3), range(7, 9)])[5]


def test_prompts_are_equal_by_their_tokens_and_to_nothing_else():
    assert Prompt([1, 5]) != Prompt([1, 6])
    assert Prompt([1, 5]) != Prompt([1, 5, 6])
    assert Prompt([]) == Prompt(range(0))
    assert Prompt([1]).__eq__([1]) is NotImplemented
    assert Prompt([1]) != [1]


def test_only_ranges_of_step_one_stay_lazy():
    assert Prompt(range(2, 5)).spans == (range(2, 5),)
    assert Prompt(range(0, 6, 2)).spans == (array("q", [0, 2, 4]),)
    assert Prompt(range(5, 2, -1)).spans == (array("q", [5, 4, 3]),)


def test_spans_that_do_not_continue_stay_apart():
    spans = [range(20, 22), range(1, 3), range(0), range(3, 5), range(9, 11), range(11, 12)]
    prompt = Prompt.from_spans(spans)
    assert prompt.spans == (range(20, 22), range(1, 5), range(9, 12))
    assert list(prompt) == [20, 21, 1, 2, 3, 4, 9, 10, 11]


@pytest.mark.parametrize("start", range(10))
def test_any_part_of_several_spans_is_cut_out(start):
    prompt = Prompt.from_spans([range(3), array("q", [70, 80]), range(20, 24)])
    tokens = [0, 1, 2, 70, 80, 20, 21, 22, 23]
    for stop in range(start, 12):
        assert prompt.tokens(start, stop).tolist() == tokens[start:stop]
    assert prompt.tokens(start, 0).tolist() == []


@pytest.mark.parametrize("step", [1, 2, 3, -1, -2])
def test_slices_are_those_of_a_list(step):
    prompt = Prompt.from_spans([range(5, 9), array("q", [3, 3, 8]), range(1, 4)])
    tokens = list(prompt)
    for start in (None, 0, 1, 4, 9, 12, -3, -11):
        for stop in (None, 0, 2, 7, 10, 15, -1, -10):
            key = slice(start, stop, step)
            assert list(prompt[key]) == tokens[key], key


def test_a_prompt_tells_its_size_and_spans():
    assert repr(Prompt()) == repr(Prompt(range(0))) == "Prompt(0 tokens in 0 spans)"
    assert repr(Prompt.from_spans([range(5, 9), range(20, 22)])) == "Prompt(6 tokens in 2 spans)"
