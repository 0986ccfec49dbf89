"""Shared by all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tqdm import tqdm

if TYPE_CHECKING:
    from support.preloaded_processes import PreloadedStart

# A slow bar would start a thread that outlives it, and tests count threads.
tqdm.monitor_interval = 0
# One thread: the models are so small that a second one only waits, and waits long on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Shells let what they start in the background ignore Ctrl-C, and tests send it to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Helpers live in tests/support and are imported as `support.…`.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module", autouse=True)
def _collect_only_what_is_new() -> None:
    """An engine that is closed collects garbage: among what tests make, not in all of torch and Transformers too."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _registrations_of_plugins_end_with_the_test() -> Iterator[None]:
    from penstock.contract import feature

    before = dict(feature._registered)
    yield
    feature._registered.clear()
    feature._registered.update(before)


@pytest.fixture(scope="session", autouse=True)
def _preloaded_start() -> Iterator[PreloadedStart]:
    from support.preloaded_processes import PreloadedStart

    with PreloadedStart().installed() as start:
        yield start


@pytest.fixture(scope="module", autouse=True)
def _fresh_interpreters_where_marked(_preloaded_start: PreloadedStart, request: pytest.FixtureRequest) -> None:
    _preloaded_start.is_on = request.node.get_closest_marker("fresh_interpreters") is None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks that depend on what is collected: `slow` of further cases, and `skip` of GPU tests without a GPU."""
    if addressed := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"{addressed[0]}: the processes that share the tests would give it different names")
    _mark_further_cases_slow(items)
    _skip_without_gpu(items)


def _mark_further_cases_slow(items: list[pytest.Item]) -> None:
    seen: dict[str, set[tuple[str, int]]] = {}
    for item in items:
        by_value = item.get_closest_marker("each_value_quick") is not None
        if not by_value and item.get_closest_marker("one_case_quick") is None:
            continue
        # Cases share the object of a value.
        values = {(name, id(value)) for name, value in _parameters(item).items()} if by_value else set()
        function = item.nodeid.partition("[")[0]
        if function in seen and values <= seen[function]:
            item.add_marker(pytest.mark.slow)
        seen.setdefault(function, set()).update(values)


def _parameters(item: pytest.Item) -> Mapping[str, object]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))
