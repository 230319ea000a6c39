"""What an executor does when the device or an interrupt hits it at a bad moment."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref

import pytest
import torch
from llm_testing import greedy, make_prompts, start, tokens_of, write_tiny_model

from engine.llm import EngineClosed
from engine.sampling_params import SamplingParams
from engine.step.loop import StepFailed
from engine.worker.interrupts import DeferredInterrupt
from engine.worker.tp_executor import TpExecutor


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


class StickyError(RuntimeError):
    """What CUDA says at every call after an illegal access."""


def break_device(llm):
    runner = llm.executor.runner

    def broken(*args):
        raise StickyError("an illegal memory access was encountered")

    runner.launch = runner.collect = runner.drop_steps = broken


def test_nothing_frees_what_lies_on_a_dead_device(folder):
    """Torch ends the process where pinned memory is freed after a sticky CUDA error."""
    llm = start(folder)
    runner = weakref.ref(llm.executor.runner)
    closed = []
    llm.executor.runner.close = lambda: closed.append(True)
    break_device(llm)
    llm.add_requests([[1, 2]], greedy(3))
    with pytest.raises(StepFailed):
        llm.step()
    llm.step()
    llm.close()
    del llm
    gc.collect()
    assert runner() is not None and not closed


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_that_does_not_go_away_ends_every_request_and_the_engine(
    folder, tmp_path, asynchronous
):
    log = tmp_path / "steps.jsonl"
    llm = start(folder, async_scheduling=asynchronous, max_num_seqs=2, step_log=str(log))
    ids = llm.add_requests([[1, 2], [3], [4]], greedy(8))
    llm.step()
    break_device(llm)
    with pytest.raises(StepFailed, match="illegal memory access") as caught:
        while True:
            llm.step()
    assert isinstance(caught.value.__cause__, StickyError)
    assert llm.has_unfinished_requests  # what it owes can still be taken
    outputs = llm.step()
    assert [output.request_id for output in outputs] == ids
    assert {output.outputs[0].finish_reason for output in outputs} == {"error"}
    assert all("illegal memory access" in output.outputs[0].error for output in outputs)
    assert not llm.has_unfinished_requests
    with pytest.raises(EngineClosed):
        llm.step()
    llm.close()
    assert hasattr(llm.executor.runner, "model")  # see the test before this one
    assert log.exists()


def fail_once(runner, name):
    """The part does its work and then finds no memory, once."""
    original, calls = getattr(runner, name), []

    def broken(*args):
        result = original(*args)
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return result

    setattr(runner, name, broken)
    return calls


PARAMS = [greedy(9), SamplingParams(temperature=0.9, seed=3, top_p=0.8, max_tokens=9), greedy(9)]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("part", ["_run_chunks", "_sample", "_keep", "_fetch"])
def test_a_step_that_finds_too_little_memory_is_tried_again(folder, part, asynchronous):
    prompts = make_prompts(seed=5, count=3, longest=30)
    options = dict(async_scheduling=asynchronous, max_num_batched_tokens=12)
    with start(folder, **options) as llm:
        expected = tokens_of(llm.generate(prompts, PARAMS, use_tqdm=False))
    with start(folder, **options) as llm:
        calls = fail_once(llm.executor.runner, part)
        assert tokens_of(llm.generate(prompts, PARAMS, use_tqdm=False)) == expected
        assert len(calls) >= 2


def test_a_step_that_never_finds_memory_fails(folder):
    with start(folder) as llm:

        def broken(command):
            raise torch.OutOfMemoryError("CUDA out of memory")

        llm.executor.runner._run_chunks = broken
        with pytest.raises(StepFailed, match="out of memory"):
            llm.generate([[1, 2]], greedy(), use_tqdm=False)
        assert not llm.has_unfinished_requests


def test_an_interrupt_waits_for_the_end_of_a_message_and_a_second_one_does_not():
    reached = []
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt():
        signal.raise_signal(signal.SIGINT)
        reached.append("first")
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        reached.append("second")
    assert reached == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with DeferredInterrupt():
        pass


class InterruptedPipe:
    """The user presses Ctrl-C while a message goes through, once or twice."""

    def __init__(self, presses):
        self.presses, self.sent = presses, []

    def press(self):
        for _ in range(self.presses):
            signal.raise_signal(signal.SIGINT)

    def send_bytes(self, message):
        self.press()
        self.sent.append(message)

    def recv_bytes(self):
        self.press()
        return b"?answer"

    def close(self):
        self.sent = None


def executor_with(*pipes):
    executor = object.__new__(TpExecutor)
    executor._closed, executor._processes, executor._folder = False, [], "nowhere"
    executor._pipes = list(pipes)
    return executor


@pytest.mark.parametrize("call", [lambda e: e._broadcast(b"?step"), lambda e: e._payload(0)])
def test_an_interrupt_that_waited_for_a_whole_message_ends_no_worker(call):
    """It comes when every rank has the message, so they are still in step."""
    executor = executor_with(InterruptedPipe(1), InterruptedPipe(0))
    with pytest.raises(KeyboardInterrupt):
        call(executor)
    assert not executor.is_dead
    assert all(pipe.sent in ([], [b"?step"]) for pipe in executor._pipes)
    executor = executor_with(InterruptedPipe(2), InterruptedPipe(0))
    with pytest.raises(KeyboardInterrupt):
        call(executor)
    assert executor.is_dead  # the second one broke the message off


@pytest.mark.nightly  # real signals at moments that the machine's load decides
def test_ranks_stay_in_step_when_ctrl_c_hits_at_random_moments(folder):
    """Each run is interrupted by a signal; the engine then says what it said before."""
    prompts = make_prompts(seed=6, count=3)
    with start(folder, tensor_parallel_size=2) as llm:
        begin = time.monotonic()
        expected = tokens_of(llm.generate(prompts, greedy(20), use_tqdm=False))
        length_s = time.monotonic() - begin
        interrupted = 0
        for place in range(12):
            timer = threading.Timer(
                length_s * (place + 0.5) / 14, os.kill, (os.getpid(), signal.SIGINT)
            )
            try:
                timer.start()
                llm.generate(prompts, greedy(20), use_tqdm=False)
                time.sleep(60)  # at the latest the signal ends this
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                timer.cancel()  # a signal that is left over would end the whole test run
                timer.join()
            assert not llm.has_unfinished_requests
        assert interrupted > 3
        assert tokens_of(llm.generate(prompts, greedy(20), use_tqdm=False)) == expected


def test_a_broadcast_that_breaks_off_ends_the_engine(folder):
    """Some ranks have the command and some have not: no further step can be trusted."""
    with start(folder, tensor_parallel_size=2) as llm:
        [own] = llm.add_requests([[1, 2]], greedy(20))
        llm.step()
        _first, second = llm.executor._pipes

        class Interrupted:
            def send_bytes(self, message):
                raise KeyboardInterrupt

            def __getattr__(self, name):
                return getattr(second, name)

        llm.executor._pipes[1] = Interrupted()
        with pytest.raises(KeyboardInterrupt):
            llm.step()
        assert llm.executor.is_dead
        [output] = llm.step()
        assert (output.request_id, output.outputs[0].finish_reason) == (own, "error")
        with pytest.raises(EngineClosed):
            llm.step()
