"""Warm-up by dummy requests: it runs every kernel of a step, and nothing stays of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.contract import SamplingParams
from penstock.device.cpu import CpuDevice
from penstock.features.structured_output.bitmask import Bitmask
from penstock.runner.model_runner import ModelRunner
from penstock.runner.sampling.logits_transform import LogitsTransform
from penstock.runner.warm_up import warm_up_requests
from penstock.step.logits_rows import LogitsRows
from support.runners import VOCAB_SIZE, ArithmeticModel, Driver, make_runner, new_request


def _note_applied(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """Note the numbers of rows that each transform runs on."""
    applied: dict[str, set[int]] = {}

    def note(transform: LogitsTransform) -> None:
        apply, name = transform.apply, type(transform).__name__
        applied[name] = set()

        def noted(logits: Tensor, rows: LogitsRows) -> Tensor:
            applied[name].add(len(logits))
            return apply(logits, rows)

        monkeypatch.setattr(transform, "apply", noted)

    for transform in (*runner.sampler.shaping, *runner.sampler.truncating):
        note(transform)
    return applied


@pytest.mark.parametrize("max_drafts", [0, 2])
def test_every_transform_also_of_features_runs_on_the_largest_and_on_small_batches(
    monkeypatch: pytest.MonkeyPatch, max_drafts: int
) -> None:
    model = ArithmeticModel()
    bitmask = Bitmask(CpuDevice(num_threads=1), num_slots=9, vocab_size=VOCAB_SIZE)
    runner = make_runner(model=model, max_drafts=max_drafts, transforms=[bitmask])
    applied = _note_applied(runner, monkeypatch)
    warm_up_requests(runner)
    expected = {1, 3, 8} | {size * (1 + max_drafts) for size in (1, 3, 8)}
    assert applied.pop("CustomProcessors") == set()
    assert all(sizes == expected for sizes in applied.values()), applied
    # Prefills of two tokens each beside decodes, and steps with drafts.
    assert {len(tokens) for tokens, _ in model.calls} == expected | {2, 6, 16}


def _generate(runner: ModelRunner) -> list[Any]:
    driver = Driver(runner, step_id=-1)
    drawn = SamplingParams(temperature=0.8, seed=3, top_k=20, repetition_penalty=1.2, logprobs=2)
    requests = [new_request("a", [5, 6, 7]), new_request("b", [8, 9], first_block=20, params=drawn)]
    steps: list[Any] = [driver.step({"b": 2, "a": 3}, requests)]
    steps += [driver.step({"b": 1, "a": 1}, repeats=number > 0) for number in range(12)]
    return steps


@pytest.mark.parametrize("max_drafts", [0, 2])
def test_steps_after_it_are_those_of_a_new_runner(max_drafts: int) -> None:
    runner = make_runner(max_drafts=max_drafts)
    warm_up_requests(runner)
    assert runner.requests.num_reqs == 0
    assert not torch.any(runner.kv_cache.layer_memory("layer.0"))
    assert _generate(runner) == _generate(make_runner(max_drafts=max_drafts))


@pytest.mark.parametrize("sizes", [{"num_blocks": 1}, {"max_model_len": 4}])
def test_a_runner_without_room_for_a_request_is_left_alone(sizes: dict[str, int]) -> None:
    model = ArithmeticModel()
    warm_up_requests(make_runner(model=model, **sizes))
    assert model.calls == []
