"""`lockstep serve` as a process of its own, and what a test asks of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.places import REPOSITORY

START_TIMEOUT_S = 120
TINY_OPTIONS = (
    *("--device", "cpu", "--block-size", "4", "--max-num-seqs", "16", "--max-model-len", "128"),
    *("--max-num-batched-tokens", "128", "--num-kvcache-blocks", "256"),
)


def write_tiny_with_text(folder):
    """A tiny model of random weights that can be asked in text."""
    from llm_testing import write_tiny_model
    from tokenizer_testing import byte_level

    tokenizer = byte_level()
    write_tiny_model(folder, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return str(folder)


class Server:
    """A running server."""

    def __init__(self, process, url):
        self.process, self.url = process, url
        self.log = []
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()

    def _read_log(self):
        with self.process.stderr as lines:
            for line in lines:
                self.log.append(line)

    def join(self):
        """Waits for the end of the log."""
        self._reader.join()

    def metrics(self):
        """Samples by name and labels that are not the model's."""
        return parsed(httpx.get(f"{self.url}/metrics", timeout=30).text)

    def stop(self, number=signal.SIGTERM, timeout=60):
        """Sends a signal and gives the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout)

    def engine_pid(self):
        """The engine's process, a child of the front end."""
        found = subprocess.run(
            ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(self.process.pid)],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        lines = [line.split(None, 1) for line in found.splitlines()]
        return next(int(pid) for pid, args in lines if "spawn_main" in args)


def parsed(text):
    """Samples of `/metrics` by (name, further labels)."""
    return {
        (sample.name, *sorted(
            value for key, value in sample.labels.items() if key not in ("model_name", "engine")
        )): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }  # fmt: skip


@contextlib.contextmanager
def running(model, *options):
    """A server over a model folder, until the block ends."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "engine", "serve", str(model), "--port", "0", *options],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    timer = threading.Timer(START_TIMEOUT_S, process.kill)
    timer.start()
    server = None
    try:
        line = process.stdout.readline()
        found = re.search(r"on (http://\S+)$", line)
        assert found, line + process.stderr.read()
        timer.cancel()
        server = Server(process, found[1])
        yield server
    finally:
        timer.cancel()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()
        if server is not None:
            server.join()
