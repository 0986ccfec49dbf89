"""Several KV connectors at once: the first one that has tokens loads them, and all of them save."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.config.kv_connector import KVTransferConfig
from penstock.contract import KVCacheConfig, SchedulerOutput
from penstock.errors import ConfigError
from penstock.features.kv_connector.base import (
    ConnectorConfig,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from penstock.features.kv_connector.load import make_one_of
from penstock.features.kv_connector.requests import ConnectorRequest, KVCacheBlocks

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class _Metadata(KVConnectorMetadata):
    """Metadata of each connector. num_saving: of ended requests, connectors that keep their blocks."""

    each: list[KVConnectorMetadata | None]
    num_saving: dict[str, int]


@dataclass
class _Handshake(KVConnectorHandshakeMetadata):
    each: list[KVConnectorHandshakeMetadata | None]


@dataclass
class _WorkerMetadata(KVConnectorWorkerMetadata):
    each: list[KVConnectorWorkerMetadata | None]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> _WorkerMetadata:
        assert isinstance(other, _WorkerMetadata)
        pairs = zip(self.each, other.each, strict=True)
        return _WorkerMetadata([one.aggregate(two) if one and two else one or two for one, two in pairs])


class _Stats(KVConnectorStats):
    """data: statistics of connectors by their names."""

    def aggregate(self, other: KVConnectorStats) -> _Stats:
        both = dict(self.data)
        for name, stats in other.data.items():
            both[name] = both[name].aggregate(stats) if name in both else stats
        return _Stats(both)

    def reduce(self) -> dict[str, int | float]:
        return {f"{name}: {key}": number for name, one in self.data.items() for key, number in one.reduce().items()}


class MultiConnector(KVConnectorBase_V1, SupportsHMA):
    """Connectors in the order of `kv_connector_extra_config={"connectors": [...]}`, each as a kv_transfer_config."""

    def __init__(
        self, vllm_config: ConnectorConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        given = self._kv_transfer_config.get_from_extra_config("connectors", None)
        if not isinstance(given, Sequence) or isinstance(given, str) or not given:
            raise ConfigError(
                "kv_connector='MultiConnector' has no kv_connector_extra_config={'connectors': [...]}. Give a list of "
                "connectors, each as a kv_transfer_config."
            )
        assert kv_cache_config is not None
        shared = {"engine_id": self._kv_transfer_config.engine_id, "kv_role": self._kv_transfer_config.kv_role}
        engine, rank = vllm_config.engine, vllm_config.rank
        self._each = [
            make_one_of(engine, KVTransferConfig.of({**shared, **one}), role, kv_cache_config, rank) for one in given
        ]
        # Connectors that load for a request; those that keep its blocks, while more than one does.
        self._loads_by: dict[str, KVConnectorBase_V1] = {}
        self._num_saving: dict[str, int] = {}
        self._num_sent: Counter[str] = Counter()

    # Scheduler role.

    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._loads_by.pop(request.request_id, None)
        for connector in self._each:
            num_tokens, is_beside = connector.get_num_new_matched_tokens(request, num_computed_tokens)
            if num_tokens is None:
                return None, False
            if num_tokens > 0:
                self._loads_by[request.request_id] = connector
                return num_tokens, is_beside
        return 0, False

    def update_state_after_alloc(
        self, request: ConnectorRequest, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        for connector in self._each:
            loads = num_external_tokens > 0 and self._loads_by.get(request.request_id) is connector
            connector.update_state_after_alloc(request, blocks, num_external_tokens if loads else 0)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata | None:
        each = [connector.build_connector_meta(scheduler_output) for connector in self._each]
        num_saving, self._num_saving = self._num_saving, {}
        return _Metadata(each, num_saving) if num_saving or any(one is not None for one in each) else None

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        for index, connector in enumerate(self._each):
            of_one = meta.each[index] if isinstance(meta, _WorkerMetadata) else None
            connector.update_connector_output(replace(connector_output, kv_connector_worker_meta=of_one))

    def request_finished(self, request: ConnectorRequest, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,) if block_ids else ())

    def request_finished_all_groups(
        self, request: ConnectorRequest, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._loads_by.pop(request.request_id, None)
        num_saving, params = 0, None
        for connector in self._each:
            if isinstance(connector, SupportsHMA):
                keeps, given = connector.request_finished_all_groups(request, block_ids)
            else:
                keeps, given = connector.request_finished(request, block_ids[0] if block_ids else [])
            num_saving += keeps
            params = params if given is None else {**(params or {}), **given}
        if num_saving > 1:
            self._num_saving[request.request_id] = num_saving
        return num_saving > 0, params

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        for index, connector in enumerate(self._each):
            of_ranks = {rank: one.each[index] for rank, one in metadata.items() if isinstance(one, _Handshake)}
            known = {rank: one for rank, one in of_ranks.items() if one is not None}
            if known:
                connector.set_xfer_handshake_metadata(known)

    def take_events(self) -> Iterable[Any]:
        return [event for connector in self._each for event in connector.take_events()]

    def reset_cache(self) -> bool | None:
        are_reset = [connector.reset_cache() is not False for connector in self._each]
        return all(are_reset)

    # Worker role.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        for connector in self._each:
            connector.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, _Metadata)
        super().bind_connector_metadata(connector_metadata)
        for req_id, num_saving in connector_metadata.num_saving.items():
            self._num_sent[req_id] = -num_saving
        for connector, metadata in zip(self._each, connector_metadata.each, strict=True):
            if metadata is not None:
                connector.bind_connector_metadata(metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        for connector in self._each:
            connector.clear_connector_metadata()

    @property
    def _in_step(self) -> list[KVConnectorBase_V1]:
        return [connector for connector in self._each if connector.has_connector_metadata()]

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, _Metadata)
        for connector, metadata in zip(self._each, kv_connector_metadata.each, strict=True):
            if metadata is not None:
                connector.handle_preemptions(metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for connector in self._in_step:
            connector.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        for connector in self._in_step:
            connector.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        for connector in self._in_step:
            connector.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        for connector in self._in_step:
            connector.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = set(), set()
        for connector in self._each:
            sent_by, received_by = connector.get_finished(finished_req_ids)
            received |= received_by or set()
            for req_id in sent_by or ():
                # The last one of several that keep its blocks.
                self._num_sent[req_id] += 1
                if self._num_sent[req_id] >= 0:
                    del self._num_sent[req_id]
                    sent.add(req_id)
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        return functools.reduce(set.union, (one.get_block_ids_with_load_errors() for one in self._each), set())

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        each = [connector.build_connector_worker_meta() for connector in self._each]
        return _WorkerMetadata(each) if any(one is not None for one in each) else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        each = {
            f"{type(one).__name__} {number}": stats
            for number, one in enumerate(self._each)
            if (stats := one.get_kv_connector_stats()) is not None and not stats.is_empty()
        }
        return _Stats(each) if each else None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        each = [connector.get_handshake_metadata() for connector in self._each]
        return _Handshake(each) if any(one is not None for one in each) else None

    def shutdown(self) -> None:
        for connector in self._each:
            connector.shutdown()
