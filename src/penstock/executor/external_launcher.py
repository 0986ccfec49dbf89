"""Executor of one rank of several that `torchrun` started; every rank's process has an engine of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from torch import distributed
from torch.distributed import PrefixStore, Store

from penstock.config import EngineConfig
from penstock.contract import KVCacheSpec
from penstock.device.select import gpu_of_rank
from penstock.errors import ConfigError
from penstock.executor.uni import UniProcExecutor
from penstock.parallel import GroupAgreement, ParallelState
from penstock.parallel.connections import RankConnections, address_towards, open_store
from penstock.parallel.distributed_ranks import join_connected_ranks
from penstock.parallel.local_ranks import SHARE_OF_STEP
from penstock.system import env
from penstock.system.rank_variables import LauncherPlace
from penstock.worker.memory_plan import MemoryPlan

_Value = TypeVar("_Value")


class ExternalLauncherExecutor(UniProcExecutor):
    """Worker of this process. Engines with equal requests make equal steps, and compare them: else RanksDisagree.

    `torchrun` may start a multiple of the engine's world size: then each run of consecutive ranks is an independent
    engine.

    `collective_rpc` calls this process's worker alone; KV cache specs and memory plans are gathered from all ranks.
    """

    def __init__(self, config: EngineConfig) -> None:
        size = config.parallel.world_size
        place = env.launcher_place()
        if place.world_size % size != 0:
            raise ConfigError(
                f"WORLD_SIZE={place.world_size} processes cannot be engines of tensor_parallel_size={size} ranks. "
                f"Start a multiple of {size}: torchrun --nproc-per-node {size} ..."
            )
        env.prepare_rank({})
        self._connections: RankConnections | None = None
        store, address = _join_store(place)
        # Every process makes its engines in the same order, so equal numbers belong together.
        number = store.add(f"penstock/{place.attempt}/engines of rank {place.rank}", 1)
        self._connections = RankConnections(
            PrefixStore(f"penstock/{place.attempt}/{number}/{place.rank // size}", store),
            place.rank % size,
            size,
            address=address,
            timeout_s=SHARE_OF_STEP * config.parallel.step_timeout_s,
        )
        self._parallel = _join_groups(self._connections, config, place)
        try:
            super().__init__(config, self._parallel)
        except BaseException:
            self.shutdown()
            raise

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return self._gathered(super().get_kv_cache_specs()[0], dict[str, KVCacheSpec])

    def determine_available_memory(self) -> list[MemoryPlan]:
        return self._gathered(super().determine_available_memory()[0], MemoryPlan)

    def why_not_restart(self) -> str | None:
        if self._parallel.world_size == 1:
            return super().why_not_restart()
        return (
            "The other ranks are processes of a launcher, with which this one cannot start again by itself: end this "
            "one too, and let the launcher start all of them (torchrun --max-restarts)."
        )

    def shutdown(self) -> None:
        super().shutdown()
        connections, self._connections = self._connections, None
        if connections is not None:
            connections.close()

    def _gathered(self, value: _Value, value_type: Any) -> list[_Value]:
        return self._parallel.tensor.gather_values(value, value_type)


def _join_store(place: LauncherPlace) -> tuple[Store, str]:
    """Return the store of all processes, and this machine's address for the others.

    It is torch's default store where the script has made process groups before, else the launcher's.
    """
    address = address_towards(place.host, place.port)
    if distributed.is_initialized():
        return distributed.distributed_c10d._get_default_store(), address
    is_host = place.rank == 0 and not place.has_store
    return open_store(place.host, place.port, is_host=is_host), address


def _join_groups(connections: RankConnections, config: EngineConfig, place: LauncherPlace) -> ParallelState:
    gpu = gpu_of_rank(config.device, place.local_rank, place.local_world_size)
    parallel = replace(
        join_connected_ranks(connections, config.parallel, gpu),
        local_rank=place.local_rank,
        num_local_ranks=place.local_world_size,
    )
    return replace(parallel, agreement=GroupAgreement(parallel.tensor, (parallel.context,), compares_all=True))
