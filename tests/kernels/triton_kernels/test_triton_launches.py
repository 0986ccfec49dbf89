"""Launches of a decode step beside the model's: each costs host time on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.triton_device import DEVICE, needs_triton

pytest.importorskip("triton", reason="Triton is not installed")

import support.triton_interpreter  # noqa: F401 - repairs the interpreter
from penstock.attention import ForwardContext
from penstock.contract import SamplingParams
from support.counting_launches import counted_launches, uncounted
from support.runners import ArithmeticModel, Driver, make_runner, new_request

pytestmark = [needs_triton, pytest.mark.skipif(DEVICE == "cuda", reason="the launches of the interpreter are counted")]

GATHER = ["triton _gather_tokens", "triton _gather_blocks"]
ARGMAX = ["triton _argmax_of_part", "triton _merge_parts"]
DRAW = ["triton _draw_from_part", "triton _merge_parts"]
LOGPROBS = ["topk", "triton _top_logprobs"]
COMMIT = ["triton _compute_outcome", "triton _advance_state"]
TEMPERATURE, MIN_P, TOP_K_TOP_P = "triton _divide_row", "triton _mask_min_p", "triton _mask_top_k_top_p"
# Only on the CPU the host asks whether a row has failed.
FAILURES_ON_CPU = ["any", "_local_scalar_dense"]


class _Model(ArithmeticModel):
    """The arithmetic model, whose launches are not counted."""

    def __call__(self, *args: Any) -> torch.Tensor:
        hidden: torch.Tensor = uncounted(super().__call__)(*args)
        return hidden

    def compute_logits(self, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        logits: torch.Tensor = uncounted(super().compute_logits)(hidden, context)
        return logits


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"temperature": 0.0}, [*GATHER, *ARGMAX, *COMMIT]),
        ({"temperature": 0.0, "logprobs": 3}, [*GATHER, *ARGMAX, *LOGPROBS, *COMMIT]),
        ({"temperature": 1.0}, [*GATHER, *DRAW, *COMMIT]),
        ({"temperature": 0.8, "top_p": 0.9, "top_k": 9}, [*GATHER, TEMPERATURE, TOP_K_TOP_P, *DRAW, *COMMIT]),
        ({"temperature": 0.8, "min_p": 0.1}, [*GATHER, TEMPERATURE, MIN_P, *DRAW, *COMMIT]),
        ({"temperature": 0.8, "logprobs": 3}, [*GATHER, "clone", TEMPERATURE, *DRAW, *LOGPROBS, *COMMIT]),
        (
            {"temperature": 1.0, "presence_penalty": 0.5},
            [*GATHER, "clone", "triton _penalise", *DRAW, *FAILURES_ON_CPU, *COMMIT, "triton _count_tokens"],
        ),
    ],
    ids=str,
)
def test_a_repeated_decode_step(params: dict[str, Any], expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.kernels.step_state.bind_native_step", lambda *arguments: None)
    for module in ("sampling", "logits_shaping"):
        monkeypatch.setattr(f"penstock.kernels.{module}.NATIVE", None)
    driver = Driver(make_runner(model=_Model()))
    requests = [new_request(name, [1, 2], first_block=1, params=SamplingParams(seed=1, **params)) for name in "ab"]
    driver.step({"a": 2, "b": 2}, requests)
    for repeats in (False, True, True):
        driver.step({"a": 1, "b": 1}, repeats=repeats)

    with counted_launches(monkeypatch) as launches:
        driver.step({"a": 1, "b": 1}, repeats=True)

    assert launches.names == expected
