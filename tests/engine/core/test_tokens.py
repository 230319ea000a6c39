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


def test_out_of_range_positions_raise():
    prompt = Prompt(range(3))
    with pytest.raises(IndexError):
        prompt[3]
    with pytest.raises(IndexError):
        prompt[-4]
    with pytest.raises(ValueError, match="step 1"):
        Prompt.from_spans([range(0, 10, 2)])
