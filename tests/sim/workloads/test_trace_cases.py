"""Trace files that people bring: each of the collection, and what is wrong in their kinds."""

import csv
import gzip
import json
import random
from array import array
from pathlib import Path

import pytest
from sim_testing import run

from engine.cli import main
from engine.core import ConfigError, InputError
from sim.workloads.readers import TraceOptions, read_trace
from sim.workloads.table import output_stripe

CASES = Path(__file__).parents[1] / "data" / "case_traces"
RIGHT = {
    # file: requests, prompt lengths, output lengths, arrivals in s, sessions
    "azure2024.csv": ([2162, 2399, 76], [5, 6, 15], [0, 0.007405, 0.99007], 0),
    "burstgpt.csv": ([472, 1087, 417], [18, 230, 276], [0, 40, 113], 0),
    "burstgpt_v2.csv": ([472, 500], [18, 230], [0, 40.7], 1),
    "vllm_bench.json": ([100, 200, 300], [10, 20, 30], [0, 0.5, 2.75], 0),
    "aiperf_export.jsonl": ([550, 600], [30, 40], [0, 0.5], 2),
    "guidellm.json": ([1024], [32], [0], 0),
    "mc_session.jsonl": ([600, 1200, 300], [52, 30, 10], [0, None, 0.5], 2),
    "mc_u64.jsonl": ([600, 600], [52, 52], [0, 9], 0),
    "mc_priority.jsonl": ([600], [52], [0], 0),
    "bl_turns.jsonl": ([160, 320, 480], [96, 96, 50], [0, 5, 9], 1),
    "splitwise.csv": ([374, 396], [44, 109], [0, 4.31], 0),
    "vidur_full.csv": ([374, 396], [44, 109], [0, 4.31], 0),
    "blis_trace.csv": ([128], [64], [0], 1),
}
UNTIMED = {"sharegpt.json", "vllm_custom.jsonl", "aiperf_multi.jsonl"}


def read(path, **options):
    return read_trace(path, TraceOptions(**options))


def show(capsys, *words):
    assert main(["trace", "show", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def write(folder, text, name="t.jsonl"):
    path = folder / name
    path.write_text(text if isinstance(text, str) else "\n".join(map(json.dumps, text)) + "\n")
    return path


def test_every_file_of_the_collection_is_asked_for_here():
    assert {path.name for path in CASES.iterdir()} == {*RIGHT, *UNTIMED}


@pytest.mark.parametrize("name", RIGHT)
def test_a_file_of_the_collection_is_read_right(name, capsys):
    prompts, outputs, arrivals, sessions = RIGHT[name]
    trace = read(CASES / name)
    assert (list(trace.prompt_tokens), list(trace.output_tokens)) == (prompts, outputs)
    times = [None if time < 0 else time / 1e9 for time in trace.arrival_ns]
    assert times == arrivals
    sheet = show(capsys, CASES / name)
    assert (sheet["requests"], sheet["sessions"]) == (len(prompts), sessions)
    assert (sheet["input_tokens"], sheet["output_tokens"]) == (sum(prompts), sum(outputs))
    assert sheet["span_s"] == max(time for time in arrivals if time is not None)
    assert sheet["left_out"] == {} and sheet["needs"] == []


@pytest.mark.parametrize("name", [*RIGHT, *UNTIMED])
def test_a_file_of_the_collection_runs(name, capsys):
    words = ["sim", "run", "--trace", str(CASES / name), "--json", "--cost", "constant:5"]
    if name in UNTIMED:
        words += ["--rate", "2", "--chars-per-token", "4"]
    if name == "aiperf_multi.jsonl":
        words += ["--output-len", "20"]
    assert main(words) == 0
    summary = json.loads(capsys.readouterr().out)
    expected = 2 if name in UNTIMED else len(RIGHT[name][0])
    assert summary["completed"] == expected


def test_an_answered_turn_repeats_all_before_it():
    trace = read(CASES / "sharegpt.json", rate=1.0, chars_per_token=4)
    assert list(trace.output_tokens) == [3, 2]
    assert list(trace.prompt_tokens) == [7, 7 + 3 + 3]
    first, second = trace.prompt(0), trace.prompt(1)
    assert (len(first), len(second)) == (7, 13) and second[:7] == first[:]
    assert trace.arrival_ns[1] < 0 and trace.successor(0) == 1


def test_texts_need_a_tokenizer_or_a_rule(tmp_path):
    for name in UNTIMED:
        with pytest.raises(ConfigError, match="chars_per_token"):
            read(CASES / name, rate=1.0)
    with pytest.raises(ConfigError, match="tokenizer"):
        read(CASES / "sharegpt.json", rate=1.0, tokenizer=str(tmp_path))
    with pytest.raises(InputError, match="--output-len"):
        read(CASES / "aiperf_multi.jsonl", rate=1.0, chars_per_token=4)


def test_a_tokenizer_counts_and_names_the_tokens(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: index for index, word in enumerate(["[UNK]", "a", "b", "c"])}
    model = tokenizers.models.WordLevel(words, unk_token="[UNK]")
    built = tokenizers.Tokenizer(model)
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    built.save(str(tmp_path / "tokenizer.json"))
    path = write(tmp_path, [{"prompt": "a b c", "output_tokens": 3},
                            {"prompt": "a b b", "output_tokens": 1}])  # fmt: skip
    trace = read(path, rate=1.0, tokenizer=str(tmp_path))
    assert list(trace.prompt_tokens) == [3, 3]
    assert trace.prompt(0)[:] == trace.prompt(0)[:2] + trace.prompt(0)[2:]
    assert trace.prompt(0)[:2] == trace.prompt(1)[:2] and trace.prompt(0)[2] != trace.prompt(1)[2]


def test_the_second_turn_follows_the_first_ones_end():
    trace = read(CASES / "aiperf_multi.jsonl", rate=1.0, chars_per_token=4, output_tokens=10)
    assert trace.think_ns is not None and trace.think_ns[1] == 10**9
    finished = run(trace, cost="constant:1")
    ledger = finished.result.ledger
    assert ledger.arrival_ns[1] - ledger.finish_ns[0] == 10**9
    mooncake = read(CASES / "mc_session.jsonl")
    ledger = run(mooncake, cost="constant:1").result.ledger
    assert ledger.arrival_ns[1] - ledger.finish_ns[0] == 1_500_000_000


def test_an_answer_is_found_by_the_prompt_that_repeats_it():
    """Turn 2 hits 15 blocks: its parent's 160 + 96 tokens but the last, whose KV is not there."""
    trace = read(CASES / "bl_turns.jsonl")
    finished = run(trace, num_kv_blocks=10_000, cost="constant:1")
    hits = list(finished.result.ledger.hit_tokens)
    assert hits[1] == 15 * 16
    # Turn 3: 320 + 96 tokens of turn 2 are 26 blocks, the last one not complete.
    assert hits[2] == 25 * 16
    shared = read(CASES / "mc_session.jsonl")
    hits = list(run(shared, num_kv_blocks=10_000, cost="constant:1").result.ledger.hit_tokens)
    # 600 prompt tokens and 51 of the answer in blocks of 16.
    assert hits[1] == (600 + 51) // 16 * 16


@pytest.mark.parametrize("seed", range(12))
def test_turns_of_any_lengths_hit_all_that_their_parents_computed(seed, tmp_path):
    """Against the definition: full blocks of a parent's prompt and answer, its last token not."""
    draw = random.Random(seed)
    block, rows, time, fresh = draw.choice([16, 32]), [], 0.0, iter(range(10**6))
    expected, parents = [], []
    for chat in range(12):
        parent = draw.choice([None, *parents[-3:]]) if parents else None
        if parent is None:
            ids, before = [], 0
        else:
            before = parent["input_length"] + parent["output_length"]
            ids = parent["hash_ids"][: parent["input_length"] // block]
        new = draw.randint(1, 90)
        length = before + new
        ids = [*ids, *(next(fresh) for _ in range(-(-length // block) - len(ids)))]
        row = {"chat_id": chat, "parent_chat_id": parent["chat_id"] if parent else -1,
               "timestamp": time, "input_length": length, "output_length": draw.randint(1, 90),
               "type": "text", "turn": 1, "hash_ids": ids}  # fmt: skip
        rows.append(row)
        # A second child names the same parent's answer by other ids, which cannot be known.
        first_child = parent is not None and parent.setdefault("child", chat) == chat
        if not first_child and parent is not None:
            expected.append(None)
        else:
            computed = (before - 1) // block * block if parent else 0
            expected.append(min(computed, (length - 1) // block * block))
        parents.append(row)
        time += 1000.0
    path = write(tmp_path, [{k: v for k, v in row.items() if k != "child"} for row in rows])
    trace = read(path, hash_block_tokens=block)
    finished = run(trace, num_kv_blocks=50_000, block_size=block, cost="constant:1")
    hits = list(finished.result.ledger.hit_tokens)
    assert [a for a, b in zip(hits, expected, strict=True) if b is not None] == [
        b for b in expected if b is not None
    ]


def test_a_part_of_a_trace_keeps_the_answers_of_its_own_rows():
    trace = read(CASES / "bl_turns.jsonl")
    part = trace.hashed.from_row(1, 2)
    assert part.prompt(1, 480)[320:416] == array("q", output_stripe(0, 96))
    # The answer of row 0, which is not there, is that of nobody.
    assert not set(part.prompt(0, 320)[160:256]) & {*output_stripe(0, 96), *output_stripe(1, 96)}


def test_hash_ids_are_names(tmp_path):
    trace = read(CASES / "mc_u64.jsonl")
    first, second = trace.prompt(0), trace.prompt(1)
    assert first[:512] == second[:512] and first[512] != second[512]
    rows = [
        {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [-7, 3]},
        {"timestamp": 1, "input_length": 600, "output_length": 5, "hash_ids": [-7, -3]},
    ]
    trace = read(write(tmp_path, rows))
    assert trace.prompt(0)[:512] == trace.prompt(1)[:512]
    assert trace.prompt(0)[512] != trace.prompt(1)[512]
    assert min(trace.prompt(1)[:]) >= 0


@pytest.mark.parametrize("block", [1, 16, 64, 128, 256, 1024])
def test_the_size_of_hashed_blocks_is_found(block, tmp_path):
    lengths = [block * 9 - block // 2, block * 2, block * 40 + 1]
    rows = [
        {"timestamp": index, "input_length": length, "output_length": 1,
         "hash_ids": list(range(-(-length // block)))}
        for index, length in enumerate(lengths)
    ]  # fmt: skip
    assert read(write(tmp_path, rows)).hashed.block_tokens == block
    with pytest.raises(InputError, match="blocks of 48"):
        read(tmp_path / "t.jsonl", hash_block_tokens=48)


def test_priorities_are_carried_and_only_then_written(tmp_path):
    trace = read(CASES / "mc_priority.jsonl")
    assert list(trace.priorities) == [1] and trace.priority(0) == 1
    assert read(CASES / "mc_u64.jsonl").priorities is None
    for name, has in (("mc_priority.jsonl", True), ("mc_u64.jsonl", False)):
        out = tmp_path / name
        words = ["sim", "run", "--trace", CASES / name, "--cost", "constant:5", "--out", out]
        assert main([*map(str, words)]) == 0
        rows = list(csv.DictReader((out / "requests.csv").read_text().splitlines()))
        assert ("priority" in rows[0]) is has
        assert not has or rows[0]["priority"] == "1"
        assert read(out / "requests.csv").priority(0) == int(has)


def test_a_lower_priority_goes_first_where_the_policy_looks_at_it(tmp_path):
    text = "arrival_ms,prompt_tokens,output_tokens,priority\n0,9,50,0\n1,9,5,7\n2,9,5,3\n"
    trace = read(write(tmp_path, text, "t.csv"))
    order = {}
    for policy in ("priority", "mixed"):
        finished = run(trace, policy=policy, max_num_seqs=1, cost="constant:1")
        first = finished.result.ledger.first_scheduled_ns
        order[policy] = sorted(range(3), key=first.__getitem__)
    assert order == {"priority": [0, 2, 1], "mixed": [0, 1, 2]}


def test_an_unknown_column_is_named_once_and_left_out(tmp_path, capsys):
    text = "arrival_s,prompt_tokens,output_tokens,colour\n0,1,1,red\n1,2,2,blue\n"
    path = write(tmp_path, text, "t.csv")
    assert read(path).notes == ["columns left out: colour"]
    assert main(["sim", "run", "--trace", str(path), "--cost", "constant:5"]) == 0
    error = capsys.readouterr().err
    assert error.count("colour") == 1 and "red" not in error


BAD = {
    "no output": ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
                  "5,A,472,18,490,C\n6,A,40,0,40,C\n", "t.csv", "no output tokens"),
    "no prompt": ("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,5,5\n"
                  "2024-05-10 00:00:01Z,0,5\n", "t.csv", "no prompt tokens"),
    "failed": (json.dumps({"input_lens": [1, 2], "output_lens": [3, 4], "start_times": [0.5, 1],
                           "errors": ["", "timeout"]}), "t.json", "failed"),
    "warm-up": ([{"metadata": {"request_start_ns": 5, "benchmark_phase": phase},
                  "metrics": {"input_sequence_length": {"value": 5},
                              "output_sequence_length": {"value": 6}}}
                 for phase in ("profiling", "warmup")], "t.jsonl", "warm-up"),
    "unanswered": (json.dumps([{"conversations": [{"from": "human", "value": "a"},
                                                  {"from": "gpt", "value": "b"},
                                                  {"from": "human", "value": "c"}]}]),
                   "t.json", "no answer"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_left_out_and_counted_or_an_error(name, tmp_path, capsys):
    text, file, reason = BAD[name]
    path = write(tmp_path, text, file)
    sheet = show(capsys, path, "--chars-per-token", "4")
    assert sheet["requests"] == 1 and sheet["rows_left_out"] == 1
    assert reason in next(iter(sheet["left_out"]))
    assert main(["trace", "show", str(path), "--on-bad-row", "error"]) == 2
    error = capsys.readouterr().err
    assert file in error and error.count("\n") == 1


def test_a_window_is_read_and_no_more(tmp_path):
    rows = "".join(f"{second},{second + 1},1\n" for second in range(50, 100))
    path = write(tmp_path, "arrival_s,prompt_tokens,output_tokens\n" + rows + "bad,,\n", "t.csv")
    trace = read(path, window_start_s=10, window_length_s=5)
    assert list(trace.prompt_tokens) == [61, 62, 63, 64, 65]
    assert list(trace.arrival_ns) == [second * 10**9 for second in range(5)]
    with pytest.raises(InputError, match=r"t\.csv:52"):
        read(path, window_start_s=10)
    with pytest.raises(InputError, match="window"):
        read(CASES / "azure2024.csv", window_start_s=100)
    measured = read(CASES / "vllm_bench.json", window_start_s=0.5, window_length_s=1)
    assert list(measured.prompt_tokens) == [200]


def test_measured_requests_are_put_in_order_of_their_start(tmp_path):
    document = {"input_lens": [1, 2, 3], "output_lens": [4, 5, 6], "start_times": [7.5, 7.25, 9]}
    trace = read(write(tmp_path, json.dumps(document), "t.json"))
    assert list(trace.prompt_tokens) == [2, 1, 3]
    assert list(trace.arrival_ns) == [0, 250_000_000, 1_750_000_000]


def test_a_turn_whose_start_is_outside_the_window_is_left_out(tmp_path):
    rows = [{"session_id": "a", "timestamp": 0, "input_length": 6, "output_length": 5},
            {"session_id": "a", "delay": 5, "input_length": 16, "output_length": 5},
            {"session_id": "b", "timestamp": 5000, "input_length": 7, "output_length": 5},
            {"session_id": "b", "delay": 5, "input_length": 17, "output_length": 5}]  # fmt: skip
    trace = read(write(tmp_path, rows), window_start_s=2)
    assert list(trace.prompt_tokens) == [7, 17] and sum(trace.left_out.values()) == 1


def test_a_document_may_span_lines_and_be_packed(tmp_path):
    for name in ("guidellm.json", "vllm_bench.json", "sharegpt.json"):
        document = json.loads((CASES / name).read_text())
        path = tmp_path / f"{name}.gz"
        path.write_bytes(gzip.compress(json.dumps(document, indent=2).encode()))
        again, whole = (
            read(one, rate=None if name != "sharegpt.json" else 1.0,
                 chars_per_token=4 if name == "sharegpt.json" else None)
            for one in (path, CASES / name)
        )  # fmt: skip
        assert again.prompt_tokens == whole.prompt_tokens
        assert again.arrival_ns == whole.arrival_ns


UNREADABLE = {
    "prose": "Once upon a time, there was a trace.\nIt had a secret.\n",
    "array of numbers": "[1, 2, 3]",
    "cut array": '[{"conversations": [{"from": "human", "value": "secret"}',
    "cut object": '{"input_lens": [1, 2], "secret": \n',
    "other json": '{"secret": 1}\n{"secret": 2}\n',
    "mixed": '{"prompt": "a secret", "output_tokens": 3}\n{"timestamp": 0}\n',
    "unequal lists": '{"input_lens": [1, 2], "output_lens": [3]}',
    "no lists": '{"input_lens": "secret", "output_lens": [3]}',
    "empty array": "[]",
    "empty report": '{"benchmarks": []}',
    "binary": "\x00\x01secret\x02\n\x03",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_one_short_line_without_its_content(name, tmp_path, capsys):
    path = write(tmp_path, UNREADABLE[name], "t.txt")
    assert main(["trace", "show", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and len(error) < 500 + len(str(path))
    assert "t.txt" in error and "secret" not in error


def test_an_unknown_format_names_the_nearest_and_the_plain_schema(tmp_path):
    path = write(tmp_path, "TIMESTAMP,ContextToken,GeneratedTokens\n1,1,1\n", "t.csv")
    with pytest.raises(InputError, match="'ContextTokens' of the nearest format 'azure'") as caught:
        read(path)
    assert "arrival_s, prompt_tokens, output_tokens" in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [["--tokenizer", "x"], ["--output-len", "5"], ["--chars-per-token", "4"],
     ["--hash-block-tokens", "16"]],
)  # fmt: skip
def test_an_option_that_the_trace_has_no_use_for_is_refused(words, capsys):
    assert main(["sim", "run", "--trace", str(CASES / "azure2024.csv"), *words]) == 2
    assert "belongs to" in capsys.readouterr().err


def test_a_long_trace_is_read_row_by_row(tmp_path):
    """The columns are all that is kept: some tens of bytes a row, whatever the rows hold."""
    import tracemalloc

    path = tmp_path / "long.csv"
    count, noise = 40_000, "x" * 400
    with path.open("w") as file:
        file.write("arrival_s,prompt_tokens,output_tokens,comment\n")
        for row in range(count):
            file.write(f"{row},100,10,{noise}\n")
    tracemalloc.start()
    trace = read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(trace) == count and path.stat().st_size > 400 * count
    assert peak < 120 * count
