"""An engine on a stand-in for the model, and runs that are disturbed at any point.

The stand-in keeps what a runner keeps per slot and row, and draws tokens that depend on a
request's seed and position alone; so every output can be told from its request.
"""

from __future__ import annotations

import contextlib
import random
import sys
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import engine
from engine.core import audit
from engine.core.errors import RequestRejected
from engine.llm import LLM
from engine.sampling_params import SamplingParams, request_seed
from engine.step.loop import StepFailed
from engine.worker.command import StepResult
from engine.worker.info import RunnerInfo

NUM_TOKENS = 40  # ids that are ever drawn
STOP_ID = 7
ENGINE_FOLDER = str(Path(engine.__file__).parent)


def drawn(seed, position):
    return (seed * 2654435761 + position * 40503 + (seed ^ position) // 3) % NUM_TOKENS


class Boom(Exception):
    """A planted failure."""


class StandIn:
    """Computes steps without a model; raises where it is told to."""

    is_dead = False

    def __init__(self, options, faults=()):
        self.options = options
        self.info = RunnerInfo(
            num_blocks=options.num_kvcache_blocks,
            block_size=options.block_size,
            max_model_len=options.max_model_len,
            device="none",
            device_name="none",
            dtype="none",
            attention_backend="none",
            tensor_parallel_size=1,
        )
        self._faults = dict(faults)  # call number -> exception
        self._calls = 0
        self._seeds, self._rows, self._launched = {}, [], []

    def _disturb(self):
        self._calls += 1
        error = self._faults.get(self._calls)
        if error is not None:
            raise error("planted")

    def launch(self, command):
        self._disturb()
        for params in command.new_slots:
            self._seeds[params.slot] = params.seed
        if command.decode_slots is not None:
            pairs = zip(command.decode_slots, command.decode_positions, strict=True)
            self._rows = [list(pair) for pair in pairs]
        tokens = array("q")
        for row in self._rows[: command.num_decodes]:
            tokens.append(drawn(self._seeds[row[0]], row[1] + 1))
            row[1] += 1
        for chunk in command.chunks:
            if chunk.samples:
                end = chunk.first_position + len(chunk.token_ids)
                tokens.append(drawn(self._seeds[chunk.slot], end))
        self._launched.append(tokens)
        assert len(self._launched) <= 2

    def collect(self):
        self._disturb()
        return StepResult(self._launched.pop(0))

    def reset(self):
        self._launched.clear()

    def close(self):
        self._launched.clear()


class LetterTokenizer:
    """One letter per token; raises for an id that it is told to refuse."""

    def __init__(self, refused=None):
        self.refused = refused

    def encode(self, text, **options):
        return [ord(letter) - 0x100 for letter in text]

    def decode(self, token_ids, *, skip_special_tokens):
        if self.refused in token_ids:
            raise Boom("this token has no text")
        return "".join(chr(0x100 + token_id) for token_id in token_ids)


@contextlib.contextmanager
def stand_in_engine(folder, faults=(), refused=None, **options):
    settings = dict(
        block_size=4,
        num_kvcache_blocks=16,
        max_model_len=48,
        max_num_seqs=3,
        max_num_batched_tokens=16,
    )
    with mock.patch("engine.llm.make_executor", lambda options: StandIn(options, faults)):
        llm = LLM(folder, **{**settings, **options})
    llm.tokenizer = LetterTokenizer(refused)
    try:
        yield llm
    finally:
        llm.close()


class InterruptAtLine:
    """Raises KeyboardInterrupt when the n-th line of (a part of) the engine is about to run."""

    def __init__(self, line, part=""):
        self.line, self.seen, self.place = line, 0, None
        self.part = ENGINE_FOLDER + part

    def __enter__(self):
        if self.line:
            # Python itself swallows what is raised in a finaliser.
            self._hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
            sys.settrace(self._called)
        return self

    def __exit__(self, *error):
        if self.line:
            sys.settrace(None)
            sys.unraisablehook = self._hook

    def _called(self, frame, event, argument):
        return self._stepped if frame.f_code.co_filename.startswith(self.part) else None

    def _stepped(self, frame, event, argument):
        if event == "line" and self.place is None:
            self.seen += 1
            if self.seen == self.line:
                self.place = (frame.f_code.co_filename[len(ENGINE_FOLDER) :], frame.f_lineno)
                raise KeyboardInterrupt(f"planted at {self.place}")
        return self._stepped


@dataclass
class Tally:
    """What a run's caller was promised and given."""

    accepted: dict = field(default_factory=dict)  # id -> (number, prompt, params)
    given: list = field(default_factory=list)
    dropped: set = field(default_factory=set)  # cancelled: at most one output, from before
    silenced: dict = field(default_factory=dict)  # cancelled to the end -> outputs until then
    errors: Counter = field(default_factory=Counter)

    def accept(self, llm, ids, prompts, params):
        for name, prompt, param in zip(ids, prompts, params, strict=True):
            self.accepted[name] = (prompt, param)


def random_request(rng):
    prompt = [rng.randrange(NUM_TOKENS) for _ in range(rng.choice([1, 3, 8, 17]))]
    if rng.random() < 0.4:
        prompt = [5] * 8 + prompt
    params = SamplingParams(
        max_tokens=rng.choice([1, 2, 5, 12]),
        stop_token_ids=rng.choice([(), (STOP_ID,), (STOP_ID, 11, 13)]),
        stop=rng.choice([(), (), (chr(0x100 + 3),)]),
        ignore_eos=True,
        seed=rng.choice([None, rng.randrange(1000)]),
    )
    return prompt, params


def expected(number, prompt, params):
    """(tokens, finish reason) of a request that nothing disturbs."""
    seed = request_seed(params, 0, number)
    stops = {*params.stop_token_ids, *(ord(text) - 0x100 for text in params.stop_strings)}
    tokens = []
    while True:
        tokens.append(drawn(seed, len(prompt) + len(tokens)))
        if tokens[-1] in stops:
            return tokens, "stop"
        if len(tokens) == params.max_tokens or len(prompt) + len(tokens) == 48:
            return tokens, "length"


def act(llm, rng, tally):
    """One random call of the facade, as a caller would make it who survives what it raises."""
    kind = rng.choice(["add", "add", "step", "step", "step", "step", "abort", "generate", "stream"])
    if kind == "add":
        prompts, params = zip(*[random_request(rng) for _ in range(rng.randint(1, 3))], strict=True)
        tally.accept(llm, llm.add_requests(list(prompts), list(params)), prompts, params)
    elif kind == "step":
        tally.given += llm.step()
    elif kind == "abort" and tally.accepted:
        name = rng.choice([*tally.accepted])
        if name % 2:
            cancel(llm, name, tally)
        elif (output := llm.abort(name)) is not None:
            tally.given.append(output)
    elif kind == "generate":
        prompts, params = zip(*[random_request(rng) for _ in range(2)], strict=True)
        outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
        tally.accept(llm, [output.request_id for output in outputs], prompts, params)
        tally.given += outputs
    elif kind == "stream":
        prompt, params = random_request(rng)
        stream = llm.stream([prompt], params)
        for output in stream:
            if output.finished:
                tally.accept(llm, [output.request_id], [prompt], [params])
                tally.given.append(output)
            elif rng.random() < 0.1:
                break
            elif rng.random() < 0.3:  # somebody else goes on meanwhile
                tally.given += llm.step()
        stream.close()


def cancel(llm, name, tally):
    tally.dropped.add(name)
    num_given = sum(output.request_id == name for output in tally.given)
    llm.cancel(name)
    tally.silenced[name] = num_given


def disturbed_run(folder, seed, line=0, num_faults=0, num_acts=14, step_log=None, part=""):
    """One run with one disturbance or more; asserts the law of the facade."""
    rng = random.Random(seed)
    options = dict(
        async_scheduling=rng.random() < 0.6,
        policy=rng.choice(["mixed", "prefill_first"]),
        enable_prefix_caching=rng.random() < 0.8,
        block_size=rng.choice([2, 4]),
        max_num_batched_tokens=rng.choice([5, 16, 64]),
        debug=rng.random() < 0.3,
        step_log=step_log,
    )
    options["num_kvcache_blocks"] = rng.choice([48, 64, 200]) // options["block_size"]
    faults = {
        rng.randint(1, 40): rng.choice([Boom, Boom, KeyboardInterrupt, MemoryError])
        for _ in range(num_faults)
    }
    refused = rng.choice([None, None, 19])
    tally = Tally()
    with stand_in_engine(folder, faults, refused, **options) as llm:
        kernel = llm.scheduler
        if num_faults and rng.random() < 0.2:
            llm.on_step = failing_callback(rng.randint(1, 20))
        with InterruptAtLine(line, part) as interrupt:
            for _ in range(num_acts):
                survive(lambda: act(llm, rng, tally), tally)
            drain(llm, tally)
        check_law(llm, tally, refused)
        if not line and KeyboardInterrupt not in faults.values():
            assert llm.scheduler is kernel  # a step that fails costs nobody outside it anything
    return interrupt.place, tally


def failing_callback(number):
    steps = []

    def on_step(step):
        steps.append(step)
        if len(steps) == number:
            raise Boom("the callback")

    return on_step


def survive(call, tally):
    try:
        call()
    except (Boom, StepFailed, KeyboardInterrupt, RequestRejected) as error:
        tally.errors[type(error).__name__] += 1


def drain(llm, tally):
    """The usual loop of a caller, who goes on after a failure."""

    def step():
        tally.given.extend(llm.step())

    unfinished = []
    for _ in range(2000):
        survive(lambda: unfinished.append(llm.has_unfinished_requests), tally)
        if unfinished and not unfinished[-1]:
            return
        survive(step, tally)
    raise AssertionError("the loop of step() never ends")


def check_law(llm, tally, refused):
    """Everything accepted was given exactly once and is right; nothing of it is left."""
    counts = Counter(output.request_id for output in tally.given)
    for name in tally.dropped:
        assert counts[name] <= tally.silenced.get(name, 1)
        counts[name] = 1
    assert counts == Counter([*tally.accepted]), (counts, [*tally.accepted])
    for output in tally.given:
        completion = output.outputs[0]
        number = output.request_id
        prompt, params = tally.accepted[number]
        tokens, reason = expected(number, prompt, params)
        found = list(completion.token_ids)
        assert found == tokens[: len(found)], (number, found, tokens)
        if completion.finish_reason in ("stop", "length"):
            assert (found, completion.finish_reason) == (tokens, reason)
            assert completion.error is None
        else:
            assert completion.finish_reason in ("abort", "error")
            assert (completion.error is None) == (completion.finish_reason == "abort")
    assert llm.scheduler.num_free_blocks == llm.info.num_blocks
    assert not llm.scheduler.has_work
    assert llm._loop.num_open == 0
    assert llm._loop._builder.num_free_slots == llm.options.max_num_seqs
    audit(llm.scheduler)
    prompt, params = [5] * 8 + [1, 2, 3], SamplingParams(max_tokens=6, seed=4, ignore_eos=True)
    llm.on_step, llm.tokenizer.refused = None, None
    llm.executor._faults.clear()
    [output] = llm.generate([prompt], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == expected(0, prompt, params)[0]
    assert llm.scheduler.num_free_blocks == llm.info.num_blocks
