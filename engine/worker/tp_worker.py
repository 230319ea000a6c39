"""One rank of a tensor-parallel engine, in its own process.

A worker obeys messages of its pipe in order: the first byte says what, the rest is the payload.
Rank 0 answers for all; any rank that fails answers with its traceback and ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

from engine.core.errors import LockstepError
from engine.options import EngineOptions

STEP, COLLECT, RESET, ASK, CLOSE = b"S", b"C", b"R", b"A", b"Q"
READY, RESULT, FAILED, REFUSED = b"r", b"t", b"f", b"e"


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where a worker stands; `rendezvous` is a file that only this engine's ranks know."""

    rank: int
    size: int
    rendezvous: str
    num_threads: int | None


def worker_main(place: WorkerPlace, options: EngineOptions, pipe: Connection) -> None:
    """Entry point of the process."""
    # The engine decides when to end; an interrupt of the terminal reaches it first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _serve(place, options, pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # The engine is gone and can no longer tidy up.
        shutil.rmtree(os.path.dirname(place.rendezvous), ignore_errors=True)
        os._exit(0)
    except LockstepError as error:
        # The user's mistake; the engine raises it again as if it had happened there.
        _send(pipe, REFUSED + pickle.dumps(error))
        os._exit(1)
    except BaseException:
        _send(pipe, FAILED + f"rank {place.rank}: {traceback.format_exc()}".encode())
        # A collective may still hold a thread of this process; nothing is left to clean up.
        os._exit(1)
    # Everything is given back; tearing the interpreter down would only take seconds.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _send(pipe: Connection, message: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody is left to tell
        pipe.send_bytes(message)


def _serve(place: WorkerPlace, options: EngineOptions, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from engine.distributed.one_shot import connect_group
    from engine.worker.device import resolve_device
    from engine.worker.probe import RankProbe
    from engine.worker.runner import ModelRunner
    from engine.worker.tp_messages import decode_command, encode_result

    device = resolve_device(options, place.rank)
    if place.num_threads is not None:
        torch.set_num_threads(min(place.num_threads, torch.get_num_threads()))
    # All ranks are on this host, so gloo needs no other interface than the loopback.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{place.rendezvous}",
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=options.worker_timeout_s),
        device_id=device if on_gpu else None,
    )
    runner = ModelRunner(options, connect_group(place.rank, place.size, device), device)
    probe = RankProbe(runner)
    pipe.send_bytes(READY + runner.info.to_json().encode())
    while True:
        message = pipe.recv_bytes()
        kind, payload = message[:1], message[1:]
        if kind == STEP:
            runner.launch(decode_command(payload))
        elif kind == COLLECT:
            result = runner.collect()
            if place.rank == 0:
                pipe.send_bytes(RESULT + encode_result(result))
        elif kind == RESET:
            runner.drop_steps()
            if place.rank == 0:
                pipe.send_bytes(RESULT + RESET)
        elif kind == ASK:
            pipe.send_bytes(RESULT + probe.answer(payload.decode()).encode())
        elif kind == CLOSE:
            break
        else:
            raise AssertionError(f"unknown message {kind!r}")
    runner.close()
    dist.destroy_process_group()
