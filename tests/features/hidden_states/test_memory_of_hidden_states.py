"""The memory plan has what a full step's hidden states take, and limits keep the step to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.contract import Parts
from penstock.engine.planning.plan import plan_engine
from penstock.features.hidden_states.messages import HiddenStatesPart
from penstock.features.hidden_states.worker import HiddenStatesOwner, PendingHiddenStates
from penstock.step.frame import Frame
from support.checkpoints import tiny_checkpoint
from support.engines import add, greedy, make_core

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 64}
# Of 64 tokens, with hidden size 64.
STATE = 64 * 64 * 4


def planned(folder: Path, **options: Any) -> int:
    config = {**OPTIONS, **options}
    limits = {"hidden_states": config.pop("limits", {})}
    return plan_engine(str(folder), **config, additional_config=limits).stages[0].memory["hidden_states"]


def test_a_full_step_of_all_layers_takes_what_the_plan_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_checkpoint(tmp_path)
    taken: list[int] = []
    part_of_hidden = HiddenStatesOwner.part_of_hidden

    def measured(self: HiddenStatesOwner, frame: Frame) -> PendingHiddenStates | None:
        part = part_of_hidden(self, frame)
        assert part is not None
        taken.append(sum(state.nbytes for state in (*frame.aux.values(), *part._copy.tensors)))
        return part

    monkeypatch.setattr(HiddenStatesOwner, "part_of_hidden", measured)
    core = make_core(tmp_path, **OPTIONS)
    parts = Parts.of([HiddenStatesPart(tokens="all", layers=(0, 1, 2))])
    add(core, "r", [5] * 100, greedy(1), parts=parts)
    while core.has_unfinished_requests():
        core.step()
    core.close()
    assert max(taken) == planned(tmp_path) == 5 * STATE


@pytest.mark.parametrize(
    ("options", "num_bytes"),
    [
        ({"limits": {"max_step_bytes": 3 * STATE}}, 3 * STATE),
        ({"limits": {"max_output_bytes": 0}}, 0),
        ({"pipeline_parallel_size": 2}, STATE),
    ],
    ids=str,
)
def test_the_plan_has_what_the_limits_allow(tmp_path: Path, options: dict[str, Any], num_bytes: int) -> None:
    tiny_checkpoint(tmp_path)
    assert planned(tmp_path, **options) == num_bytes
