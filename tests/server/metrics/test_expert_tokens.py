"""Metrics of experts: sums over all workers, which keep their last values while these cannot be asked."""

from __future__ import annotations

import asyncio

import pytest

from penstock.engine.processes.broker_connection import BrokerState
from penstock.engine.statistics.metrics import Counter, Gauge
from penstock.errors import ProcessLost, WaitTimeout
from penstock.server.metrics import expert_tokens as metrics_of_experts
from penstock.server.metrics.expert_tokens import ExpertTokens
from support.broker_statuses import BUSY
from support.expert_tokens import READY, Workers, expert_tokens


@pytest.fixture(autouse=True)
def read_at_every_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_of_experts, "_INTERVAL_S", 0.0)


def read(tokens: ExpertTokens) -> dict[tuple[str, str], float]:
    """Scraped values by name and layer."""
    asyncio.run(tokens.read())
    found = {}
    for metric in tokens.metrics({"model_name": "demo"}):
        assert isinstance(metric, Counter | Gauge)
        assert metric.labels["model_name"] == "demo"
        found[metric.name.removeprefix("penstock:"), metric.labels["layer"]] = metric.value
    return found


def test_layers_are_summed_over_all_workers() -> None:
    # Two stages of one core, then those of another; the second rank of a stage gives no layers.
    workers = Workers({0: [1, 2, 3]}, {}, {5: [0, 0, 0]}, {0: [5, 0, 1]}, {}, {5: [0, 0, 0]})
    assert read(expert_tokens(workers)) == {
        ("expert_tokens", "0"): 12,
        ("expert_imbalance", "0"): 6 / 4,
        ("expert_tokens", "5"): 0,
        ("expert_imbalance", "5"): 1.0,
    }


@pytest.mark.parametrize("error", [ProcessLost("lost"), WaitTimeout("late"), TimeoutError()])
def test_the_last_values_stay_when_workers_do_not_answer(error: Exception) -> None:
    workers = Workers({0: [3, 1]})
    tokens = expert_tokens(workers)
    before = read(tokens)
    workers.answers, workers.error = ({0: [9, 9]},), error
    assert read(tokens) == before
    workers.error = None
    assert read(tokens)["expert_tokens", "0"] == 18


def test_a_core_that_is_being_replaced_is_not_waited_for() -> None:
    workers, broker = Workers({0: [3, 1]}), BrokerState()
    tokens = expert_tokens(workers, broker)
    assert read(tokens) == {}
    broker.note(READY)
    before = read(tokens)
    assert before["expert_tokens", "0"] == 4
    workers.answers = ({0: [9, 9]},)
    broker.note(BUSY)
    assert read(tokens) == before


def test_scrapes_in_quick_succession_ask_the_workers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_of_experts, "_INTERVAL_S", 60.0)
    workers = Workers({0: [3, 1]})
    tokens = expert_tokens(workers)

    async def scrape_at_once() -> None:
        await asyncio.gather(*(tokens.read() for _ in range(3)))

    asyncio.run(scrape_at_once())
    assert read(tokens)["expert_tokens", "0"] == 4
    assert workers.num_calls == 1
