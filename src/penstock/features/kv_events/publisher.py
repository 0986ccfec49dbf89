"""Publisher of KV cache events: a PUB socket, and a ROUTER socket for batches that a subscriber has missed."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from penstock.config.kv_events import KVEventsConfig, endpoint_of_rank, listens
from penstock.errors import ConfigError
from penstock.features.kv_events.events import EventBatch, KVCacheEvent

logger = logging.getLogger(__name__)
# Number behind the last batch of a replay.
_END = (-1).to_bytes(8, "big", signed=True)
# Seconds for which the first batches wait for a subscriber, since those of a core that was replaced need some time to
# connect again; and time for which the last ones wait to be sent.
_FIRST_WAIT_S, _LINGER_MS = 1.0, 200
# Seconds between two warnings.
_WARN_S = 60.0


class EventPublisher:
    """Publishes batches from a thread: topic, number (8 bytes, big-endian, from 0 on), payload.

    A client of the replay endpoint sends the first number that it wants; it gets number and payload of each batch from
    there on, of the last `buffer_steps`, then -1 and an empty payload.

    rank: of the engine in data parallelism. num_batches, num_dropped: batches so far, and those that were not sent, as
    too many others waited. Raises ConfigError for an endpoint at which it cannot listen.
    """

    def __init__(self, config: KVEventsConfig, rank: int) -> None:
        self._rank, self._topic, self._max_waiting = rank, config.topic.encode(), config.max_queue_size
        self.num_batches = self.num_dropped = 0
        self._warn_at = 0.0
        # Numbers and payloads.
        self._waiting: deque[tuple[bytes, bytes]] = deque()
        self._last: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.Context()
        # Subscriptions can be read from an XPUB socket, which is a PUB socket otherwise.
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.sndhwm = config.hwm
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.sndhwm = config.buffer_steps + 1
        try:
            _open(self._pub, "endpoint", endpoint_of_rank(config.endpoint, rank))
            if config.replay_endpoint is not None:
                _open(self._replay, "replay_endpoint", endpoint_of_rank(config.replay_endpoint, rank))
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._is_closed = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Publish a batch. Never waits: where too many batches wait, subscribers miss it and find it in the replay."""
        batch = EventBatch(time.time(), list(events), self._rank)
        # A connector's events may hold anything.
        payload = msgspec.msgpack.encode(batch, enc_hook=repr)
        numbered = self.num_batches.to_bytes(8, "big"), payload
        self.num_batches += 1
        self._last.append(numbered)
        if len(self._waiting) >= self._max_waiting:
            self.num_dropped += 1
            if time.monotonic() >= self._warn_at:
                self._warn_at = time.monotonic() + _WARN_S
                logger.warning("%d batches of KV cache events were not sent, in all", self.num_dropped)
            return
        self._waiting.append(numbered)
        self._wake()

    def close(self) -> None:
        """Send what waits, and close the sockets. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._wake()
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._context.destroy(linger=_LINGER_MS)

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            return  # it has enough to read

    def _run(self) -> None:
        poller = zmq.Poller()
        for one in (self._pub, self._replay, self._wake_read):
            poller.register(one, zmq.POLLIN)
        send_at = time.monotonic() + _FIRST_WAIT_S
        while not self._is_closed:
            held_ms = math.ceil(1000 * max(0.0, send_at - time.monotonic()))
            ready = dict(poller.poll(held_ms if held_ms and self._waiting else None))
            if self._wake_read in ready:
                os.read(self._wake_read, 1 << 16)
            if self._pub in ready:
                self._pub.recv_multipart()
                send_at = 0.0
            if self._replay in ready:
                self._answer()
            if time.monotonic() >= send_at:
                self._send_waiting()
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting:
            self._pub.send_multipart((self._topic, *self._waiting.popleft()))

    def _answer(self) -> None:
        """Send the batches that a subscriber asks for."""
        *envelope, first = self._replay.recv_multipart()
        if len(first) != 8:
            logger.warning("A replay of KV cache events asks for %r, which is no number of 8 bytes", first[:20])
            return
        # A copy, since the core goes on.
        for number, payload in self._last.copy():
            if number >= first:
                self._replay.send_multipart((*envelope, number, payload))
        self._replay.send_multipart((*envelope, _END, b""))


def _open(socket: zmq.Socket[bytes], name: str, endpoint: str) -> None:
    socket.ipv6 = "[" in endpoint
    try:
        if listens(endpoint):
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{name}={endpoint!r} of kv_events_config: {error.strerror}. Give another one.") from error
