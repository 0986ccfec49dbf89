"""Ranks that share layers are on one node where they can be, and the driver's node is the first."""

from __future__ import annotations

from penstock.executor.ray_placement import (
    RankPlace,
    can_hold,
    place_among_engines,
    place_ranks,
    plan_bundles,
    resources_of_rank,
)

PER_RANK = {"CPU": 1.0}


def nodes(*sizes: float) -> list[dict[str, float]]:
    return [{"CPU": size, "memory": 1e9} for size in sizes]


def test_a_stage_is_a_bundle_where_stages_fit_nodes() -> None:
    assert plan_bundles(2, 2, PER_RANK, nodes(2, 2)) == [{"CPU": 2.0}] * 2
    assert plan_bundles(2, 2, PER_RANK, nodes(5, 0)) == [{"CPU": 2.0}] * 2
    assert plan_bundles(1, 2, PER_RANK, nodes(1, 1)) == [PER_RANK] * 2
    assert plan_bundles(2, 2, PER_RANK, nodes(3, 1)) == [PER_RANK] * 4
    assert plan_bundles(3, 1, PER_RANK, nodes(1, 1, 1)) == [PER_RANK] * 3
    on_gpus = {"CPU": 1.0, "GPU": 1.0}
    assert plan_bundles(1, 2, on_gpus, [{"CPU": 8, "GPU": 1}, {"CPU": 8, "GPU": 1}, {"CPU": 8}]) == [on_gpus] * 2


def test_what_cannot_be_held_is_known() -> None:
    assert can_hold(3, PER_RANK, nodes(2, 1.5))
    assert not can_hold(4, PER_RANK, nodes(2, 1.5))
    assert not can_hold(1, {"CPU": 1.0, "GPU": 1.0}, nodes(8))


def test_ranks_take_gpus_where_the_device_says_so_or_is_free_to() -> None:
    with_gpus = [{"CPU": 8.0, "GPU": 1.0}, {"CPU": 8.0, "GPU": 1.0}]
    on_gpu = {"CPU": 1.0, "GPU": 1.0}
    assert resources_of_rank("auto", 2, with_gpus, runs_on_gpus=True) == on_gpu
    assert resources_of_rank("auto", 3, with_gpus, runs_on_gpus=True) == PER_RANK
    assert resources_of_rank("auto", 2, with_gpus, runs_on_gpus=False) == PER_RANK
    assert resources_of_rank("auto", 1, nodes(4), runs_on_gpus=True) == PER_RANK
    assert resources_of_rank("cpu", 1, with_gpus, runs_on_gpus=True) == PER_RANK
    assert resources_of_rank("cuda", 1, nodes(4), runs_on_gpus=True) == on_gpu


def test_ranks_of_a_node_follow_each_other_from_the_drivers_node_on() -> None:
    assert place_ranks(["b", "a", "b"], 3, "a") == [
        RankPlace(1, "a", 0, 1),
        RankPlace(0, "b", 0, 2),
        RankPlace(2, "b", 1, 2),
    ]
    # Two stages of two.
    assert place_ranks(["b", "a"], 4, "a") == [
        RankPlace(1, "a", 0, 2),
        RankPlace(1, "a", 1, 2),
        RankPlace(0, "b", 0, 2),
        RankPlace(0, "b", 1, 2),
    ]
    assert [place.node for place in place_ranks(["c", "b", "c"], 3, "elsewhere")] == ["c", "c", "b"]


def test_engines_leave_room_on_a_node_for_each_other() -> None:
    def places(num_engines: int, num_ranks: int, room: int) -> list[tuple[int, int]]:
        return [
            place_among_engines(RankPlace(0, "a", rank, num_ranks), rank, num_ranks, engine, num_engines, room)
            for engine in range(num_engines)
            for rank in range(num_ranks)
        ]

    assert places(1, 2, 8) == [(0, 2), (1, 2)]
    # All may be there.
    assert places(2, 2, 8) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    # One engine's fill the node, or some of several do.
    assert places(2, 2, 2) == [(0, 2), (1, 2)] * 2
    assert places(4, 1, 2) == [(0, 2), (1, 2)] * 2
