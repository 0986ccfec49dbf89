"""One actor per rank, on the nodes of a Ray cluster that is there already."""

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

from penstock.config import EngineConfig, env
from penstock.contract import decode, encode
from penstock.errors import ConfigError, WorkerError
from penstock.executor.messages import (
    CallWorker,
    ExecuteStep,
    FromWorker,
    SampleStep,
    ToWorker,
    WorkerStart,
)
from penstock.executor.program import main_path, pickled
from penstock.executor.ranks import GRACE_S, Rank, RanksExecutor
from penstock.executor.ray_cluster import connect
from penstock.executor.ray_placement import (
    RankPlace,
    can_hold,
    num_fitting,
    place_among_engines,
    place_ranks,
    plan_bundles,
)
from penstock.executor.ray_worker import RankActor, RayStart
from penstock.parallel.connections import open_store
from penstock.worker.capabilities import check_options

logger = logging.getLogger(__name__)
# How long the cluster may take to find room, such as that of workers that have just ended.
_PLACEMENT_TIMEOUT_S = 120.0
# How long an actor may take to say how it is.
_LOOK_TIMEOUT_S = 1.0


@dataclass(slots=True, kw_only=True)
class _Rank(Rank):
    """An actor. address: of its node. life: ends with its process.

    As it was when it was last looked at, used_s: processor time of its process. waits_for_others: for other ranks.
    is_silent: it did not answer.
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
    """Says to actors what `MultiprocessExecutor` says to processes, by calls of theirs, which Ray keeps in order.

    The end of any actor or node ends the wait of whoever waits for a worker, at once.

    How long a step may take goes by what actors say of their processor time, as for processes of this machine.

    Tensors go from rank to rank by connections of their own. The connection to the cluster is kept for other engines.
    A core in a process of its own has its own, to the same cluster, and a placement group of its own.
    """

    def __init__(self, config: EngineConfig) -> None:
        check_options(config)
        super().__init__(config)
        self._ray = connect()
        self._ranks: list[_Rank] = []
        # Calls that were made and have not returned.
        self._calls: dict[Any, _Rank] = {}
        self._room: Any = None
        begin = time.monotonic()
        try:
            # Kept by this process, so that ranks can say who is missing, whichever of them is.
            self._store = open_store(self._ray.util.get_node_ip_address(), 0, is_host=True)
            self._start_actors(self._find_room())
            with self.startup_phase("actors"):
                self._wait_in_stage("start", self._not_started)
            logger.info("Workers: %s, after %.1f s", ", ".join(map(str, self._ranks)), time.monotonic() - begin)
            with self.startup_phase("device"):
                self.collective_rpc("init_device")
            with self.startup_phase("model"):
                self.collective_rpc("load_model")
        except BaseException:
            self.shutdown()
            raise

    @property
    def addresses(self) -> list[str]:
        """Of the workers' nodes, by rank."""
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
        # Whoever has left the cluster has left the actors to it, which ends them.
        if not self._ray.is_initialized():
            return
        if self._failure is None:
            endings = [rank.actor.close.remote() for rank in self._ranks]
            _, late = self._ray.wait(endings, num_returns=len(endings), timeout=GRACE_S) if endings else ([], [])
            if late:
                logger.warning("%d workers did not end within %g s", len(late), GRACE_S)
        for rank in self._ranks:
            self._ray.kill(rank.actor, no_restart=True)
        if self._room is not None:
            self._ray.util.remove_placement_group(self._room)

    def _find_room(self) -> list[RankPlace]:
        """Of each rank. Raises ConfigError where the cluster has none."""
        ray, parallel, per_rank = self._ray, self._config.parallel, self._per_rank
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        no_room = ConfigError(
            f"{parallel.world_size} workers, for tensor_parallel_size={parallel.tensor_parallel_size} and "
            f"pipeline_parallel_size={parallel.pipeline_parallel_size}, need {per_rank} of a node each, placed by "
            f"ray_placement={parallel.ray_placement!r}. The Ray cluster has {_described(nodes, per_rank)}, some of it "
            "perhaps taken by others. Add nodes, start them with more (ray start --num-cpus), or use fewer workers."
        )
        if not can_hold(parallel.world_size, per_rank, nodes):
            raise no_room
        bundles = plan_bundles(parallel.pipeline_parallel_size, parallel.tensor_parallel_size, per_rank, nodes)
        self._room = ray.util.placement_group(bundles, strategy=parallel.ray_placement)
        if not self._room.wait(_PLACEMENT_TIMEOUT_S):
            raise no_room
        nodes_by_bundle = ray.util.placement_group_table(self._room)["bundles_to_node_id"]
        driver_node = ray.get_runtime_context().get_node_id()
        return place_ranks(
            [nodes_by_bundle[bundle] for bundle in range(len(bundles))], parallel.world_size, driver_node
        )

    @property
    def _per_rank(self) -> dict[str, float]:
        """What each takes of its node."""
        return {"CPU": 1.0, **({"GPU": 1.0} if self._config.device.device == "cuda" else {})}

    def _start_actors(self, places: Sequence[RankPlace]) -> None:
        ray = self._ray
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        actor_class = ray.remote(concurrency_groups={"watch": 2})(RankActor)
        by_bundle = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        for number, place in enumerate(places):
            actor = actor_class.options(
                num_cpus=1,
                num_gpus=int(self._config.device.device == "cuda"),
                max_restarts=0,
                scheduling_strategy=by_bundle(self._room, placement_group_bundle_index=place.bundle),
            ).remote()
            life = actor.watch.options(concurrency_group="watch").remote()
            address = nodes[place.node]["NodeManagerAddress"]
            self._ranks.append(_Rank(rank=number, actor=actor, address=address, life=life))
        config = pickled("The configuration", self._config)
        variables = env.variables_for_another_machine()
        store = self._store.host, self._store.port
        for rank, place in zip(self._ranks, places, strict=True):
            start = RayStart(
                pickle.dumps(WorkerStart(config=config, rank=rank.rank, main_path=main_path())),
                variables,
                [path or os.getcwd() for path in sys.path],
                store,
                self._place_on_machine(place, rank.rank, nodes[place.node]["Resources"]),
            )
            self._calls[rank.actor.start.remote(start)] = rank

    def _place_on_machine(self, place: RankPlace, rank: int, node: Mapping[str, float]) -> tuple[int, int]:
        parallel = self._config.parallel
        # Of GPUs Ray gives each rank its own.
        num_engines = 1 if self._config.device.device == "cuda" else parallel.data_parallel_size
        engine, room = parallel.data_parallel_rank or 0, num_fitting(self._per_rank, node)
        return place_among_engines(place, rank, parallel.world_size, engine, num_engines, room)

    def _send(self, message: ExecuteStep | SampleStep | CallWorker, name: str) -> None:
        data = encode(ToWorker(message))
        for rank in self._ranks:
            self._calls[rank.actor.do.remote(data)] = rank

    def _used_s(self) -> float:
        """One that does not show it, such as one that stands still, has taken none since it did."""
        looks = {rank.actor.look.options(concurrency_group="watch").remote(): rank for rank in self._ranks}
        ready, _ = self._ray.wait(list(looks), num_returns=len(looks), timeout=_LOOK_TIMEOUT_S)
        for look, rank in looks.items():
            rank.is_silent = look not in ready
            # The end of a process is noticed elsewhere.
            with contextlib.suppress(self._ray.exceptions.RayError):
                if not rank.is_silent:
                    rank.used_s, rank.waits_for_others = self._ray.get(look)
        return sum(rank.used_s for rank in self._ranks)

    def _behind(self) -> Sequence[Rank]:
        silent = [rank for rank in self._ranks if rank.is_silent]
        return silent or [rank for rank in self._ranks if not rank.waits_for_others]

    def _described(self, ranks: Sequence[Rank]) -> str:
        return ", ".join(map(str, ranks))

    def _receive(self, name: str, timeout_s: float | None) -> bool:
        """Take in what calls have returned by then, at least one unless the time is over."""
        waiting = [*self._calls, *(rank.life for rank in self._ranks)]
        if not self._ray.wait(waiting, timeout=timeout_s)[0]:
            return False
        ready, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=0)
        for reference in ready:
            rank = self._calls.pop(reference, None) or self._living(reference)
            for said in self._result_of(reference, rank, name):
                self._take(rank, decode(said, FromWorker).message)
        return True

    def _living(self, life: Any) -> _Rank:
        return next(rank for rank in self._ranks if rank.life == life)

    def _result_of(self, reference: Any, rank: _Rank, name: str) -> list[bytes]:
        try:
            said: list[bytes] = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            self._died(rank, name, error)
        return said

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
    """Ray's text without its advice: its last line tells what happened, up to what may have caused it."""
    *_, last = str(error).strip().splitlines() or [type(error).__name__]
    return last.partition(" Some common causes")[0].strip()
