"""What the server costs a step: the gap between two steps of the device, with and without it.

    python benchmarks/serve_gap.py --out benchmarks/records/serve_gap.json

The device is a stand-in that takes a fixed time per step, so that the gap is the host's alone:
from the moment a result is there to the launch of the next step, without asynchronous scheduling,
which would hide it. The same streams are run

- `bare`: by `LLM.add_requests` and `LLM.step` without text,
- `text`: the same with text made token by token within the loop (`stream=True`),
- `thread`: over HTTP, with the engine's loop in a thread of the front end's process,
- `process`: over HTTP, with the engine's loop in a process of its own (what `lockstep serve` does).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import tempfile
import threading
import time
from array import array
from pathlib import Path
from unittest import mock

from engine.async_llm.async_llm import AsyncLLM
from engine.async_llm.engine_process import serve_socket
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.server.options import ServerOptions
from engine.server.run import listening_socket, make_listener
from engine.server.state import ServerState
from engine.worker.command import StepResult
from engine.worker.info import RunnerInfo

OPTIONS = dict(
    block_size=16, num_kvcache_blocks=20_000, max_model_len=4096, max_num_seqs=256,
    max_num_batched_tokens=8192, async_scheduling=False,
)  # fmt: skip
PROMPT_TOKENS = 100
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
)


class PacedExecutor:
    """A device whose steps take a fixed time; remembers how long it had nothing to do."""

    is_dead = False

    def __init__(self, options, step_s, gaps_us):
        self.info = RunnerInfo(
            options.num_kvcache_blocks, options.block_size, options.max_model_len,
            "none", "none", "none", "none", 1,
        )  # fmt: skip
        self._step_s, self._gaps_us = step_s, gaps_us
        self._idle_since = None
        self._launched = []

    def find_loss(self):
        return None

    def launch(self, command):
        now = time.perf_counter()
        if self._idle_since is not None and command.num_decodes and not command.chunks:
            self._gaps_us.append((now - self._idle_since) * 1e6)
        self._launched.append((now + self._step_s, command.num_samples))

    def collect(self):
        end, num_samples = self._launched.pop(0)
        time.sleep(max(0.0, end - time.perf_counter()))
        self._idle_since = time.perf_counter()
        return StepResult(array("q", [72 + self._idle_since.__hash__() % 50]) * num_samples)

    def reset(self):
        self._launched.clear()

    def close(self):
        pass


def paced(step_s, gaps_us):
    return mock.patch(
        "engine.llm.make_executor", lambda options: PacedExecutor(options, step_s, gaps_us)
    )


def prompts(args):
    return [[(number + place) % 200 for place in range(PROMPT_TOKENS)]
            for number in range(args.streams)]  # fmt: skip


def in_process(args, model, has_text):
    gaps_us = []
    with paced(args.step_ms / 1e3, gaps_us), LLM(model, **OPTIONS) as llm:
        params = SamplingParams(
            temperature=0, max_tokens=args.tokens, ignore_eos=True, detokenize=has_text
        )
        llm.add_requests(prompts(args), params, stream=has_text)
        while llm.has_unfinished_requests:
            llm.step()
    return gaps_us


def engine_main(sock, model, step_s, report):
    """The engine in a process of its own."""
    gaps_us = []
    with paced(step_s, gaps_us):
        serve_socket(sock, model, OPTIONS)
    report.send(gaps_us)


def over_http(args, model, own_process):
    ours, theirs = socket.socketpair()
    gaps_us = []
    if own_process:
        context = multiprocessing.get_context("spawn")
        receiving, sending = context.Pipe(False)
        engine = context.Process(
            target=engine_main, args=(theirs, model, args.step_ms / 1e3, sending)
        )
        engine.start()
        theirs.close()
        asyncio.run(serve_clients(args, model, ours))
        gaps_us = receiving.recv()
        engine.join()
    else:
        with paced(args.step_ms / 1e3, gaps_us):
            thread = threading.Thread(target=serve_socket, args=(theirs, model, OPTIONS))
            thread.start()
            asyncio.run(serve_clients(args, model, ours))
            thread.join()
    return gaps_us


async def serve_clients(args, model, ours):
    body = AsyncLLM(model, **OPTIONS)
    await body.connect(ours, model)
    options = ServerOptions(port=0)
    with listening_socket(options) as sock:
        listener = make_listener(ServerState(body, options))
        serving = asyncio.create_task(listener.serve([sock]))
        clients = multiprocessing.get_context("spawn").Process(
            target=clients_main, args=(sock.getsockname()[1], args.streams, args.tokens)
        )
        clients.start()
        await asyncio.to_thread(clients.join)
        assert clients.exitcode == 0
        listener.should_exit = True
        await serving
    await body.close()


def clients_main(port, streams, tokens):
    """Streaming clients in a process of their own."""
    asyncio.run(all_clients(port, streams, tokens))


async def all_clients(port, streams, tokens):
    async def one(number):
        prompt = [(number + place) % 200 for place in range(PROMPT_TOKENS)]
        asked = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        content = json.dumps(asked).encode()
        head = HEAD % len(content)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + content)
        last = b""
        while line := await reader.readline():
            last = line.strip() if line.startswith(b"data: ") else last
        assert last == b"data: [DONE]", last
        writer.close()

    await asyncio.gather(*map(one, range(streams)))


def figures(gaps_us):
    ordered = sorted(gaps_us)
    return {
        "steps": len(ordered),
        "gap_us_mean": round(statistics.fmean(ordered), 1),
        "gap_us_p50": round(ordered[len(ordered) // 2], 1),
        "gap_us_p90": round(ordered[len(ordered) * 9 // 10], 1),
        "gap_us_p99": round(ordered[len(ordered) * 99 // 100], 1),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--step-ms", type=float, default=20.0)
    args = parser.parse_args()
    root = Path(__file__).parents[1]
    sys.path[:0] = [str(root), str(root / "tests/engine")]
    from tests.engine.serving import write_tiny_with_text

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_with_text(Path(folder) / "model")
        found["bare"] = figures(in_process(args, model, False))
        found["text"] = figures(in_process(args, model, True))
        found["thread"] = figures(over_http(args, model, False))
        found["process"] = figures(over_http(args, model, True))
    record = {
        "what": "gap between two steps of the device, in microseconds",
        "command": "python benchmarks/serve_gap.py",
        "streams": args.streams, "tokens": args.tokens, "step_ms": args.step_ms,
        "cores": os.cpu_count(), "python": platform.python_version(),
        "variants": found,
    }  # fmt: skip
    print(json.dumps(record, indent=2))
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
