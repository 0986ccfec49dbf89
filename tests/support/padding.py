"""Padding of every step, which must not change any result."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from penstock.runner.build.padding import Padding
from penstock.runner.model_runner import ModelRunner, RunnerLimits
from penstock.step.batch import BatchPlan


class PowersOfTwo(Padding):
    """Pads tokens and requests of every step to the next power of two that the limits allow."""

    def __init__(self, limits: RunnerLimits) -> None:
        self._limits = limits

    def plan(self, num_scheduled_tokens: Mapping[str, int]) -> BatchPlan:
        exact = BatchPlan.without_padding(num_scheduled_tokens)
        # A power of two itself is padded too.
        num_tokens = min(1 << exact.num_tokens.bit_length(), self._limits.max_num_tokens)
        num_reqs = min(1 << exact.num_reqs.bit_length(), self._limits.max_num_reqs)
        return exact._replace(num_tokens_padded=num_tokens, num_reqs_padded=num_reqs)


def pad_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make engines pad every step."""

    def make(*arguments: Any, **options: Any) -> ModelRunner:
        (limits,) = (argument for argument in arguments if isinstance(argument, RunnerLimits))
        return ModelRunner(*arguments, **options, padding=PowersOfTwo(limits))

    monkeypatch.setattr("penstock.worker.worker.ModelRunner", partial(make))
