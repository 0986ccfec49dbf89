"""Executor with one actor per rank on the nodes of a Ray cluster."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from penstock.config import EngineConfig
from penstock.contract import RpcCall, decode, encode
from penstock.errors import ConfigError, WorkerError
from penstock.executor.messages import (
    CallWorker,
    ExecuteStep,
    FromWorker,
    SampleStep,
    ToWorker,
    WorkerStart,
)
from penstock.executor.ranks import GRACE_S, Rank, RanksExecutor
from penstock.executor.ray_cluster import connect
from penstock.executor.ray_placement import (
    RankPlace,
    can_hold,
    num_fitting,
    place_among_engines,
    place_ranks,
    plan_bundles,
    resources_of_rank,
)
from penstock.executor.ray_worker import RankActor, RayStart
from penstock.executor.serialization import dumps
from penstock.parallel.connections import open_store
from penstock.system import env
from penstock.worker.capabilities import allows_options

logger = logging.getLogger(__name__)
# Timeout of the placement group, for example until the resources of ended workers are free.
_PLACEMENT_TIMEOUT_S = 120.0
# Timeout of an actor's heartbeat.
_HEARTBEAT_TIMEOUT_S = 1.0


@dataclass(slots=True, kw_only=True)
class _Rank(Rank):
    """A rank's actor. address: of its node. life: a call that ends with the actor's process.

    From the last heartbeat, used_s: CPU time. waits_for_others: whether it waits for other ranks. is_silent: whether it
    did not answer.
    """

    actor: Any
    address: str
    life: Any
    used_s: float = 0.0
    waits_for_others: bool = False
    is_silent: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process_id} on node {self.address})"


class RayExecutor(RanksExecutor):
    """Workers in Ray actors, with the messages of `MultiprocessExecutor` as actor calls, which Ray keeps in order.

    The end of any actor or node ends the current call at once. Step timeouts extend while the actors' heartbeats report
    CPU time, as for processes of this machine.

    Tensors go from rank to rank on connections of their own, not through Ray. The connection to the cluster is kept for
    other engines. A core in a process of its own connects to the same cluster, and has its own placement group.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._ray = connect()
        self._ranks: list[_Rank] = []
        # Calls in flight.
        self._calls: dict[Any, _Rank] = {}
        self._placement_group: Any = None
        self._per_rank = self._resources_of_rank()
        begin = time.monotonic()
        try:
            # Hosted by this process, so that it outlives any rank and errors can name the missing one.
            self._store = open_store(self._ray.util.get_node_ip_address(), 0, is_host=True)
            self._start_actors(self._place())
            with self.startup_phase("actors"):
                self._wait_in_phase("start", self._not_started)
            logger.info("Workers: %s, after %.1f s", ", ".join(map(str, self._ranks)), time.monotonic() - begin)
            with self.startup_phase("device"):
                self.collective_rpc(RpcCall("init_device"))
            with self.startup_phase("model"):
                self.collective_rpc(RpcCall("load_model"))
        except BaseException:
            self.shutdown()
            raise

    @property
    def addresses(self) -> list[str]:
        """Addresses of the workers' nodes, by rank."""
        return [rank.address for rank in self._ranks]

    @property
    def _all_ranks(self) -> Sequence[Rank]:
        return self._ranks

    def check_health(self) -> None:
        self._check_usable()
        self._receive("check_health", 0.0)

    def shutdown(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        # Without a connection to the cluster, Ray ends the actors.
        if not self._ray.is_initialized():
            return
        if self._failure is None:
            endings = [rank.actor.close.remote() for rank in self._ranks]
            _, late = self._ray.wait(endings, num_returns=len(endings), timeout=GRACE_S) if endings else ([], [])
            if late:
                logger.warning("%d workers did not end within %g s", len(late), GRACE_S)
        for rank in self._ranks:
            self._ray.kill(rank.actor, no_restart=True)
        if self._placement_group is not None:
            self._ray.util.remove_placement_group(self._placement_group)

    def _place(self) -> list[RankPlace]:
        """Create the placement group and return each rank's place. Raises ConfigError without enough resources."""
        ray, parallel, per_rank, nodes = self._ray, self._config.parallel, self._per_rank, self._nodes()
        no_room = ConfigError(
            f"{parallel.world_size} workers, for tensor_parallel_size={parallel.tensor_parallel_size} and "
            f"pipeline_parallel_size={parallel.pipeline_parallel_size}, need {per_rank} of a node each, placed by "
            f"ray_placement={parallel.ray_placement!r}. The Ray cluster has {_described(nodes, per_rank)}, some of it "
            "perhaps taken by others. Add nodes, start them with more (ray start --num-cpus), or use fewer workers."
        )
        if not can_hold(parallel.world_size, per_rank, nodes):
            raise no_room
        bundles = plan_bundles(parallel.pipeline_parallel_size, parallel.tensor_parallel_size, per_rank, nodes)
        self._placement_group = ray.util.placement_group(bundles, strategy=parallel.ray_placement)
        if not self._placement_group.wait(_PLACEMENT_TIMEOUT_S):
            raise no_room
        nodes_by_bundle = ray.util.placement_group_table(self._placement_group)["bundles_to_node_id"]
        driver_node = ray.get_runtime_context().get_node_id()
        return place_ranks(
            [nodes_by_bundle[bundle] for bundle in range(len(bundles))], parallel.world_size, driver_node
        )

    def _nodes(self) -> list[dict[str, float]]:
        """Return the resources of each node."""
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _resources_of_rank(self) -> dict[str, float]:
        parallel, runs_on_gpus = self._config.parallel, allows_options(self._config, "cuda")
        num_ranks = parallel.world_size * parallel.data_parallel_size
        return resources_of_rank(self._config.device.device, num_ranks, self._nodes(), runs_on_gpus=runs_on_gpus)

    def _start_actors(self, places: Sequence[RankPlace]) -> None:
        ray = self._ray
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        actor_class = ray.remote(concurrency_groups={"watch": 2})(RankActor)
        by_bundle = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        for number, place in enumerate(places):
            actor = actor_class.options(
                num_cpus=1,
                num_gpus=int("GPU" in self._per_rank),
                max_restarts=0,
                scheduling_strategy=by_bundle(self._placement_group, placement_group_bundle_index=place.bundle),
            ).remote()
            life = actor.watch.options(concurrency_group="watch").remote()
            address = nodes[place.node]["NodeManagerAddress"]
            self._ranks.append(_Rank(rank=number, actor=actor, address=address, life=life))
        config = dumps("The configuration", self._config)
        variables = env.variables_for_another_machine()
        store = self._store.host, self._store.port
        for rank, place in zip(self._ranks, places, strict=True):
            start = RayStart(
                pickle.dumps(WorkerStart(config=config, rank=rank.rank)),
                variables,
                [path or os.getcwd() for path in sys.path],
                store,
                self._place_on_machine(place, rank.rank, nodes[place.node]["Resources"]),
            )
            self._calls[rank.actor.start.remote(start)] = rank

    def _place_on_machine(self, place: RankPlace, rank: int, node: Mapping[str, float]) -> tuple[int, int]:
        parallel = self._config.parallel
        # Ray assigns each rank its own GPU.
        num_engines = 1 if "GPU" in self._per_rank else parallel.data_parallel_size
        engine, room = parallel.data_parallel_rank or 0, num_fitting(self._per_rank, node)
        return place_among_engines(place, rank, parallel.world_size, engine, num_engines, room)

    def _send(self, message: ExecuteStep | SampleStep | CallWorker, name: str) -> None:
        data = encode(ToWorker(message))
        for rank in self._ranks:
            self._calls[rank.actor.do.remote(data)] = rank

    def _used_s(self) -> float:
        """Return the CPU time of all ranks; a rank without a heartbeat counts as in its last one."""
        heartbeats = {rank.actor.heartbeat.options(concurrency_group="watch").remote(): rank for rank in self._ranks}
        ready, _ = self._ray.wait(list(heartbeats), num_returns=len(heartbeats), timeout=_HEARTBEAT_TIMEOUT_S)
        for heartbeat, rank in heartbeats.items():
            rank.is_silent = heartbeat not in ready
            # The end of a process is noticed elsewhere.
            with contextlib.suppress(self._ray.exceptions.RayError):
                if not rank.is_silent:
                    rank.used_s, rank.waits_for_others = self._ray.get(heartbeat)
        return sum(rank.used_s for rank in self._ranks)

    def _behind(self) -> Sequence[Rank]:
        silent = [rank for rank in self._ranks if rank.is_silent]
        return silent or [rank for rank in self._ranks if not rank.waits_for_others]

    def _described(self, ranks: Sequence[Rank]) -> str:
        return ", ".join(map(str, ranks))

    def _receive(self, name: str, timeout_s: float | None) -> bool:
        """Take in the messages of returned calls; False if none returned within the timeout."""
        waiting = [*self._calls, *(rank.life for rank in self._ranks)]
        if not self._ray.wait(waiting, timeout=timeout_s)[0]:
            return False
        ready, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=0)
        for reference in ready:
            rank = self._calls.pop(reference, None) or self._living(reference)
            for message in self._result_of(reference, rank, name):
                self._take(rank, decode(message, FromWorker).message)
        return True

    def _living(self, life: Any) -> _Rank:
        return next(rank for rank in self._ranks if rank.life == life)

    def _result_of(self, reference: Any, rank: _Rank, name: str) -> list[bytearray]:
        try:
            messages: list[bytearray] = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            self._died(rank, name, error)
        return messages

    def _died(self, rank: _Rank, name: str, error: Exception) -> NoReturn:
        described = str(rank)
        self._fail(
            self._located(
                WorkerError(
                    f"{described[0].upper()}{described[1:]} has ended while {name} waited for it: {_reason(error)}",
                    method=name,
                    rank=rank.rank,
                    cause_type=type(error).__name__,
                ),
                rank,
            )
        )


def _described(nodes: Sequence[dict[str, float]], names: dict[str, float]) -> str:
    each = [", ".join(f"{name} {node.get(name, 0):g}" for name in names) for node in nodes]
    return f"{len(nodes)} node{'' if len(nodes) == 1 else 's'} ({'; '.join(each)})"


def _reason(error: Exception) -> str:
    """Return the failure from Ray's text, without its advice: the last line, up to the possible causes."""
    *_, last = str(error).strip().splitlines() or [type(error).__name__]
    return last.partition(" Some common causes")[0].strip()
