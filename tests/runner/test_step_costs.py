"""Step cost measurement: all ranks run the same steps, whatever their clocks and speeds, and get the same costs."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.parallel import ParallelState
from penstock.runner import dummy_runs
from support.ranks import SharedGroup, ThreadGroup, run_ranks

# By stage, and rank of the stage: seconds of a token.
SECONDS = ((0.0001, 0.0003), (0.0012, 0.0004))


@pytest.mark.parametrize("most_tokens", [4, 4096])
def test_ranks_measure_the_same_steps_and_agree_on_their_costs(
    most_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages, pipelines = [SharedGroup(2) for _ in SECONDS], [SharedGroup(2) for _ in SECONDS[0]]
    steps: list[list[int]] = [[], [], [], []]

    def time_step(runner: Any, num_tokens: int) -> float:
        rank = int(runner)
        steps[rank].append(num_tokens)
        seconds = SECONDS[rank // 2][rank % 2] * num_tokens
        clock.now += seconds
        # What a step does together: another one would not fit.
        assert parallels[rank].tensor.gather_values(num_tokens) == [num_tokens] * 2
        return seconds

    parallels = [
        ParallelState(
            rank=rank,
            world_size=4,
            tensor=ThreadGroup(rank % 2, stages[rank // 2]),
            pipeline=ThreadGroup(rank // 2, pipelines[rank % 2]),
        )
        for rank in range(4)
    ]
    # The second rank's clock goes four times as fast.
    clock = threading.local()
    clocks = SimpleNamespace(perf_counter=lambda: clock.now * clock.speed)
    monkeypatch.setattr(dummy_runs, "time", clocks)
    monkeypatch.setattr(dummy_runs, "_time_dummy_batch", time_step)
    monkeypatch.setattr(dummy_runs, "_MEASURED_S", 0.1)

    def measure(rank: int) -> list[tuple[int, float]]:
        runner: Any = rank
        clock.now, clock.speed = 0.0, 1 + 3 * (rank % 2)
        return dummy_runs.measure_step_costs(runner, most_tokens, parallels[rank])

    costs = run_ranks(4, measure)

    assert costs[1:] == costs[:1] * 3
    assert steps[0] == steps[1]
    assert steps[2] == steps[3]
    found: Any = costs[0]
    assert found == [(2**number, pytest.approx(0.0015 * 2**number)) for number in range(len(found))]
    assert len(found) == 3 if most_tokens == 4 else 3 < len(found) < 12
