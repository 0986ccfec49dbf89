"""Acceptance of many prompts in a thread, while the caller's thread runs those that are accepted already."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar

from penstock.engine.inputs.input_processor import AcceptedRequest

# Prompts of the first batch, which the first step waits for, and of the others.
_FIRST_BATCH, _BATCH = 32, 256
_Item = TypeVar("_Item")


class RequestSource(Protocol):
    """Source of the requests of a run."""

    def take(self, *, wait: bool) -> Sequence[AcceptedRequest] | None:
        """Requests that are accepted by now, each once; None at the end. wait: for at least one.

        Raises what accepting them raised.
        """


class Listed:
    """Requests that were accepted before their run."""

    def __init__(self, requests: Sequence[AcceptedRequest]) -> None:
        self._requests: Sequence[AcceptedRequest] | None = requests

    def take(self, *, wait: bool) -> Sequence[AcceptedRequest] | None:
        requests, self._requests = self._requests, None
        return requests


class AcceptAhead:
    """Accepts prompts batch by batch, in order, in a thread of its own if there is more than one batch.

    accept: called with the prompts of a batch. accepted: requests so far, in the prompts' order. Leaving the context
    ends the thread.
    """

    def __init__(self, accept: Callable[[Sequence[_Item]], list[AcceptedRequest]], prompts: Sequence[_Item]) -> None:
        self.accepted: list[AcceptedRequest] = []
        self._batches: queue.SimpleQueue[list[AcceptedRequest] | BaseException | None] = queue.SimpleQueue()
        self._is_over = False
        self._is_stopped = threading.Event()
        starts = [0, *range(_FIRST_BATCH, len(prompts), _BATCH), len(prompts)]
        batches = [prompts[begin:end] for begin, end in itertools.pairwise(starts)]
        self._thread: threading.Thread | None = None
        if len(batches) == 1:
            self._batches.put(accept(batches[0]))
            self._batches.put(None)
            return
        self._thread = threading.Thread(target=self._run, args=(accept, batches), name="penstock-accept", daemon=True)
        self._thread.start()

    def take(self, *, wait: bool) -> Sequence[AcceptedRequest] | None:
        """See `RequestSource`."""
        taken: list[AcceptedRequest] = []
        while not self._is_over:
            try:
                batch = self._batches.get(block=wait and not taken)
            except queue.Empty:
                return taken
            if isinstance(batch, BaseException):
                raise batch
            self._is_over = batch is None
            taken += batch or ()
            self.accepted += batch or ()
        return taken or None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _run(
        self, accept: Callable[[Sequence[_Item]], list[AcceptedRequest]], batches: Sequence[Sequence[_Item]]
    ) -> None:
        try:
            for batch in batches:
                if self._is_stopped.is_set():
                    return
                self._batches.put(accept(batch))
            self._batches.put(None)
        except BaseException as error:
            self._batches.put(error)
