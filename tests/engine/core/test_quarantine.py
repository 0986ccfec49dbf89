"""A request that makes workers fail ends, and no other request does."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract import SchedulerOutput
from penstock.engine.core.restarts import Quarantine
from penstock.worker.worker import Worker
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.engines import Result, add, finish, greedy, make_core, random_prompts, run

PROMPTS = random_prompts((5, 21, 13, 9), VOCAB_SIZE, seed=3)
DEADLY = "deadly"


class MortalWorker(Worker):
    """Worker that fails in a step of the deadly request, once it has so many tokens."""

    at_token = 0

    def execute_model(self, output: SchedulerOutput) -> None:
        super().execute_model(output)
        slot = self.runner.requests.slot_of.get(DEADLY)
        if DEADLY in output.num_scheduled_tokens and slot is not None:
            known = int(self.runner.requests.num_computed_tokens.tensor.view(-1)[slot])
            if known + output.num_scheduled_tokens[DEADLY] > self.at_token:
                raise RuntimeError("it is deadly")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(folder)
    return folder


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("at_token", [0, 14])
def test_a_request_that_makes_workers_fail_ends_alone(
    folder: Path, at_token: int, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MortalWorker, "at_token", at_token)
    core = make_core(folder)
    undisturbed = [result.tokens for result in run(core, PROMPTS, greedy(24))]
    core.close()
    core = make_core(folder, worker_cls=f"{__name__}.MortalWorker", async_scheduling=async_scheduling)
    results: dict[str, Result] = {}
    for index, prompt in enumerate(PROMPTS):
        if index == 2:
            add(core, DEADLY, PROMPTS[0], greedy(24))
        add(core, f"r{index}", prompt, greedy(24))
    finish(core, results)
    deadly = results.pop(DEADLY)
    assert "it is deadly" in (deadly.error or "")
    assert deadly.tokens == undisturbed[0][: len(deadly.tokens)]
    assert [results[f"r{index}"].tokens for index in range(len(PROMPTS))] == undisturbed
    # And the engine serves on.
    assert [result.tokens for result in run(core, PROMPTS, greedy(24))] == undisturbed
    core.close()


def test_others_do_not_wait_for_a_suspect_that_is_aborted(folder: Path) -> None:
    core = make_core(folder, worker_cls=f"{__name__}.MortalWorker")
    add(core, DEADLY, PROMPTS[0], greedy(24))
    for index, prompt in enumerate(PROMPTS):
        add(core, f"r{index}", prompt, greedy(24))
    for _ in range(2):
        assert core.step() == []
    core.abort_requests([DEADLY])
    results: dict[str, Result] = {}
    finish(core, results)
    assert len(results) == len(PROMPTS)
    assert all(len(result.tokens) == 24 for result in results.values())
    core.close()


class KilledWorker(Worker):
    """Worker whose process is killed in its first steps with tokens: as many as the file has bytes."""

    def execute_model(self, output: SchedulerOutput) -> None:
        kills = Path(os.environ["PENSTOCK_TEST_KILLS"])
        if output.num_scheduled_tokens and (left := kills.read_bytes()):
            kills.write_bytes(left[1:])
            os.kill(os.getpid(), signal.SIGKILL)
        super().execute_model(output)


@pytest.mark.slow
@pytest.mark.parametrize(("num_kills", "is_convicted"), [(3, False), (4, True)])
def test_it_takes_two_kills_in_its_trial_to_convict_a_request(
    num_kills: int, is_convicted: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(folder)
    undisturbed = [result.tokens for result in run(core, PROMPTS, greedy(8))]
    core.close()
    (tmp_path / "kills").write_bytes(b"k" * num_kills)
    monkeypatch.setenv("PENSTOCK_TEST_KILLS", str(tmp_path / "kills"))
    core = make_core(folder, worker_cls=f"{__name__}.KilledWorker", distributed_executor_backend="mp")
    first, *others = run(core, PROMPTS, greedy(8))
    core.close()
    assert [result.tokens for result in others] == undisturbed[1:]
    assert ("was killed by signal 9" in (first.error or "")) == is_convicted
    assert first.tokens == ([] if is_convicted else undisturbed[0])


class FakeScheduler:
    def __init__(self, req_ids: list[str]) -> None:
        self.held, self.alive = set[str](), set(req_ids)

    def wait_for(self, req_id: str, reason: str) -> None:
        self.held.add(req_id)

    def ready(self, req_id: str, reason: str) -> None:
        self.held.discard(req_id)

    def holds(self, req_id: str) -> bool:
        return req_id in self.alive


@pytest.mark.parametrize("is_from_outside", [True, False])
def test_a_suspect_is_tried_again_only_after_a_kill(is_from_outside: bool) -> None:
    scheduler = FakeScheduler(["a", "b"])
    quarantine = Quarantine(scheduler)  # type: ignore[arg-type]
    assert [quarantine.note_failure(["a", "b"]) for _ in range(2)] == [None, None]
    assert quarantine.note_failure(["a"], is_from_outside=is_from_outside) == (None if is_from_outside else "a")
    if is_from_outside:
        # A kill in the trial of another request does not count for this one.
        assert scheduler.held == {"b"}
        quarantine.note_results(["a"])
        assert scheduler.held == set()
        assert quarantine.note_failure(["b"], is_from_outside=True) is None
        assert quarantine.note_failure(["b"], is_from_outside=True) == "b"


@settings(deadline=None)
@given(st.integers(1, 6), st.data())
def test_only_the_culprit_is_convicted_and_no_request_waits_forever(num_requests: int, data: st.DataObject) -> None:
    names = [f"r{index}" for index in range(num_requests)]
    culprit = data.draw(st.sampled_from([None, *names]))
    scheduler = FakeScheduler(names)
    quarantine = Quarantine(scheduler)  # type: ignore[arg-type]
    for _ in range(60):
        running = [name for name in names if name in scheduler.alive - scheduler.held]
        if not running:
            break
        batch = data.draw(st.sets(st.sampled_from(running), min_size=1))
        if culprit in batch:
            blamed = quarantine.note_failure(sorted(batch))
            assert blamed in (None, culprit)
            if blamed is not None:
                scheduler.alive.discard(blamed)
        else:
            quarantine.note_results(batch)
            if data.draw(st.booleans()):
                scheduler.alive.discard(data.draw(st.sampled_from(sorted(batch))))
    else:
        for _ in range(2 * num_requests):
            batch = scheduler.alive - scheduler.held
            if culprit in batch:
                if (blamed := quarantine.note_failure(sorted(batch))) is not None:
                    assert blamed == culprit
                    scheduler.alive.discard(blamed)
            else:
                quarantine.note_results(batch)
    assert not scheduler.held & scheduler.alive
