"""The memory arithmetic, term by term, and its errors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import OutOfMemory
from penstock.worker.memory_plan import MemoryPlan, check_plan

GIB = 1 << 30
PLAN = MemoryPlan(
    total=80 * GIB,
    free_at_start=78 * GIB,
    fraction=0.9,
    process=1 * GIB,
    weights=15 * GIB,
    activations=2 * GIB,
    sampling=0,
    runner_state=0,
)


def test_what_is_left_is_the_budget_less_every_term() -> None:
    assert PLAN.budget == 72 * GIB
    assert PLAN.left_for_kv_cache == PLAN.kv_cache_bytes == 54 * GIB
    for term in ("process", "weights", "activations", "sampling", "runner_state", "logits_processors"):
        more = replace(PLAN, **{term: getattr(PLAN, term) + 5})
        assert more.left_for_kv_cache == PLAN.left_for_kv_cache - 5


def test_an_absolute_size_overrides_what_is_left() -> None:
    assert replace(PLAN, requested_kv_cache=4 * GIB).kv_cache_bytes == 4 * GIB


def test_the_table_shows_every_term() -> None:
    table = replace(PLAN, requested_kv_cache=3 * GIB).table()
    for size in ("80.00 GiB", "78.00 GiB", "72.00 GiB", "15.00 GiB", "54.00 GiB", "3.00 GiB"):
        assert size in table


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": 75 * GIB}, "leaves no memory for the KV cache. Raise --memory-fraction"),
        ({"free_at_start": 40 * GIB}, r"memory_fraction=0.9 asks for 72.00 GiB.*Lower --memory-fraction to 0.5"),
        ({"requested_kv_cache": 70 * GIB}, "kv_cache_memory_bytes=75161927680 is more than what is free"),
    ],
)
def test_a_plan_that_does_not_work_out_is_refused_with_the_table(changes: dict[str, int], message: str) -> None:
    check_plan(PLAN)
    with pytest.raises(OutOfMemory, match=message) as caught:
        check_plan(replace(PLAN, **changes))
    assert "= left for the KV cache" in str(caught.value)
