"""An option's value is checked alike wherever it comes from, and under all its names."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.arguments import source_tree
from engine.arguments.option import Option, Table, resolve_names
from engine.arguments.parser import VerbParser
from engine.arguments.suggest import nearest
from engine.arguments.table import DEPLOYMENT, TABLE
from engine.core.config import LIMITS, KernelConfig
from engine.core.errors import ConfigError, InputError
from engine.options import EngineOptions

NUMBER = Option(name="size", kind=int, help="", least=1, most=9, sized=True)
SHARE = Option(name="share", kind=float, help="", above=0, most=1)
WORD = Option(name="word", kind=str, help="", choices=("alpha", "beta"))


@pytest.mark.parametrize(
    ("option", "text", "limit"),
    [
        (NUMBER, "0", "must be at least 1 and at most 9"),
        (NUMBER, "10", "must be at least 1 and at most 9"),
        (NUMBER, "1.5", "must be a whole number"),
        (NUMBER, "1_0", "must be a whole number"),
        (NUMBER, "٣", "must be a whole number"),
        (NUMBER, "9" * 5000, "must be a whole number"),
        (NUMBER, "", "must be a whole number"),
        (SHARE, "0", "must be above 0 and at most 1"),
        (SHARE, "nan", "must be a finite number"),
        (SHARE, "inf", "must be a finite number"),
        (SHARE, "much", "must be a number"),
        (WORD, "alpa", "must be one of alpha, beta; did you mean 'alpha'?"),
        (WORD, "zz", "must be one of alpha, beta"),
    ],
)
def test_a_text_outside_the_limits_is_refused_with_them(option, text, limit):
    with pytest.raises(ConfigError) as caught:
        option.parse(text)
    assert caught.value.option == option.name and caught.value.limit == limit
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", [0, 10, True, 2.0, "3", None])
def test_a_python_value_of_another_type_or_size_is_refused(value):
    with pytest.raises(ConfigError, match="size="):
        NUMBER.check(value)


def test_sizes_are_written_as_in_vllm():
    tokens = TABLE["max_num_batched_tokens"]
    assert [tokens.parse(text) for text in ("8k", "8K", "2.5k", "1m", "1M", "7")] == [
        8000, 8192, 2500, 10**6, 2**20, 7
    ]  # fmt: skip
    with pytest.raises(ConfigError):
        tokens.parse("2.5K")
    with pytest.raises(ConfigError):
        TABLE["max_num_seqs"].parse("1k")


def test_two_rows_may_not_have_one_name():
    with pytest.raises(AssertionError, match="stands twice"):
        Table([NUMBER, Option(name="other", kind=int, help="", aliases=("size",))])


def test_the_kernels_limits_are_read_from_the_kernel():
    config = {"num_blocks": 4, "max_model_len": 8}
    options, seen = {"num_blocks": "num_kvcache_blocks"}, set()
    for name, (least, most) in LIMITS.items():
        option = TABLE.get(options.get(name, name))
        if option is None:
            continue  # an option that only tests and policies of the kernel set
        seen.add(name)
        assert (option.least, option.most) == (least, most)
        with pytest.raises(ConfigError, match=name):
            KernelConfig(**{**config, name: least - 1})
        KernelConfig(**{**config, name: least})
    assert {"num_blocks", "max_model_len", "max_num_seqs", "watermark_blocks"} <= seen
    with pytest.raises(ConfigError, match="at most 64"):
        KernelConfig(**config, hash_bits=65)


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("tp", 2, "tensor_parallel_size"),
        ("num_gpu_blocks_override", 10, "num_kvcache_blocks"),
        ("num_kv_blocks", 10, "num_kvcache_blocks"),
        ("prefix_caching", False, "enable_prefix_caching"),
        ("scheduling_policy", "prefill_first", "policy"),
        ("enable_expert_parallel", True, "expert_parallel"),
    ],
)
def test_the_engine_takes_every_alias_as_a_keyword(tmp_path, name, value, field):
    assert getattr(EngineOptions.from_kwargs(str(tmp_path), **{name: value}), field) == value


def test_every_alias_is_a_flag_and_a_keyword_of_one_option():
    for option in DEPLOYMENT:
        for name in option.names:
            assert TABLE[name] is option
            assert "--" + name.replace("_", "-") in option.flags


def test_two_names_of_one_option_are_refused():
    with pytest.raises(ConfigError, match="another name of tensor_parallel_size"):
        resolve_names(TABLE, {"tp": 2, "tensor_parallel_size": 2}, ["tensor_parallel_size"])


def test_an_option_of_another_policy_is_refused_where_it_is_written(tmp_path, capsys):
    """A program may set it for all policies alike; a command line that names it means it."""
    from engine.cli import main

    for option in ("watermark_blocks", "long_prefill_token_threshold"):
        EngineOptions(str(tmp_path), policy="prefill_first", **{option: 4})
        flag = "--" + option.replace("_", "-")
        words = ["--model", str(tmp_path), "--prompt", "x", "--policy", "prefill_first", flag, "4"]
        assert main(["generate", *words]) == 2
        assert f"{option}=4: belongs to policy mixed" in capsys.readouterr().err


def parser():
    made = VerbParser("try it", "A verb.")
    for name in ("tp", "max_num_seqs", "stop", "json", "enable_prefix_caching", "out"):
        made.option(name)
    return made


@pytest.mark.parametrize(
    "words",
    [["--tensor-parallel-size", "4"], ["--tp=4"], ["-tp", "4"], ["--tensor_parallel_size", "4"]],
)
def test_every_spelling_of_a_flag_is_the_same(words):
    arguments = parser().parse(words)
    assert arguments.tensor_parallel_size == 4 and arguments.given == {"tensor_parallel_size"}


def test_values_are_converted_and_defaults_are_not_given():
    arguments = parser().parse(
        ["--no_prefix_caching", "--stop", "a_b", "--stop", "c", "--out", "d"]
    )
    assert arguments.enable_prefix_caching is False and arguments.stop == ["a_b", "c"]
    assert arguments.out == Path("d") and arguments.max_num_seqs is None
    assert arguments.given == {"enable_prefix_caching", "stop", "out"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-num-seq", "3"], "unknown option --max-num-seq 3; did you mean '--max-num-seqs'?"),
        (["--max-num"], "unknown option --max-num"),
        (["--tp"], "expected one argument"),
        (["word"], "unrecognized arguments: word"),
        (["--json=yes"], "ignored explicit argument 'yes'"),
    ],
)
def test_usage_errors_are_input_errors_that_point_to_the_help(words, message):
    with pytest.raises(InputError) as caught:
        parser().parse(words)
    assert message in str(caught.value) and "lockstep try it --help" in str(caught.value)


def test_a_name_that_holds_a_known_one_means_that():
    assert nearest("kvcache_block_size", ["block_size", "cache_size"]) == "block_size"
    assert nearest("QWEN3_8B", ["qwen3-8b", "qwen3-4b"]) == "qwen3-8b"
    assert nearest("zzz", ["block_size"]) is None


def test_documents_are_written_into_a_source_tree_only(tmp_path, monkeypatch, capsys):
    """An installed package lies in site-packages, where a folder docs would be another's."""
    from engine.cli import main

    (tmp_path / "docs").mkdir()
    with pytest.raises(ConfigError, match="source tree"):
        source_tree.docs_folder(tmp_path)
    monkeypatch.setattr(source_tree.docs_folder, "__defaults__", (tmp_path,))
    for verb in ("laws", "mutants", "anomalies"):
        assert main(["verify", verb, "--write"]) == 2
        assert "source tree" in capsys.readouterr().err
    assert list((tmp_path / "docs").iterdir()) == []
