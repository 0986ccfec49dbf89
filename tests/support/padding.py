"""Planner that pads every step, which must not change any result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from penstock.runner.batch_layout import BatchPlan
from penstock.runner.model_runner import ModelRunner, RunnerLimits


def to_powers_of_two(limits: RunnerLimits) -> Callable[[Mapping[str, int]], BatchPlan]:
    """Pad tokens and requests of every step to the next power of two that the limits allow."""

    def plan(num_scheduled_tokens: Mapping[str, int]) -> BatchPlan:
        exact = BatchPlan.without_padding(num_scheduled_tokens)
        # A power of two itself is padded too.
        num_tokens = min(1 << exact.num_tokens.bit_length(), limits.max_num_tokens)
        num_reqs = min(1 << exact.num_reqs.bit_length(), limits.max_num_reqs)
        return exact._replace(num_tokens_padded=num_tokens, num_reqs_padded=num_reqs)

    return plan


def pad_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make engines pad every step."""

    def make(*arguments: Any, **options: Any) -> ModelRunner:
        (limits,) = (argument for argument in arguments if isinstance(argument, RunnerLimits))
        return ModelRunner(*arguments, **options, planner=to_powers_of_two(limits))

    monkeypatch.setattr("penstock.worker.worker.ModelRunner", partial(make))
