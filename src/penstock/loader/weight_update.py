"""Weight update: the loader runs in a thread over tensors that come in buckets, in any order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress

import torch
from torch import Tensor

from penstock.errors import LifecycleError
from penstock.loader.weight_source import WeightSource
from penstock.models.causal_lm import CausalLM

NamedTensors = Iterable[tuple[str, Tensor]]


class WeightUpdate:
    """Update of a model's weights that is going on.

    load: runs the loader over a source, and returns the model with the weights. like: live model. At most one layer per
    open fused weight is held beside it. An error of the loader, or of a bucket's own iterator, ends the update, and
    every call raises it from then on.
    """

    def __init__(self, load: Callable[[WeightSource], CausalLM], like: CausalLM) -> None:
        self._source = WeightSource(self._tensors(), like)
        # Buckets, and None at the end.
        self._buckets: queue.SimpleQueue[tuple[NamedTensors, Future[None]] | None] = queue.SimpleQueue()
        self._current: Future[None] | None = None
        self._is_abandoned = False
        self._loaded: Future[CausalLM] = Future()
        self._thread = threading.Thread(target=self._run, args=(load,), name="penstock-weights", daemon=True)
        self._thread.start()

    @property
    def missing(self) -> list[str] | None:
        """Names of tensors that have not come yet; None before the first bucket."""
        return self._source.missing

    @property
    def taken(self) -> list[str]:
        """Names of tensors that have come."""
        return list(self._source.taken)

    @property
    def is_complete(self) -> bool:
        """Whether every tensor has come."""
        return self._source.missing == []

    @property
    def source(self) -> WeightSource:
        """The tensors on their way; knows tied ones that come twice."""
        return self._source

    @property
    def is_over(self) -> bool:
        """Whether the loader has ended, by itself or with an error."""
        return self._loaded.done()

    @property
    def error(self) -> BaseException | None:
        """The error that ended the update."""
        return self._loaded.exception() if self._loaded.done() else None

    def begin(self, tensors: NamedTensors) -> Future[None]:
        """Take in a bucket of tensors without waiting. They must stay as they are until the result is there."""
        taken: Future[None] = Future()
        self._buckets.put((tensors, taken))
        if self._loaded.done():
            self._fail(self._loaded.exception() or LifecycleError("The weight update has ended."))
        return taken

    def take(self, tensors: NamedTensors) -> None:
        """Take in a bucket of tensors. Raises what the loader raises."""
        self.begin(tensors).result()

    def finish(self) -> CausalLM:
        """End the update; return the model with the weights. Raises CheckpointError for missing tensors."""
        self._buckets.put(None)
        return self._loaded.result()

    def abandon(self) -> None:
        """End the update without its tensors; idempotent."""
        self._is_abandoned = True
        self._buckets.put(None)
        self._thread.join()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors of all buckets, as the loader asks for them."""
        while (bucket := self._buckets.get()) is not None:
            tensors, self._current = bucket
            for name, tensor in tensors:
                yield name, tensor.detach()
            self._current.set_result(None)
            self._current = None
        if self._is_abandoned:
            raise LifecycleError("The weight update was abandoned.")

    def _run(self, load: Callable[[WeightSource], CausalLM]) -> None:
        try:
            with torch.no_grad():
                self._loaded.set_result(load(self._source))
        except BaseException as error:
            self._loaded.set_exception(error)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Let the buckets that wait end with an error."""
        current, self._current = self._current, None
        if current is not None:
            current.set_exception(error)
        with suppress(queue.Empty):
            while True:
                bucket = self._buckets.get_nowait()
                if bucket is not None:
                    bucket[1].set_exception(error)
