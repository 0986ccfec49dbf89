"""Interface of KV connectors, with the names of vLLM's `KVConnectorBase_V1`.

An engine has one object with the scheduler's role, and one with the worker's role for each rank. All of them are made
anew when workers are replaced.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from penstock.config import EngineConfig
from penstock.config.kv_connector import KVTransferConfig
from penstock.contract import KVCacheConfig, SchedulerOutput
from penstock.features.kv_connector.requests import ConnectorRequest, KVCacheBlocks

if TYPE_CHECKING:
    from torch import Tensor


class KVConnectorRole(Enum):
    """Side of a connector."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    """Message of a connector's scheduler side to its workers for a step; pickled on its way."""


class KVConnectorHandshakeMetadata:
    """Message of a rank's connector to the scheduler side, and to other engines; pickled on its way."""


class KVConnectorWorkerMetadata(ABC):
    """Message of a rank's connector to the scheduler side while it serves; pickled on its way."""

    @abstractmethod
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return the metadata of both ranks."""


@dataclass
class KVConnectorStats:
    """Statistics of a connector over some time; pickled on their way. data: what it counts."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget what was counted."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Return the statistics of both, of two ranks or of two times. A connector's own class implements it."""
        raise NotImplementedError

    def reduce(self) -> dict[str, int | float]:
        """Return numbers by name, for the metrics. A connector's own class implements it."""
        raise NotImplementedError

    def is_empty(self) -> bool:
        return not self.data


@dataclass
class KVConnectorOutput:
    """Transfers that the connectors of all ranks have ended.

    finished_sending, finished_recving: requests whose blocks all ranks have saved, or loaded.
    invalid_block_ids: blocks that a rank could not load. kv_connector_stats: of all ranks since the last time.
    """

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)
    kv_connector_worker_meta: KVConnectorWorkerMetadata | None = None
    kv_connector_stats: KVConnectorStats | None = None


@dataclass(frozen=True)
class ConnectorConfig:
    """Configuration of the engine, with vLLM's names (`vllm_config`).

    rank: of the worker; 0 on the scheduler's side. engine: all options, with Penstock's names.
    """

    kv_transfer_config: KVTransferConfig
    engine: EngineConfig
    rank: int = 0

    @property
    def cache_config(self) -> Any:
        return self.engine.cache

    @property
    def model_config(self) -> Any:
        return self.engine.model

    @property
    def parallel_config(self) -> Any:
        return self.engine.parallel

    @property
    def scheduler_config(self) -> Any:
        return self.engine.scheduler


class SupportsHMA(ABC):
    """A connector of models with several KV-cache groups, such as of full attention and of windows."""

    @abstractmethod
    def request_finished_all_groups(
        self, request: ConnectorRequest, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `KVConnectorBase_V1.request_finished`, with a list of blocks for each group."""


class KVConnectorBase_V1(ABC):  # noqa: N801 - vLLM's name
    """A KV connector. Methods of its scheduler role come first, those of its worker role after them.

    kv_cache_config: groups of layers that share a block table.
    """

    prefer_cross_layer_blocks = False

    def __init__(
        self, vllm_config: ConnectorConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._role = role
        self._kv_cache_config = kv_cache_config
        self._connector_metadata: KVConnectorMetadata | None = None

    @property
    def role(self) -> KVConnectorRole:
        return self._role

    # Scheduler role: in the core's thread.

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded after the first num_computed_tokens, which are in the KV cache; changes nothing.

        None asks to be called again later. The flag says whether they are loaded while other requests run; the request
        waits then until all ranks name it in `get_finished`. Otherwise `start_load_kv` of the request's first step
        loads them. Only whole blocks are loaded, and never the last token's.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: ConnectorRequest, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Note the blocks of a request, and how many tokens after those in the KV cache are to be loaded into them."""

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata | None:
        """Return what the workers do in a step; None for nothing, which alone allows the fast path of decode steps."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:  # noqa: B027
        """Note what all ranks have done."""

    def request_finished(self, request: ConnectorRequest, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Note the end of a request.

        Returns whether its blocks are kept until all ranks name it in `get_finished`, and the `kv_transfer_params` of
        its response.
        """
        return False, None

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:  # noqa: B027
        """Note what each rank's `get_handshake_metadata` has returned; called once, before the first request."""

    def get_finished_count(self) -> int | None:
        """Ranks that must name a request in `get_finished`; None for all."""
        return None

    def take_events(self) -> Iterable[Any]:
        """Events of the connector's store since the last call, which the metrics count by their classes' names."""
        return ()

    def reset_cache(self) -> bool | None:
        """Forget all blocks that are kept elsewhere; False if that fails.

        Called by `reset_prefix_cache(reset_connector=True)`.
        """
        return None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: ConnectorConfig) -> str | None:
        """Layout of the KV cache that the connector needs; must be None, since pages are bytes here."""
        return None

    # Worker role: in the worker's thread.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:  # noqa: B027
        """Note the memory of each layer of this rank: uint8 [num_blocks, bytes of a page], by the layer's name.

        A block of a KV-cache group is a page of each of its layers. Pages hold the block's keys and values, or what the
        layer keeps of its tokens, in the layout of its attention backend.
        """

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:  # noqa: B027
        """Finish reads of blocks of preempted requests, before a step that names some overwrites them."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Set the metadata of a step."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """Clear the metadata of a step that has run."""
        self._connector_metadata = None

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        assert self._connector_metadata is not None, "it is called within a step that has metadata"
        return self._connector_metadata

    def has_connector_metadata(self) -> bool:
        return self._connector_metadata is not None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: B027
        """Begin the loads of a step, before its forward pass. forward_context: None."""

    def wait_for_layer_load(self, layer_name: str) -> None:  # noqa: B027
        """Wait for a layer's load. Called for all layers one after another, before the forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: B027
        """Begin the saves of a layer. Called for all layers one after another, after the forward pass.

        kv_layer: as of `register_kv_caches`. attn_metadata: None.
        """

    def wait_for_save(self) -> None:  # noqa: B027
        """Wait until the step's blocks may be overwritten, but for those of requests whose blocks are kept."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks were saved, and those whose blocks were loaded, each once.

        finished_req_ids: requests that have ended since the last call.
        """
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that could not be loaded since the last call."""
        return set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Message of this rank to the scheduler side, beside `get_finished`."""
        return None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Message of this rank to the scheduler side at the start, and to `get_kv_connector_handshake_metadata`.

        Called after `register_kv_caches`.
        """
        return None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Statistics of this rank since the last call; None without any."""
        return None

    # Both roles.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Empty statistics to which those of ranks are added, or with this data; None takes those of the ranks."""
        return None

    def shutdown(self) -> None:  # noqa: B027
        """End threads, and close connections."""
