"""Publishes batches over ZeroMQ from a thread of its own: PUB for all, ROUTER for replays."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque

import msgspec

from engine.core.errors import ConfigError
from engine.core.scheduler import Scheduler
from engine.kv_events.notes import BlockNotes, Note, Translator
from engine.kv_events.options import KvEventsOptions, endpoint_of
from engine.kv_events.wire import KvEventBatch

_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_CLOSE_S = 2.0
# How long the thread waits for notes before it looks for requests to replay.
_LOOK_S = 0.02


class KvPublisher:
    """The KV events of one scheduler.

    Subscribers get (topic, number of the batch as 8 bytes big-endian, batch). A REQ socket that
    sends such a number to the replay endpoint gets the batches from there on, each as (topic,
    number, batch), and the number -1 as the last.

    Raises:
        ConfigError: an endpoint cannot be had.
    """

    def __init__(self, options: KvEventsOptions, scheduler: Scheduler, rank: int = 0) -> None:
        import zmq

        if not scheduler.config.enable_prefix_caching:
            raise ConfigError("kv_events_config", "(given)", "needs enable_prefix_caching")
        config = self._config = options.config
        self._rank = rank
        self._topic = config.topic.encode()
        self._translator = Translator(options.hasher(), scheduler.config.block_size)
        self._queue: queue.Queue[tuple[float, list[Note]] | None]
        self._queue = queue.Queue(config.max_queue_size)
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._replay = None
        try:
            self._open("endpoint", self._pub, config.endpoint)
            if config.replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                # A whole replay and its end fit in, however slowly its client reads.
                self._replay.setsockopt(zmq.SNDHWM, 2 * (config.buffer_steps + 1))
                self._open("replay_endpoint", self._replay, config.replay_endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next = 0
        self._notes = BlockNotes()
        self._scheduler = scheduler
        scheduler.observe_blocks(self._notes)
        self._thread = threading.Thread(target=self._run, daemon=True, name="kv-events")
        self._thread.start()

    def follow(self, scheduler: Scheduler) -> None:
        """Goes on with this scheduler; if it is a new one, all that was cached is gone."""
        if scheduler is not self._scheduler:
            self._notes.cleared()
            self._scheduler = scheduler
            scheduler.observe_blocks(self._notes)

    def flush(self) -> None:
        """Hands over what the step did; waits while `max_queue_size` batches wait."""
        notes = self._notes.take()
        if notes and self._thread.is_alive():
            self._queue.put((time.time(), notes))

    def close(self) -> None:
        """Publishes what is left and closes the sockets."""
        if self._context.closed:
            return
        self.flush()
        self._queue.put(None)
        self._thread.join(_CLOSE_S)
        self._context.destroy(linger=int(_CLOSE_S * 1000))

    def _open(self, name: str, sock: object, endpoint: str) -> None:
        import zmq

        assert isinstance(sock, zmq.Socket)
        where = endpoint_of(endpoint, self._rank)
        # As in vLLM: a publisher connects to an address of somebody else's.
        is_ours = sock is self._replay or "*" in where or "::" in where or where.startswith("ipc")
        try:
            if is_ours:
                sock.bind(where)
            else:
                sock.connect(where)
        except zmq.ZMQError as error:
            raise ConfigError(f"kv_events_config.{name}", where, str(error)) from None

    def _run(self) -> None:
        encode = msgspec.msgpack.Encoder().encode
        while True:
            self._answer_replays()
            try:
                taken = self._queue.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            if taken is None:
                return
            stamp, notes = taken
            events = self._translator.events(notes)
            if events:
                self._send(encode(KvEventBatch(stamp, events, self._rank)))

    def _send(self, payload: bytes) -> None:
        number, self._next = self._next, self._next + 1
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        self._sent.append((number, payload))

    def _answer_replays(self) -> None:
        while self._replay is not None and self._replay.poll(0):
            frames = self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue  # not a question of this protocol
            client, start = frames[0], int.from_bytes(frames[2], "big")
            for number, payload in self._sent:
                if number >= start:
                    answer = (client, b"", self._topic, number.to_bytes(8, "big"), payload)
                    self._replay.send_multipart(answer)
            self._replay.send_multipart((client, b"", b"", _END_OF_REPLAY, b""))
