"""Which rank is on which node of a Ray cluster. Needs no Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's: the bundle of the placement group, the node's id, and its number among those of the node."""

    bundle: int
    node: str
    local_rank: int
    num_local_ranks: int


def plan_bundles(
    num_stages: int, ranks_per_stage: int, per_rank: Mapping[str, float], nodes: Sequence[Mapping[str, float]]
) -> list[dict[str, float]]:
    """What to ask the nodes for: a bundle, which is on one node, for each stage if they fit so, or else for each rank.

    per_rank: resources. nodes: what each has.
    """
    of_stage = {name: amount * ranks_per_stage for name, amount in per_rank.items()}
    if sum(num_fitting(of_stage, node) for node in nodes) >= num_stages:
        return [dict(of_stage) for _ in range(num_stages)]
    return [dict(per_rank) for _ in range(num_stages * ranks_per_stage)]


def can_hold(num_ranks: int, per_rank: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> bool:
    """Whether these nodes have room for so many ranks, if nobody else needs it."""
    return sum(num_fitting(per_rank, node) for node in nodes) >= num_ranks


def place_ranks(node_of_bundle: Sequence[str], num_ranks: int, driver_node: str) -> list[RankPlace]:
    """By rank. Those of a node follow each other, the node of the program that starts them first."""
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
    """A rank's number among those that share its node, and how many these are. room: for how many there is.

    None of several engines knows where the others' ranks are. Then there are as many as can be there, so that what each
    takes of the node is there for it; numbers differ where all ranks of all engines, or one engine's alone, fit a node.
    """
    if num_engines == 1:
        return place.local_rank, place.num_local_ranks
    most = min(room, num_engines * num_ranks)
    return (engine * num_ranks + rank) % most, most


def num_fitting(wanted: Mapping[str, float], node: Mapping[str, float]) -> int:
    """For how many ranks, or stages, that want so much a node has room."""
    return int(min(node.get(name, 0.0) // amount for name, amount in wanted.items()))
