"""Worker side of weight transfers: it receives a trainer's tensors in threads, and keeps them for later workers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from penstock.config.weight_transfer import KEEP
from penstock.errors import CheckpointError, LifecycleError, PenstockError
from penstock.features.weight_transfer.backends import Backend, create_backend
from penstock.features.weight_transfer.journal import Journal
from penstock.features.weight_transfer.state import RankStatus
from penstock.worker.feature import WorkerFeature, WorkerServices
from penstock.worker.weight_updates import WeightUpdates

logger = logging.getLogger(__name__)


class WeightTransferWorker(WorkerFeature):
    """Receives weights of one rank. Calls that wait for a trainer return at once; `weight_update_status` says more."""

    def __init__(self, services: WorkerServices) -> None:
        parallel, options = services.config.parallel, services.config.weight_transfer
        # None in a plan of memory.
        self._updates_here, self._load_folder = services.updates, services.restore_weights
        number = parallel.engine_number or 0
        self._make_backend = partial(
            create_backend, options, services.device.torch_device, number * parallel.world_size + services.rank
        )
        self._backend: Backend | None = None if options.backend is None else self._make_backend()
        self._joining: Future[None] | None = None
        self._journal: Journal | None = None
        # Ranks have the same tensors, of which they take their shares.
        if options.recovery == KEEP and options.recovery_dir is not None and services.rank == 0:
            self._journal = Journal(options.recovery_dir / f"engine-{number}", services.config.model)
            if services.updates is not None:
                services.updates.keep_in(self._journal, is_whole_model=parallel.pipeline_parallel_size == 1)

    @property
    def _updates(self) -> WeightUpdates:
        assert self._updates_here is not None, "called in a worker that serves"
        return self._updates_here

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> RankStatus:
        """Begin to join the trainer."""
        backend = self._backend or self._make_backend()
        if self._joining is not None and not self._joining.done():
            raise LifecycleError("init_weight_transfer_engine: the workers are joining a trainer already. Wait for it.")
        self._updates.forget_error()
        joined: Future[None] = Future()

        def join() -> None:
            try:
                backend.init(init_info)
                joined.set_result(None)
            except BaseException as error:
                joined.set_exception(error)

        self._joining = joined
        threading.Thread(target=join, name="penstock-join-trainer", daemon=True).start()
        return self.weight_update_status()

    def start_weight_update(self, is_checkpoint_format: bool = True, atomic: bool | None = None) -> RankStatus:
        """Start an update, of which `update_weights` announces tensors."""
        self._updates.start(is_checkpoint_format=is_checkpoint_format, is_atomic=atomic)
        return self.weight_update_status()

    def update_weights(self, update_info: Mapping[str, Any]) -> RankStatus:
        """Begin to receive tensors."""
        backend = self._backend or self._make_backend()
        self._updates.begin(backend.receive(update_info))
        return self.weight_update_status()

    def finish_weight_update(self, version: int | None = None) -> RankStatus:
        """End the update; the weights are the new ones from the next step on."""
        status = self.weight_update_status()
        if status.is_waiting:
            raise LifecycleError("finish_weight_update: weights are still arriving. Wait for update_weights.")
        self._updates.finish(version)
        return self.weight_update_status()

    def restore_weights_after_loss(self, version: int, folder: str | None) -> RankStatus:
        """Load the newest complete weights, which a lost worker had; without them the weights are undefined."""
        why = f"a worker was lost, and the weights of version {version} with it"
        try:
            if folder is None or self._load_folder is None:
                raise CheckpointError("recovery is 'undefined'")
            self._load_folder(folder)
            self._updates.define(version)
            if self._journal is not None:
                self._journal.version = version
        except PenstockError as error:
            self._updates.why_undefined = f"{why} ({error})"
            self._updates.version = version
            logger.warning("Weights undefined: %s. Requests wait for the next update", self._updates.why_undefined)
        self._updates.is_pushed = True
        return self.weight_update_status()

    def weight_update_status(self) -> RankStatus:
        """State of this rank's weights."""
        status = self._updates.status()
        is_joining = self._joining is not None and not self._joining.done()
        failed = None if is_joining or self._joining is None else self._joining.exception()
        if failed is not None:
            self._joining = None
        return RankStatus(
            is_waiting=is_joining or status["is_waiting"],
            error=failed or status["error"],
            is_updating=status["is_updating"],
            num_missing=status["num_missing"],
            missing=status["missing"],
            why_undefined=status["why_undefined"],
            version=status["version"],
            is_pushed=self._updates.is_pushed,
            folder=self._folder,
        )

    @property
    def _folder(self) -> str | None:
        """Folder where these weights are kept; None where they are not, such as those of a call of `load_weights`."""
        if self._journal is None or not self._updates.is_pushed or self._journal.version != self._updates.version:
            return None
        return self._journal.newest

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()
