"""Trace readers: every public format becomes the same table, and bad input is named exactly."""

import gzip
import json
from pathlib import Path

import pytest
from sim_testing import TRACES, needs_shared

from engine.core import ConfigError, InputError
from sim.workloads.readers import TraceOptions, read_trace
from sim.workloads.servegen import ServeGenOptions, read_servegen

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
PLAIN = "arrival_s,prompt_tokens,output_tokens\n"


def write(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def read(path: Path, **options):
    return read_trace(path, TraceOptions(**options))


def test_azure_rows_keep_seven_digits_crlf_and_a_last_line_without_newline(tmp_path):
    text = AZURE + (
        "2023-11-16 18:15:46.6805900,374,44\r\n"
        "2023-11-16 18:15:50.9951690,396,109\r\n"
        "2023-11-17 00:00:00.0000001,2,1"
    )
    trace = read(write(tmp_path, text))
    assert list(trace.arrival_ns) == [0, 4_314_579_000, 20_653_319_410_100]
    assert list(trace.prompt_tokens) == [374, 396, 2]
    assert list(trace.output_tokens) == [44, 109, 1]


@pytest.mark.parametrize(
    ("column", "value", "ns"),
    [("arrival_s", "1.5", 1_500_000_000), ("arrival_ms", "2", 2_000_000),
     ("arrival_us", "3", 3_000), ("arrival_ns", "4", 4), ("arrival_s", "0.123456789", 123456789)],
)  # fmt: skip
def test_each_unit_of_time_becomes_exact_nanoseconds(tmp_path, column, value, ns):
    text = f"{column},prompt_tokens,output_tokens\n0,1,1\n{value},1,1\n"
    assert list(read(write(tmp_path, text)).arrival_ns) == [0, ns]


def test_a_byte_order_mark_and_blank_lines_do_no_harm(tmp_path):
    trace = read(write(tmp_path, "\ufeff" + PLAIN + "0,5,6\n\n1,7,8\n"))
    assert list(trace.prompt_tokens) == [5, 7]


def test_epoch_times_start_at_zero_c92(tmp_path):
    text = PLAIN + "1700000000.5,10,2\n1700000001.5,10,2\n1700000002.5,10,2\n"
    assert list(read(write(tmp_path, text)).arrival_ns) == [0, 10**9, 2 * 10**9]


def test_equal_rows_are_separate_requests_in_file_order(tmp_path):
    text = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3,1,4,3.0\n3,1,4,3.0\n"
    assert len(read(write(tmp_path, text), rate=1.0)) == 2


def test_mooncake_hash_ids_become_equal_tokens_for_equal_prefixes(tmp_path):
    rows = [
        {"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 3000, "input_length": 1024, "output_length": 5, "hash_ids": [7, 12]},
    ]
    path = write(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "m.jsonl")
    trace = read(path)
    first, second = trace.prompt(0), trace.prompt(1)
    assert (len(first), len(second)) == (1030, 1024)
    assert first[:512] == second[:512] and first[512] != second[512]
    assert first.spans == (range(7 * 512, 7 * 512 + 1030),)
    assert list(trace.arrival_ns) == [0, 3 * 10**9]


def test_characters_become_tokens_block_by_block(tmp_path):
    row = {"session_id": "0", "step": 0, "timestamp_us": 5, "input_chars": 130,
           "output_chars": 9, "hash_ids": [0, 1, 2]}  # fmt: skip
    path = write(tmp_path, json.dumps(row) + "\n", "a.jsonl")
    trace = read(path, chars_per_token=4)
    assert (trace.prompt_tokens[0], trace.output_tokens[0]) == (33, 3)
    assert read(path, chars_per_token=2).prompt_tokens[0] == 65


def test_num_requests_takes_the_first_rows(tmp_path):
    text = PLAIN + "0,1,1\n1,2,1\n2,3,1\n"
    assert list(read(write(tmp_path, text), num_requests=2).prompt_tokens) == [1, 2]


def test_a_rate_rescales_the_times_of_a_trace(tmp_path):
    text = PLAIN + "0,1,1\n1,2,1\n2,3,1\n"
    trace = read(write(tmp_path, text), rate=3.0)
    assert list(trace.arrival_ns) == [0, 500_000_000, 1_000_000_000]


BAD_CSV = {
    "negative length": (PLAIN + "0,-5,1\n", ["trace.csv:2", "prompt_tokens='-5'"]),
    "zero length": (PLAIN + "0,5,0\n", ["trace.csv:2", "output_tokens='0'"]),
    "not a number": (PLAIN + "0,5,1\n1,abc,2\n", ["trace.csv:3", "prompt_tokens='abc'"]),
    "fraction": (PLAIN + "0,5.5,1\n", ["trace.csv:2", "prompt_tokens='5.5'"]),
    "empty field": (PLAIN + "0,,1\n", ["trace.csv:2", "prompt_tokens=''"]),
    "huge length": (PLAIN + "0,99999999999,1\n", ["trace.csv:2", "99999999999"]),
    "nan arrival (BUG-C106)": (PLAIN + "nan,5,1\n", ["trace.csv:2", "arrival_s='nan'"]),
    "infinite arrival": (PLAIN + "inf,5,1\n", ["trace.csv:2", "arrival_s='inf'"]),
    "missing arrival": (PLAIN + ",5,1\n", ["trace.csv:2", "arrival_s=''"]),
    "negative arrival (BUG-C92)": (PLAIN + "-1,5,1\n", ["trace.csv:2", "arrival_s='-1'"]),
    "unsorted (BUG-C103)": (PLAIN + "5,5,1\n4,5,1\n", ["trace.csv:3", "arrival_s='4'", "sorted"]),
    "short row": (PLAIN + "0,5\n", ["trace.csv:2", "2 fields"]),
    "renamed column": (
        "TIMESTAMP,ContextToken,GeneratedTokens\n2023-11-16 18:15:46,1,1\n",
        ["trace.csv", "'ContextTokens'", "azure"],
    ),
    "missing column": ("arrival_s,prompt_tokens\n0,1\n", ["trace.csv", "'output_tokens'"]),
    "two clocks": (
        "arrival_s,arrival_ms,prompt_tokens,output_tokens\n0,0,1,1\n",
        ["arrival_s", "arrival_ms"],
    ),
    "column twice": ("prompt_tokens,prompt_tokens,output_tokens\n1,1,1\n", ["twice"]),
    "foreign columns": ("a,b\n1,2\n", ["trace.csv", "no known format"]),
    "empty file": ("", ["trace.csv", "empty"]),
    "header only": (PLAIN, ["trace.csv", "no rows"]),
    "bad stamp": (AZURE + "16.11.2023,1,1\n", ["trace.csv:2", "TIMESTAMP='16.11.2023'"]),
    "impossible date": (AZURE + "2023-13-16 18:15:46,1,1\n", ["trace.csv:2"]),
    "wrong total": (
        "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3,1,5,3.0\n",
        ["trace.csv:2", "num_total_tokens='5'"],
    ),
    "same id": (
        "request_id,arrival_s,prompt_tokens,output_tokens\nx,0,1,1\nx,1,1,1\n",
        ["trace.csv:3", "request_id='x'"],
    ),
}


@pytest.mark.parametrize("name", BAD_CSV)
def test_a_bad_row_is_one_line_with_file_row_and_value(tmp_path, name):
    text, expected = BAD_CSV[name]
    with pytest.raises(InputError) as caught:
        read(write(tmp_path, text), rate=1.0 if "lengths" in name or "total" in name else None)
    message = str(caught.value)
    assert "\n" not in message
    for part in expected:
        assert part in message


BAD_JSON = {
    "hash ids too few": ({"hash_ids": [1]}, "has 1 ids"),
    "hash id not a list": ({"hash_ids": 5}, "hash_ids"),
    "hash id a fraction": ({"hash_ids": [1, 2.5]}, "hash_ids"),
    "length null": ({"input_length": None}, "input_length=None"),
    "length a boolean": ({"output_length": True}, "output_length=True"),
    "time NaN": ({"timestamp": float("nan")}, "timestamp"),
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_a_bad_json_row_names_line_and_value(tmp_path, name):
    change, part = BAD_JSON[name]
    good = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
    text = json.dumps(good) + "\n" + json.dumps({**good, **change}) + "\n"
    with pytest.raises(InputError, match=r"m\.jsonl:2: ") as caught:
        read(write(tmp_path, text, "m.jsonl"))
    assert part in str(caught.value)


def test_a_row_that_lacks_a_key_is_named(tmp_path):
    good = {"timestamp": 0, "input_length": 6, "output_length": 5, "hash_ids": [0]}
    short = {key: value for key, value in good.items() if key != "output_length"}
    text = json.dumps(good) + "\n" + json.dumps(short) + "\n"
    with pytest.raises(InputError, match=r"m\.jsonl:2: column 'output_length' is missing"):
        read(write(tmp_path, text, "m.jsonl"))


def test_a_truncated_gzip_is_an_error(tmp_path):
    packed = gzip.compress(
        (PLAIN + "".join(f"{i},{i * 7919 % 997 + 1},1\n" for i in range(5000))).encode()
    )
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(InputError, match=r"trace\.csv\.gz: truncated or damaged gzip"):
        read(path)
    path.write_bytes(b"not gzip at all")
    with pytest.raises(InputError, match="damaged gzip"):
        read(path)
    path.write_bytes(packed)
    assert len(read(path)) == 5000


def test_a_missing_file_and_binary_text_are_errors(tmp_path):
    with pytest.raises(InputError, match=r"none\.csv"):
        read(tmp_path / "none.csv")
    path = tmp_path / "binary.csv"
    path.write_bytes(PLAIN.encode() + b"\xff\xfe\xfd\n")
    with pytest.raises(InputError, match="UTF-8"):
        read(path)


def test_lengths_without_times_need_a_rate(tmp_path):
    text = "prompt_tokens,output_tokens\n1,1\n2,2\n"
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match="rate"):
        read(path)
    assert read(path, rate=2.0, arrival="constant").arrival_ns[1] == 500_000_000


@needs_shared
@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "rows", "prompt_mean", "output_mean", "rate"),
    [
        ("azure_llm_2023_code.csv", 8819, 2047.8, 27.9, 2.567),
        ("azure_llm_2023_conv.csv", 19366, 1154.7, 211.1, 5.530),
        ("mooncake_conversation.jsonl.gz", 12031, 12035.1, 342.6, 3.402),
        ("mooncake_synthetic.jsonl.gz", 3993, 15325.5, 149.1, 3.907),
        ("vidur_splitwise_code.csv", 8819, 2047.8, 27.9, 2.567),
        ("vidur_splitwise_conv.csv", 19366, 1154.7, 211.1, 5.530),
        ("vidur_arxiv_summarization_llama2.csv", 28257, 2588.1, 291.4, None),
        ("sarathi_sharegpt_8k_llama2.csv", 30731, 2340.0, 438.7, None),
        ("measured/sharegpt300_llama-3.1-8b_blocks16.jsonl", 300, 857.5, 652.5, 10.3),
    ],
)
def test_public_traces_have_their_published_statistics(name, rows, prompt_mean, output_mean, rate):
    trace = read(TRACES / name, rate=1.0 if rate is None else None)
    assert len(trace) == rows
    assert sum(trace.prompt_tokens) / rows == pytest.approx(prompt_mean, abs=0.051)
    assert sum(trace.output_tokens) / rows == pytest.approx(output_mean, abs=0.051)
    if rate is not None:
        assert trace.mean_rate() == pytest.approx(rate, rel=2e-3)


@needs_shared
@pytest.mark.shared
def test_agent_sessions_extend_their_previous_prompt():
    trace = read(TRACES / "agent_miniswe_blocks64c.jsonl.gz")
    assert len(trace) == 402
    first, second = trace.prompt(0), trace.prompt(1)
    assert first[: 84 * 16] == second[: 84 * 16]


@needs_shared
@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "rate", "prompt_mean", "output_mean"),
    [("reason_deepseek-r1", 16.02, 1268.2, 1527.4), ("multimodal_mm-image", 9.48, 572.1, 129.7)],
)
def test_servegen_day_has_the_published_rate_and_lengths(name, rate, prompt_mean, output_mean):
    path = TRACES / f"servegen_{name}.tar.gz"
    trace = read_servegen(path, ServeGenOptions(duration_s=86400))
    assert len(trace) / 86400 == pytest.approx(rate, rel=0.02)
    assert sum(trace.prompt_tokens) / len(trace) == pytest.approx(prompt_mean, rel=0.02)
    assert sum(trace.output_tokens) / len(trace) == pytest.approx(output_mean, rel=0.02)
    assert min(trace.output_tokens) >= 1


@needs_shared
@pytest.mark.shared
def test_servegen_accepts_clients_without_a_data_set():
    path = TRACES / "servegen_language_m-large_subset.tar.gz"
    trace = read_servegen(path, ServeGenOptions(duration_s=60))
    assert trace.parameters["clients_without_lengths"] == 15
    again = read_servegen(path, ServeGenOptions(duration_s=60))
    assert trace.arrival_ns == again.arrival_ns and trace.prompt_tokens == again.prompt_tokens


def test_a_damaged_archive_is_an_error(tmp_path):
    path = tmp_path / "x.tar.gz"
    path.write_bytes(gzip.compress(b"not a tar"))
    with pytest.raises(InputError, match=r"x\.tar\.gz"):
        read_servegen(path, ServeGenOptions())
