"""Weight transfer as `LLM`, `LLMEngine` and `AsyncEngine` offer it."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from penstock.config.vllm import also_from_vllm
from penstock.contract import RpcCall
from penstock.errors import ConfigError
from penstock.features.weight_transfer.deployment import raise_first
from penstock.features.weight_transfer.state import RankStatus

if TYPE_CHECKING:
    from torch import Tensor

_POLL_S = 0.005
# Bytes of tensors per call of the workers.
_BUCKET_BYTES = 64 << 20


class WeightTransfers(ABC):
    """Methods of an engine that is called from one thread."""

    @also_from_vllm
    def init_weight_transfer_engine(self, request: Mapping[str, Any]) -> None:
        """Let the workers join a trainer; returns when all ranks are there.

        request: {"init_info": {...}} with master_address, master_port, world_size (the trainer, rank 0, and all
        workers), and rank_offset of the first worker. Raises WaitTimeout where ranks do not come.
        """
        self._wait_for_trainer("init_weight_transfer_engine", _info(request, "init_info"))

    @also_from_vllm
    def start_weight_update(self, is_checkpoint_format: bool = True, atomic: bool | None = None) -> None:
        """Begin an update of the weights, of which `update_weights` announces tensors, in any order.

        is_checkpoint_format: tensors have the names of a checkpoint, and the workers take their shares; otherwise they
        are those of `save_sharded_state`. atomic: the old weights serve until the new ones are complete, which takes
        their memory once more; otherwise requests wait.
        Raises LifecycleError while another update is going on.
        """
        self._transfer("start_weight_update", is_checkpoint_format, atomic)

    @also_from_vllm
    def update_weights(self, request: Mapping[str, Any]) -> None:
        """Receive tensors; returns when all workers have them.

        request: {"update_info": {...}} with names, dtype_names and shapes, or a path (backends "ipc" and "files").
        Raises WeightTransferFailed where the trainer is gone. Weights that were replaced in place are undefined then.
        """
        self._wait_for_trainer("update_weights", _info(request, "update_info"))

    @also_from_vllm
    def finish_weight_update(self, weight_version: int | None = None) -> None:
        """End an update: the engine runs with the new weights, and running requests go on from their tokens.

        weight_version: None counts. Raises CheckpointError for tensors that have not come.
        """
        self._transfer("finish_weight_update", checked_version(weight_version))

    @also_from_vllm
    def get_weight_version(self) -> int:
        """Version of the weights, which rises with each update; 0 for those of the start."""
        return min(status.version for status in self._transfer("weight_update_status"))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors of a checkpoint, one or many per call, in any order.

        An update opens by itself, and ends once every tensor has come; no step runs in between.
        """
        for bucket in buckets(weights):
            self._call_workers(RpcCall("load_weights", (bucket,)))

    def _wait_for_trainer(self, method: str, info: Mapping[str, Any]) -> None:
        statuses = self._call_workers(RpcCall(method, (info,), {"wait": False}))
        while any(status.is_waiting for status in statuses):
            time.sleep(_POLL_S)
            statuses = self._transfer("weight_update_status")
        raise_first(statuses)

    def _transfer(self, method: str, *args: Any) -> list[RankStatus]:
        return self._call_workers(RpcCall(method, args))

    @abstractmethod
    def _call_workers(self, call: RpcCall) -> list[Any]: ...


class AsyncWeightTransfers(ABC):
    """Methods of an asynchronous engine, which answers other calls while they wait for a trainer."""

    async def init_weight_transfer_engine(self, request: Mapping[str, Any]) -> None:
        """As `LLM.init_weight_transfer_engine`."""
        await self._wait_for_trainer("init_weight_transfer_engine", _info(request, "init_info"))

    async def start_weight_update(self, is_checkpoint_format: bool = True, atomic: bool | None = None) -> None:
        """As `LLM.start_weight_update`."""
        await self._call_workers(RpcCall("start_weight_update", (is_checkpoint_format, atomic)))

    async def update_weights(self, request: Mapping[str, Any]) -> None:
        """As `LLM.update_weights`."""
        await self._wait_for_trainer("update_weights", _info(request, "update_info"))

    async def finish_weight_update(self, weight_version: int | None = None) -> None:
        """As `LLM.finish_weight_update`."""
        await self._call_workers(RpcCall("finish_weight_update", (checked_version(weight_version),)))

    async def get_weight_version(self) -> int:
        """As `LLM.get_weight_version`."""
        statuses: list[RankStatus] = await self._call_workers(RpcCall("weight_update_status"))
        return min(status.version for status in statuses)

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """As `LLM.load_weights`."""
        for bucket in buckets(weights):
            await self._call_workers(RpcCall("load_weights", (bucket,)))

    async def _wait_for_trainer(self, method: str, info: Mapping[str, Any]) -> None:
        statuses = await self._call_workers(RpcCall(method, (info,), {"wait": False}))
        while any(status.is_waiting for status in statuses):
            await asyncio.sleep(_POLL_S)
            statuses = await self._call_workers(RpcCall("weight_update_status"))
        raise_first(statuses)

    @abstractmethod
    async def _call_workers(self, call: RpcCall) -> list[Any]: ...


def buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Tensors in calls of some size."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        bucket.append((name, tensor.detach()))
        size += tensor.nbytes
        if size >= _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def checked_version(version: object) -> int | None:
    """A version that a caller gives. Raises ConfigError unless it is a number."""
    if version is None or (isinstance(version, int) and not isinstance(version, bool)):
        return version
    if isinstance(version, str) and version.isdecimal():
        return int(version)
    raise ConfigError(f"weight_version={version!r} is not valid. Allowed: an integer, or None.")


def _info(request: object, name: str) -> Mapping[str, Any]:
    """A field of vLLM's request objects, or of a dictionary."""
    info = request.get(name) if isinstance(request, Mapping) else getattr(request, name, None)
    if not isinstance(info, Mapping):
        raise ConfigError(f"The request has no {name}. Needed: {{{name!r}: {{...}}}}.")
    return info
