"""Owners of per-slot state: added to all or none, with step inputs at fixed addresses and an outcome of each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.attention import ForwardContext
from penstock.contract import NewRequestData, SamplingInput, SamplingParams
from penstock.kernels.bound_step import StepOutcome
from penstock.runner.build.padding import Padding
from penstock.runner.dummy_runs import run_dummy_step
from penstock.runner.slot_owner import SlotOwner
from penstock.step.batch import BatchPlan
from penstock.step.frame import Frame
from penstock.step.inputs import StepInput
from support.runners import VOCAB_SIZE, ArithmeticModel, Driver, make_runner, new_request, next_token


class Shifts(SlotOwner):
    """Shifts each request's tokens by its seed; seed 0 needs no work."""

    step_inputs = (StepInput("shifts", torch.int64, padding=-1),)

    def __init__(self, num_slots: int) -> None:
        self.shift_of_slot = torch.zeros(num_slots, dtype=torch.int64)
        self.said: list[tuple[Any, ...]] = []

    def add(self, slot: int, request: NewRequestData) -> None:
        if request.req_id == "bad":
            raise ValueError("not this one")
        self.said.append(("add", request.req_id))
        self.shift_of_slot[slot] = request.sampling_params.seed

    def rollback(self, slot: int) -> None:
        self.said.append(("rollback", slot))

    def extend(self, slot: int, block_ids: tuple[list[int], ...]) -> None:
        self.said.append(("extend", block_ids))

    def remove(self, slot: int) -> None:
        self.said.append(("remove", slot))
        self.shift_of_slot[slot] = 0

    def has_work(self, frame: Frame) -> bool:
        return bool(self.shift_of_slot[torch.from_numpy(frame.batch.layout.slots_np)].any())

    def fill(self, frame: Frame) -> None:
        layout = frame.batch.layout
        num_tokens = layout.plan.num_tokens
        tensors = layout.tensors
        slots_T = tensors.idx_mapping_R.index_select(0, tensors.token_to_req_T[:num_tokens])
        frame.inputs.named["shifts"][:num_tokens] = self.shift_of_slot.index_select(0, slots_T)
        self.said.append(("fill", frame.req_ids))

    def commit(self, frame: Frame, outcome: StepOutcome) -> None:
        self.said.append(("commit", outcome.num_sampled.tolist()))

    def dummy(self, frame: Frame) -> None:
        self.said.append(("dummy",))


class Shifted(ArithmeticModel):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor | None] = []

    def __call__(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        shifts = context.input("shifts")
        self.seen.append(context.of_all_tokens().input("shifts"))
        hidden = super().__call__(input_ids, positions, context)
        return hidden if shifts is None else (hidden + shifts.unsqueeze(-1)) % VOCAB_SIZE


class _EightTokens(Padding):
    def plan(self, num_scheduled_tokens: Mapping[str, int]) -> BatchPlan:
        exact = BatchPlan.without_padding(num_scheduled_tokens)
        return exact._replace(num_tokens_padded=8)


def make(**options: Any) -> tuple[Driver, Shifts, Shifted]:
    shifts, model = Shifts(9), Shifted()
    return Driver(make_runner(model=model, owners=[shifts], **options)), shifts, model


def seeded(req_id: str, prompt: list[int], seed: int, first_block: int = 1) -> NewRequestData:
    return new_request(req_id, prompt, first_block=first_block, params=SamplingParams(temperature=0.0, seed=seed))


@pytest.mark.parametrize("fast_paths", [False, True])
def test_a_named_input_reaches_the_model_with_each_requests_value(fast_paths: bool) -> None:
    driver, _, model = make(fast_paths=fast_paths)
    new = [seeded("a", [5, 6, 7], seed=3), seeded("b", [8, 9], seed=0, first_block=20)]
    tokens = driver.tokens({"b": 2, "a": 3}, new)
    for number in range(6):
        last = {req_id: sampled[0] for req_id, sampled in tokens.items()}
        tokens = driver.tokens({"b": 1, "a": 1}, repeats=number > 0)
        expected = next_token(last["a"], 3 + number) + 3
        assert tokens == {"a": [expected % VOCAB_SIZE], "b": [next_token(last["b"], 2 + number)]}
    assert len({shifts.data_ptr() for shifts in model.seen if shifts is not None}) == 1


def test_a_frame_without_work_for_an_owner_has_none_of_its_inputs() -> None:
    driver, owner, model = make()
    driver.step({"b": 2}, [seeded("b", [8, 9], seed=0)])
    driver.step({"b": 1})
    driver.step({"b": 1}, repeats=True)
    assert model.seen == [None] * 3
    assert not [said for said in owner.said if said[0] == "fill"]


def test_rows_of_padding_hold_the_value_of_padding() -> None:
    driver, _, model = make(padding=_EightTokens())
    driver.step({"a": 3}, [seeded("a", [5, 6, 7], seed=3)])
    assert model.seen[0] is not None
    assert model.seen[0].tolist() == [3] * 3 + [-1] * 5


def test_an_owner_follows_a_request_from_its_slot_to_its_end() -> None:
    driver, owner, _ = make()
    driver.step({"a": 3}, [seeded("a", [5, 6, 7], seed=3)])
    driver.step({"a": 1}, new_blocks={"a": ([30],)})
    driver.step({}, finished={"a"})
    run_dummy_step(driver.runner)
    slot = owner.said[-2][1]
    fill = ("fill", ["a"])
    expected = [("add", "a"), fill, ("commit", [1]), ("extend", ([30],)), fill, ("commit", [1]), ("remove", slot)]
    assert owner.said == [*expected, ("dummy",)]


def test_a_request_that_one_owner_refuses_is_taken_back_from_all() -> None:
    driver, owner, _ = make()
    rolled_back: list[int] = []
    driver.runner.prompt_logprobs.rollback = rolled_back.append  # type: ignore[method-assign]
    output = driver.step({"bad": 2, "good": 1}, [seeded("bad", [5, 6], 1, 20), seeded("good", [9], 0)])
    assert output.errors == {"bad": "ValueError: not this one"}
    assert output.sampled_token_ids == [[next_token(9, 0)]]
    assert ("rollback", rolled_back[0]) in owner.said
    assert set(driver.runner.requests.slot_of) == {"good"}


def test_a_repeated_step_asks_owners_for_their_rows_alone() -> None:
    driver, owner, _ = make()
    driver.step({"a": 5}, [seeded("a", [5, 6, 7, 8, 9], seed=3)])
    driver.step({"a": 1})
    owner.said.clear()
    asked: list[object] = []
    owner.has_work = lambda frame: asked.append(frame) or True  # type: ignore[method-assign, func-returns-value]
    output = driver.launch({"a": 1}, repeats=True)
    driver.runner.sample_tokens(SamplingInput(step_id=output.step_id))
    assert owner.said == [("fill", ["a"]), ("commit", [1])]
    assert not asked


def test_two_owners_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="Step inputs declared by several owners: shifts"):
        make_runner(owners=[Shifts(9), Shifts(9)])
