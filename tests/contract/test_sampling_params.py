"""Bad parameters are refused where they are written, by name, value and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.contract import SamplingParams
from penstock.errors import InvalidParameter


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("seed", 2**63),
        ("seed", "7"),
        ("max_tokens", 0),
        ("max_tokens", 2.0),
        ("logprobs", -1),
        ("ignore_eos", 1),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [1, -2]),
        ("stop_token_ids", [1, "2"]),
    ],
)
def test_a_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match=f"{name}=.* is not valid. Allowed: "):
        SamplingParams(**{name: value})


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_tiny_temperatures_are_raised_and_zero_is_greedy() -> None:
    assert SamplingParams(temperature=1e-6).temperature == 0.01
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy
