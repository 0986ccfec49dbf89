"""The memory arithmetic, term by term, and its errors."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.config import EngineConfig
from penstock.device import MemorySnapshot
from penstock.device.cpu import CpuDevice
from penstock.device.cuda import CudaDevice
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import OutOfMemory
from penstock.worker.memory_plan import (
    MemoryPlan,
    MemoryTerm,
    affordable_fraction,
    check_plan,
    resident_terms,
    with_size,
)

GIB = 1 << 30
PLAN = MemoryPlan(
    total=80 * GIB,
    free_at_start=78 * GIB,
    fraction=0.9,
    terms=(
        MemoryTerm("process", 1 * GIB, "held before loading"),
        MemoryTerm("weights", 15 * GIB, "weights"),
        MemoryTerm("activations", 2 * GIB, "activations"),
        MemoryTerm("graphs", 0, "CUDA graphs"),
    ),
)


def test_what_is_left_is_the_budget_less_every_term() -> None:
    assert PLAN.budget == 72 * GIB
    assert PLAN.left_for_kv_cache == PLAN.kv_cache_bytes == 54 * GIB
    for term in PLAN.terms:
        # With a fraction of all memory the process is a term as any other.
        more = PLAN.with_term(term.name, PLAN[term.name] + 5)
        assert more.left_for_kv_cache == PLAN.left_for_kv_cache - 5
    assert replace(PLAN, terms=(*PLAN.terms, MemoryTerm("mine", 5, "mine"))).left_for_kv_cache == 54 * GIB - 5


def test_an_absolute_size_overrides_what_is_left() -> None:
    assert replace(PLAN, requested_kv_cache=4 * GIB).kv_cache_bytes == 4 * GIB


def test_by_default_the_fraction_bounds_the_kv_cache_alone() -> None:
    """So that a model fits that takes more than the fraction by itself."""
    small = replace(PLAN, fraction=0.5, is_default_fraction=True)
    assert small.budget == int(0.9 * 79 * GIB)
    assert small.left_for_kv_cache == small.budget - 18 * GIB
    assert small.kv_cache_bytes == 40 * GIB < small.left_for_kv_cache
    large = small.with_term("weights", 60 * GIB)
    assert large.kv_cache_bytes == large.left_for_kv_cache == large.budget - 63 * GIB > 0
    check_plan(large)
    with pytest.raises(OutOfMemory, match="leaves no memory for the KV cache. Raise memory_fraction or leave it out"):
        check_plan(replace(large, is_default_fraction=False))
    with pytest.raises(OutOfMemory, match="leaves no memory for the KV cache. Free memory, lower"):
        check_plan(large.with_term("weights", 70 * GIB))


def test_by_default_what_is_free_decides_and_not_what_there_is() -> None:
    busy = replace(PLAN, fraction=0.5, is_default_fraction=True, free_at_start=22 * GIB)
    check_plan(busy)
    assert busy.kv_cache_bytes == int(0.9 * 23 * GIB) - 18 * GIB


def test_the_table_of_the_default_shows_both_bounds() -> None:
    plan = replace(PLAN, fraction=0.5, is_default_fraction=True)
    table = plan.table()
    assert "budget (0.9 of free and held)" in table
    assert re.search(r"= left for the KV cache +53\.10 GiB\n.*default bound \(0\.5 of memory\) +40\.00 GiB$", table)
    assert re.search(r"default bound \(0\.25 of memory\) +20\.00 GiB$", replace(plan, usual_fraction=0.25).table())
    assert "bound" not in replace(plan, requested_kv_cache=GIB).table()
    assert "bound" not in PLAN.table()


def test_the_table_shows_every_term() -> None:
    table = replace(PLAN, requested_kv_cache=3 * GIB).table()
    for size in ("80.00 GiB", "78.00 GiB", "72.00 GiB", "15.00 GiB", "54.00 GiB", "3.00 GiB"):
        assert size in table
    assert "- weights" in table
    assert "graphs" not in table, "a term that takes nothing is no line"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"terms": with_size(PLAN.terms, "weights", 75 * GIB)},
            "leaves no memory for the KV cache. Raise memory_fraction",
        ),
        (
            {"free_at_start": 40 * GIB},
            r"memory_fraction=0.9 asks for 72.00 GiB.*Lower it to 0.5, leave it out",
        ),
        ({"requested_kv_cache": 70 * GIB}, "kv_cache_memory_bytes=75161927680 is more than what is free"),
    ],
)
def test_a_plan_that_does_not_work_out_is_refused_with_the_table(changes: dict[str, Any], message: str) -> None:
    check_plan(PLAN)
    with pytest.raises(OutOfMemory, match=message) as caught:
        check_plan(replace(PLAN, **changes))
    assert "= left for the KV cache" in str(caught.value)


def test_a_share_that_is_not_free_is_the_default_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    """Other processes share a CPU's memory; on a GPU the plan refuses."""
    sizes = {"total": 80 * GIB, "available": 40 * GIB}
    assert affordable_fraction(None, "cpu", **sizes) == affordable_fraction(0.9, "cpu", **sizes) == (0.5, True)
    (record,) = caplog.records
    assert "memory_fraction=0.9 asks for 72.00 GiB, but only 40.00 GiB are free" in record.getMessage()
    assert affordable_fraction(0.5, "cpu", **sizes) == (0.5, False)
    assert affordable_fraction(0.9, "cuda", **sizes) == (0.9, False)


@pytest.mark.parametrize(("measured", "counted"), [(1 * GIB, 1 * GIB), (-5, 32 << 20)])
def test_memory_of_libraries_is_what_was_measured_or_the_least(measured: int, counted: int) -> None:
    (term,) = resident_terms([MemoryTerm("activations", 7, "")], "cuda", library_bytes=measured)
    assert term.size_bytes == 7 + counted


def test_memory_that_others_free_during_the_start_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CpuDevice, "library_bytes", lambda self, start: -(2 << 30))
    with caplog.at_level("WARNING"), closing(EngineCore(EngineConfig.create("demo"))):
        pass
    (message,) = (record.getMessage() for record in caplog.records if "freed" in record.getMessage())
    assert message.startswith("Other processes freed 2.00 GiB of the device's memory")


def test_a_gpu_counts_what_is_neither_free_nor_torchs() -> None:
    start = MemorySnapshot(total=80, free=78, used_by_process=1)
    device = SimpleNamespace(memory_snapshot=lambda: MemorySnapshot(total=80, free=60, used_by_process=16))
    assert CudaDevice.library_bytes(cast(CudaDevice, device), start) == 3
