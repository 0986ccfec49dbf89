"""Updates of the weights of one rank, by tensors that a caller or a trainer gives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol

from torch import Tensor

from penstock.errors import LifecycleError, PenstockError
from penstock.loader.weight_update import NamedTensors, WeightUpdate
from penstock.models.causal_lm import CausalLM

logger = logging.getLogger(__name__)
_SHOWN = 4


class Keeper(Protocol):
    """Keeps the tensors of updates beyond the worker."""

    def begin(self) -> None:
        """Begin with an update; what has come of another one is dropped."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor. Raises CheckpointError where that fails."""

    def finish(self, version: int) -> None:
        """Note that the update is complete."""

    def folder_of(self, version: int) -> str | None:
        """Folder with the checkpoint of a version; None if it is not kept."""


class WeightUpdates:
    """Weight updates of a rank, one at a time, and whether its weights are defined.

    begin: starts an update (is_checkpoint_format, is_atomic) and says whether it is in place. finish: takes the model
    of an update that ended, None if it was in place.

    why_undefined: why no step may run; None while the weights are those of a checkpoint or of a complete update. Of an
    update that fails in another thread `note_failure` says why.
    version: rises with every complete update; 0 for the weights of the start. num_updates: complete updates and
    reloads, whatever versions their callers give. is_pushed: whether tensors of an update made the weights, not files.
    """

    def __init__(
        self,
        begin: Callable[[bool, bool | None], tuple[WeightUpdate, bool]],
        finish: Callable[[CausalLM | None], None],
    ) -> None:
        self._begin, self._finish = begin, finish
        self._update: WeightUpdate | None = None
        self._is_in_place = False
        self._opened_itself = False
        self._last: WeightUpdate | None = None
        # An update whose failure `why_undefined` says.
        self._noted: WeightUpdate | None = None
        self.why_undefined: str | None = None
        # As it was before the update that is going on, of which no tensor may have come.
        self._why_before: str | None = None
        self._has_begun = False
        self.version, self.num_updates, self.is_pushed = 0, 0, False
        self._waiting: Future[Any] | None = None
        self._keeper: Keeper | None = None
        self._is_kept, self._keeps_own = False, True

    def keep_in(self, keeper: Keeper, *, is_whole_model: bool) -> None:
        """Keep the tensors of a checkpoint's format. is_whole_model: whether this rank's model has all layers: one that
        has not cannot tell when an update that has opened by itself has all tensors, and keeps none of it.
        """
        self._keeper, self._keeps_own = keeper, is_whole_model

    def start(self, *, is_checkpoint_format: bool = True, is_atomic: bool | None = None) -> None:
        """Start an update. Raises LifecycleError while another one is going on."""
        if self._update is not None and self.why_failed is None:
            raise LifecycleError(
                "start_weight_update: a weight update is going on already. Call finish_weight_update first."
            )
        self.abandon()
        self.forget_error()
        self._update, self._is_in_place = self._begin(is_checkpoint_format, is_atomic)
        self._opened_itself, self._has_begun = False, False
        self._is_kept = self._keeper is not None and is_checkpoint_format
        if self._keeper is not None:
            self._keeper.begin()
        self._why_before = self.why_undefined

    def take(self, tensors: NamedTensors) -> None:
        """Take in tensors, in any order. Raises LifecycleError without `start`, and what the loader raises."""
        try:
            self.begin(tensors).result()
        finally:
            self.note_failure()

    def begin(self, tensors: NamedTensors) -> Future[None]:
        """As `take`, without waiting: another thread asks for the tensors, and `status` says when they are in."""
        update = self._started("update_weights")
        if self.are_arriving:
            raise LifecycleError("update_weights: the weights of the call before are still arriving. Wait for it.")
        self._has_begun = True
        if self._is_in_place and not update.is_over:
            self.why_undefined = "a weight update has begun and is not finished"
        self._waiting = update.begin(self._kept(tensors) if self._is_kept else tensors)
        return self._waiting

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take in tensors, in an update that opens by itself, and ends once every tensor has come."""
        for name, tensor in tensors:
            if self._update is None or (self._opened_itself and self.why_failed is not None):
                if self._is_known(name, tensor):
                    continue
                self.start()
                self._opened_itself = True
                self._is_kept = self._is_kept and self._keeps_own
            self.take([(name, tensor)])
            if self._opened_itself and self._started("load_weights").is_complete:
                self.finish()

    def finish(self, version: int | None = None) -> int:
        """End the update; return the version of the weights. Raises CheckpointError for tensors that have not come."""
        update = self._started("finish_weight_update")
        try:
            loaded = update.finish()
            self._finish(None if self._is_in_place else loaded)
        except BaseException as error:
            self._note_failure(update, error)
            self._update = None
            if self._keeper is not None:
                self._keeper.begin()
            raise
        self._last, self._update = update, None
        self.why_undefined, self.is_pushed = None, True
        self.version = self.version + 1 if version is None else version
        self.num_updates += 1
        if self._keeper is not None and self._is_kept:
            self._keeper.finish(self.version)
        return self.version

    def abandon(self) -> None:
        """End an update without its tensors; the weights are undefined if some of them were replaced in place."""
        update, self._update = self._update, None
        if update is None:
            return
        update.abandon()
        self._note_failure(update, update.error)

    def forget_error(self) -> None:
        """Forget how the last transfer ended."""
        if self._waiting is not None and self._waiting.done():
            self._waiting = None

    def close(self) -> None:
        """End the thread of an update that is going on."""
        if self._update is not None:
            self._update.abandon()

    def undefine(self, why: str) -> None:
        """Note that the weights are lost: all of them must come."""
        self.abandon()
        self._last = None
        self.why_undefined = why

    def define(self) -> None:
        """Note that all weights were loaded in another way."""
        self.abandon()
        self.why_undefined, self.is_pushed = None, False
        self.version += 1
        self.num_updates += 1

    def note_state(self, version: int, num_updates: int, *, is_pushed: bool) -> None:
        """Note that the weights are, or were before they were lost, those of an earlier worker."""
        self.version, self.num_updates, self.is_pushed = version, num_updates, is_pushed

    @property
    def kept_folder(self) -> str | None:
        """Folder where the newest complete weights are kept; None where they are not, or came from files."""
        return self._keeper.folder_of(self.version) if self._keeper is not None and self.is_pushed else None

    @property
    def are_arriving(self) -> bool:
        """Whether another thread writes tensors."""
        return self._waiting is not None and not self._waiting.done()

    @property
    def why_failed(self) -> str | None:
        """Why the update that is going on cannot be finished."""
        if self._update is None or not self._update.is_over:
            return None
        return str(self._update.error)

    def status(self) -> dict[str, Any]:
        """State for the engine: whether tensors are arriving, what went wrong, and how many are missing."""
        is_waiting = self.are_arriving
        error = None if is_waiting or self._waiting is None else self._waiting.exception()
        self.note_failure()
        missing = None if self._update is None else self._update.missing
        return {
            "is_updating": self._update is not None,
            "is_waiting": is_waiting,
            "error": None if error is None else error,
            "num_missing": None if missing is None else len(missing),
            "missing": (missing or [])[:_SHOWN],
            "why_undefined": self.why_undefined,
            "version": self.version,
            "num_updates": self.num_updates,
        }

    def check_defined(self) -> None:
        """Raise LifecycleError while no step may run."""
        if self.why_undefined is not None:
            raise LifecycleError(f"The weights are undefined: {self.why_undefined}. Send all weights, or reload them.")

    def note_failure(self) -> None:
        """Note in `why_undefined` that the update that is going on has failed, if it has."""
        update = self._update
        if update is not None and update.is_over and self._is_in_place:
            self._note_failure(update, update.error)

    def _note_failure(self, update: WeightUpdate, error: BaseException | None) -> None:
        if not (self._is_in_place and self._has_begun):
            self.why_undefined = self._why_before
            return
        if update is self._noted:
            return
        self._noted, taken = update, update.taken
        names = ", ".join(taken[:_SHOWN]) + (" and others" if len(taken) > _SHOWN else "")
        when = f"after it had replaced {len(taken)} tensors ({names})" if taken else "before a tensor was complete"
        text = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
        self.why_undefined = f"a weight update failed {when}: {text}"
        logger.error("Weights undefined: %s", self.why_undefined)

    def _kept(self, tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """Iterate over tensors, and keep them."""
        assert self._keeper is not None, "there is one where tensors are kept"
        for name, tensor in tensors:
            self._keeper.add(name, tensor)
            yield name, tensor

    def _is_known(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor changes nothing: one that the model has no place for, or a tied one that has come before."""
        last = self._last
        return last is not None and not last.source.wants(name, tensor)

    def _started(self, method: str) -> WeightUpdate:
        if self._update is None:
            raise LifecycleError(f"{method}: no weight update is going on. Call start_weight_update first.")
        return self._update
