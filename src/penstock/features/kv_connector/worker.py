"""Worker side of KV connectors: the connector of one rank, called before and after the steps that name it."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

from torch import Tensor

from penstock.contract import Part, SchedulerOutput, part_of
from penstock.features.kv_connector.base import KVConnectorBase_V1, KVConnectorHandshakeMetadata, KVConnectorRole
from penstock.features.kv_connector.load import make_connector
from penstock.features.kv_connector.messages import ConnectorResults, ConnectorStep, RankOutput
from penstock.kernels.bound_step import StepOutcome
from penstock.runner.kv_cache import PagedKVCache
from penstock.runner.slot_owner import SlotOwner
from penstock.step.frame import Frame
from penstock.worker.feature import WorkerFeature, WorkerServices


class ConnectorWorker(WorkerFeature):
    """The connector of a rank, as a slot owner: its part of a step's message comes before the step's other changes."""

    def __init__(self, services: WorkerServices) -> None:
        self._owner = _ConnectorOwner(services)

    def slot_owners(self) -> Sequence[SlotOwner]:
        return (self._owner,)

    def get_kv_connector_handshake_metadata(self) -> dict[int, KVConnectorHandshakeMetadata] | None:
        """Handshake metadata of this rank's connector, by the rank; None without any."""
        metadata = self._owner.connector.get_handshake_metadata()
        return None if metadata is None else {self._owner.rank: metadata}

    def kv_connector_output(self) -> RankOutput:
        """Transfers that the connector has ended since the last call."""
        return self._owner.take_output()

    def close(self) -> None:
        self._owner.close()


class _ConnectorOwner(SlotOwner):
    """The connector, from the allocation of the KV cache on."""

    def __init__(self, services: WorkerServices) -> None:
        self.rank = services.rank
        self._config = services.config
        self._connector: KVConnectorBase_V1 | None = None
        self._pages: dict[str, Tensor] = {}
        # Requests that have ended, where the step in progress has a message.
        self._ended: set[str] | None = None
        self._has_results = False
        self._output = RankOutput(set(), set(), set())

    @property
    def connector(self) -> KVConnectorBase_V1:
        assert self._connector is not None, "a plan's features get no calls"
        return self._connector

    def use_kv_cache(self, kv_cache: PagedKVCache) -> None:
        self.close()
        self._connector = make_connector(self._config, KVConnectorRole.WORKER, kv_cache.config, self.rank)
        self._pages = kv_cache.pages_of_layers()
        self._connector.register_kv_caches(self._pages)

    def begin(self, output: SchedulerOutput) -> None:
        part = part_of(output.parts, ConnectorStep)
        if part is None:
            return
        # A step of which no request could run had no outcome.
        self._end_step()
        self._ended = set(part.ended)
        if part.metadata is not None:
            metadata = pickle.loads(part.metadata)  # of this engine's own core
            self.connector.bind_connector_metadata(metadata)
            if output.preempted_req_ids:
                self.connector.handle_preemptions(metadata)
            self.connector.start_load_kv(None)
            for name in self._pages:
                self.connector.wait_for_layer_load(name)
        if not output.num_scheduled_tokens:
            self._end_step()

    def commit(self, frame: Frame, outcome: StepOutcome) -> None:
        self._end_step()

    def commit_computed(self, frame: Frame) -> None:
        self._end_step()

    def commit_sampled(self, frame: Frame, outcome: StepOutcome) -> None:
        """Do nothing: `commit_computed` has ended the step."""

    def part_of_results(self, output: SchedulerOutput) -> Part | None:
        self._end_step()
        has_results, self._has_results = self._has_results, False
        return ConnectorResults() if has_results else None

    def _end_step(self) -> None:
        """Let the connector save what the step has computed, and note what it has done."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        if self.connector.has_connector_metadata():
            for name, pages in self._pages.items():
                self.connector.save_kv_layer(name, pages, None)
            self.connector.wait_for_save()
        self._note(ended)
        self.connector.clear_connector_metadata()
        self._has_results = True

    def _note(self, ended: set[str]) -> None:
        sent, received = self.connector.get_finished(ended)
        self._output.sent.update(sent or ())
        self._output.received.update(received or ())
        self._output.invalid_block_ids.update(self.connector.get_block_ids_with_load_errors())

    def take_output(self) -> RankOutput:
        """As `ConnectorWorker.kv_connector_output`."""
        if self._ended is None:
            self._note(set())
        meta, stats = self.connector.build_connector_worker_meta(), self.connector.get_kv_connector_stats()
        taken, self._output = self._output._replace(worker_meta=meta, stats=stats), RankOutput(set(), set(), set())
        return taken

    def close(self) -> None:
        connector, self._connector = self._connector, None
        if connector is not None:
            connector.shutdown()
