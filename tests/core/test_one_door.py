"""All work of a model runs through the execution: the LM head, drafts, pooling and the logits of prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from penstock.contract import SamplingParams
from penstock.features.pooling.base import PoolingHead
from penstock.layers.embedding import LMHead
from penstock.runner.execute.execution import EagerExecution, Execution
from penstock.runner.execute.programs import ProgramExecution
from penstock.step.frame import Frame, RowOutput, WantedOutputs
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.draft_heads import eagle3_weights, write_head
from support.engines import greedy, make_core, random_prompts, run
from support.runners import Driver, make_runner, new_request

PROMPTS = random_prompts((3, 20, 9), VOCAB_SIZE, seed=11)
PARAMS = {
    "greedy": [greedy(6)],
    "sampled": [SamplingParams(max_tokens=6, temperature=1.0, seed=3)],
    "prompt log-probabilities": [greedy(2, prompt_logprobs=2)],
}


class Door:
    """The execution's methods in progress, and calls of a model's heads: outside of them, and in all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch.setattr
        self._depth = 0
        self.calls: Counter[str] = Counter()
        self.outside: list[str] = []
        for owner, name in [
            (EagerExecution, "run"),
            (EagerExecution, "forward"),
            (ProgramExecution, "run"),
            (ProgramExecution, "forward"),
            (Execution, "compute"),
        ]:
            self._patch(owner, name, self._entered(getattr(owner, name)))

    def watch(self, owner: type, *names: str) -> None:
        for name in names:
            self._patch(owner, name, self._noted(getattr(owner, name), name))

    def _entered(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def enter(*arguments: Any, **named: Any) -> Any:
            self._depth += 1
            try:
                return method(*arguments, **named)
            finally:
                self._depth -= 1

        return enter

    def _noted(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def note(*arguments: Any, **named: Any) -> Any:
            self.calls[name] += 1
            if not self._depth:
                self.outside.append(name)
            return method(*arguments, **named)

        return note


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Door:
    return Door(monkeypatch)


@pytest.mark.parametrize("kind", PARAMS)
def test_the_lm_head_runs_through_the_door(kind: str, door: Door, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    _generate(tmp_path, PARAMS[kind], door)
    assert door.calls["forward"] > 1 or door.calls["compute_greedy"] > 1


def test_the_heads_of_a_drafter_run_through_the_door(door: Door, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "target", num_hidden_layers=5)
    write_head(tmp_path / "eagle3", eagle3_weights(), draft_vocab_size=40)
    speculation = {"method": "eagle3", "model": str(tmp_path / "eagle3"), "num_speculative_tokens": 2}
    options = {"max_model_len": 68, "speculative_config": {**speculation, "adaptive": False}}
    _generate(tmp_path / "target", [*PARAMS["greedy"], *PARAMS["sampled"]], door, **options)
    assert door.calls["forward"] > 1


class LastRows(PoolingHead):
    """The hidden state of a prompt's last token."""

    def wants(self, frame: Frame) -> WantedOutputs:
        return WantedOutputs(RowOutput.HIDDEN)

    def pool(self, frame: Frame, is_complete: Sequence[bool]) -> list[Tensor | None]:
        assert frame.hidden is not None, "rows of last tokens were wanted"
        return list(frame.hidden)


def test_pooling_runs_through_the_door(door: Door) -> None:
    driver = Driver(make_runner(make_head=LastRows))
    door.watch(LastRows, "pool")
    driver.step({"a": 3}, [new_request("a", [5, 6, 7])])
    assert door.calls["pool"] == 1
    assert not door.outside


def _generate(folder: Path, params: Sequence[SamplingParams], door: Door, **options: Any) -> None:
    core = make_core(folder, **options)
    door.watch(LMHead, "forward", "compute_greedy")
    run(core, PROMPTS, [params[index % len(params)] for index in range(len(PROMPTS))])
    core.close()
    assert not door.outside
