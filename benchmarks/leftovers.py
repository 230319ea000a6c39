"""What a killed engine leaves behind: processes, shared files, GPU memory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# What a device may hold more than at the start: the driver rounds and keeps a little.
MEMORY_SLACK_MIB = 64
FREED_LIMIT_S = 30.0


def wait_for_memory(gpus, start_mib, since):
    """Seconds until every GPU is back near its start (None: not within the limit), and the end."""
    while True:
        now_mib = gpu_memory_mib(gpus)
        if len(now_mib) != len(gpus) or len(start_mib) != len(gpus):
            return None, now_mib  # it cannot be told
        elapsed_s = time.perf_counter() - since
        over = [now - then for now, then in zip(now_mib, start_mib, strict=True)]
        if all(excess <= MEMORY_SLACK_MIB for excess in over):
            return round(elapsed_s, 2), now_mib
        if elapsed_s > FREED_LIMIT_S:
            return None, now_mib
        time.sleep(0.1)


def gpu_memory_mib(gpus):
    """Memory in use per GPU, whoever uses it; empty on a CPU or if nvidia-smi does not tell."""
    if not gpus:
        return []
    command = ["nvidia-smi", "-i", ",".join(gpus), "--query-gpu=memory.used"]
    command.append("--format=csv,noheader,nounits")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return [int(line) for line in done.stdout.split()]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"nvidia-smi: {error}", file=sys.stderr)
        return []


class Leftovers:
    """Children of this process and shared files, compared with those at construction."""

    def __init__(self):
        self._children = set(children())
        self._files = shared_files()

    def new_children(self):
        return [pid for pid in children() if pid not in self._children]

    def new_files(self):
        """A second look leaves out what neighbours held for a moment."""
        first = shared_files() - self._files
        time.sleep(2.0 if first else 0.0)
        return first & shared_files()


def shared_files():
    rendezvous = Path(tempfile.gettempdir()).glob("lockstep-*/rendezvous")
    return {*Path("/dev/shm").iterdir(), *rendezvous}


def children():
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = status.read_text().rsplit(")", 1)[1].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z":
            yield int(status.parent.name)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
