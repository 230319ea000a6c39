"""The real small model: its greedy text is that of HF Transformers."""

from __future__ import annotations

import json

import pytest
from llm_testing import tokens_of

from engine.cli import main as cli
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.worker.probe import STATE_DIGEST

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):",
    "Once upon a time, in a small village",
]
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def folder(smollm2_folder):
    return str(smollm2_folder)


@pytest.fixture(scope="module")
def outputs(folder):
    """The engine's greedy outputs; the tests compare others with them and them with HF."""
    with LLM(folder, device="cpu", max_model_len=256, max_num_seqs=4) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        return llm.generate(PROMPTS, params, use_tqdm=False)


@pytest.fixture(scope="module")
def expected(folder, outputs):
    """HF's greedy ids and texts.

    One pass of HF over prompt and output is enough: if its argmax after every prefix is the next
    token, then its own greedy search, step by step, finds these tokens.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt, ids in zip(PROMPTS, tokens_of(outputs), strict=True):
        start = tokenizer(prompt).input_ids
        with torch.inference_mode():
            logits = model(torch.tensor([[*start, *ids]])).logits[0]
        new = logits.argmax(-1)[len(start) - 1 : -1].tolist()
        found.append((new, tokenizer.decode(new, skip_special_tokens=True)))
    return found


def test_greedy_text_is_that_of_hf(outputs, expected):
    assert tokens_of(outputs) == [ids for ids, _ in expected]
    assert [len(ids) for ids in tokens_of(outputs)] == [MAX_TOKENS] * len(PROMPTS)
    assert [output.outputs[0].text for output in outputs] == [text for _, text in expected]
    assert "Paris" in outputs[0].outputs[0].text


def test_chunks_a_tiny_pool_and_streams_give_the_same_text(folder, expected):
    options = dict(num_kvcache_blocks=8, max_num_batched_tokens=9, max_num_seqs=4, block_size=8)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    with LLM(folder, device="cpu", max_model_len=64, async_scheduling=True, **options) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        last = list(llm.stream(PROMPTS[0], params))[-1]
    assert tokens_of(outputs) == [ids[:12] for ids, _ in expected]
    assert expected[0][1].startswith(last.outputs[0].text)
    assert list(last.outputs[0].token_ids) == expected[0][0][:12]


def test_three_ranks_share_the_nine_heads(folder, expected):
    params = SamplingParams(temperature=0.0, max_tokens=8)
    with LLM(folder, device="cpu", max_model_len=64, max_num_seqs=4, tensor_parallel_size=3) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        digests = llm.executor.ask(STATE_DIGEST)
    assert tokens_of(outputs) == [ids[:8] for ids, _ in expected]
    assert len(set(digests)) == 1


def test_a_chat_stops_at_the_end_of_the_turn(folder):
    message = [{"role": "user", "content": "Say hello."}]
    with LLM(folder, device="cpu", max_model_len=256, max_num_seqs=4) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=64)
        output = llm.chat(message, params, use_tqdm=False)[0].outputs[0]
        end = llm.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert output.finish_reason == "stop"
    assert output.token_ids[-1] == end
    assert "<|" not in output.text


def test_the_command_line_answers(folder, capsys):
    command = ["generate", "--model", folder, "--device", "cpu", "--max-model-len", "64"]
    command += ["--max-tokens", "6", "--prompt", PROMPTS[0]]
    assert cli(command) == 0
    plain = capsys.readouterr().out
    assert plain.startswith(PROMPTS[0])
    assert "Paris" in plain
    assert cli([*command, "--stream"]) == 0
    assert PROMPTS[0] + capsys.readouterr().out == plain
    assert cli([*command, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert PROMPTS[0] + record["text"] + "\n" == plain
    assert len(record["token_ids"]) == 6
