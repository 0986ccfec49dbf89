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
from penstock.features.weight_transfer.state import RankStatus, WeightsState
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
        if options.recovery == KEEP and options.recovery_dir is not None:
            folder, is_writer = options.recovery_dir / f"engine-{number}", services.rank == 0
            self._journal = Journal(folder, services.config.model, is_writer=is_writer)
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

    def abandon_weight_update(self) -> RankStatus:
        """End an update that is going on without its tensors."""
        self._updates.abandon()
        return self.weight_update_status()

    def restore_weights_after_loss(self, state: WeightsState) -> RankStatus:
        """Have the newest complete weights, which a lost worker had; without them the weights are undefined.

        Those that no trainer has sent are the ones with which this worker has started.
        """
        updates = self._updates
        if self._journal is not None and state.is_pushed:
            state = self._journal.newer(state)
        try:
            if state.is_pushed:
                if state.folder is None or self._load_folder is None:
                    raise CheckpointError("recovery is 'undefined'")
                self._load_folder(state.folder)
            updates.define()
            if self._journal is not None and state.is_pushed:
                self._journal.newest, self._journal.version = state.folder, state.version
        except PenstockError as error:
            updates.undefine(f"a worker was lost, and the weights of version {state.version} with it ({error})")
            logger.warning("Weights undefined: %s. Requests wait for the next update", updates.why_undefined)
        updates.note_state(state.version, state.num_updates, is_pushed=state.is_pushed)
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
            num_updates=status["num_updates"],
            is_pushed=self._updates.is_pushed,
            folder=self._updates.kept_folder,
        )

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()
