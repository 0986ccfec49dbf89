"""Placement of ranks on the nodes of a Ray cluster. Needs no Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Place of a rank: bundle of the placement group, node id, and its number among the ranks of the node."""

    bundle: int
    node: str
    local_rank: int
    num_local_ranks: int


def plan_bundles(
    num_stages: int, ranks_per_stage: int, per_rank: Mapping[str, float], nodes: Sequence[Mapping[str, float]]
) -> list[dict[str, float]]:
    """Return the bundles of the placement group: one per pipeline stage if they fit on nodes so, else one per rank.

    per_rank: resources of a rank. nodes: resources of each node.
    """
    of_stage = {name: amount * ranks_per_stage for name, amount in per_rank.items()}
    if sum(num_fitting(of_stage, node) for node in nodes) >= num_stages:
        return [dict(of_stage) for _ in range(num_stages)]
    return [dict(per_rank) for _ in range(num_stages * ranks_per_stage)]


def can_hold(num_ranks: int, per_rank: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> bool:
    """Whether these nodes have the resources of so many ranks, if no other job takes them."""
    return sum(num_fitting(per_rank, node) for node in nodes) >= num_ranks


def resources_of_rank(
    device: str, num_ranks: int, nodes: Sequence[Mapping[str, float]], *, runs_on_gpus: bool
) -> dict[str, float]:
    """Return the resources of one rank: a CPU, and a GPU with "cuda", or with "auto" where the nodes have enough.

    runs_on_gpus: whether the engine's other options allow "auto" to take GPUs.
    """
    on_gpus = {"CPU": 1.0, "GPU": 1.0}
    is_free = device == "auto" and runs_on_gpus and can_hold(num_ranks, on_gpus, nodes)
    return on_gpus if device == "cuda" or is_free else {"CPU": 1.0}


def place_ranks(node_of_bundle: Sequence[str], num_ranks: int, driver_node: str) -> list[RankPlace]:
    """Return the places by rank. Ranks of a node are consecutive; the driver's node comes first."""
    nodes = sorted(set(node_of_bundle), key=lambda node: (node != driver_node, node_of_bundle.index(node)))
    bundles = sorted(range(len(node_of_bundle)), key=lambda bundle: (nodes.index(node_of_bundle[bundle]), bundle))
    ranks_per_bundle = num_ranks // len(bundles)
    of_rank = [(bundle, node_of_bundle[bundle]) for bundle in bundles for _ in range(ranks_per_bundle)]
    sizes, before = Counter(node for _, node in of_rank), Counter[str]()
    places = []
    for bundle, node in of_rank:
        places.append(RankPlace(bundle, node, before[node], sizes[node]))
        before[node] += 1
    return places


def place_among_engines(
    place: RankPlace, rank: int, num_ranks: int, engine: int, num_engines: int, room: int
) -> tuple[int, int]:
    """Return a rank's number among those of its node, and how many these are. room: ranks that fit on the node.

    An engine does not know where the ranks of other engines are. Then the largest possible number counts, so that each
    rank's share of the node is free; numbers differ where all ranks of all engines, or one engine's alone, fit a node.
    """
    if num_engines == 1:
        return place.local_rank, place.num_local_ranks
    most = min(room, num_engines * num_ranks)
    return (engine * num_ranks + rank) % most, most


def num_fitting(wanted: Mapping[str, float], node: Mapping[str, float]) -> int:
    """Return how many ranks, or stages, with these resources fit on a node."""
    return int(min(node.get(name, 0.0) // amount for name, amount in wanted.items()))
