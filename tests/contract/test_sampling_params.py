"""Bad parameters are refused where they are written, by name, value and what is allowed."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.contract import SamplingParams
from penstock.errors import InvalidParameter

BAD_VALUES: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", 16_385),
    ("n", 1.0),
    ("presence_penalty", 2.1),
    ("presence_penalty", float("nan")),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", "much"),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", float("inf")),
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", -0.01),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.01),
    ("min_p", 1.5),
    ("seed", 2**63),
    ("seed", "7"),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"x": 1.0}),
    ("logit_bias", {"²": 1.0}),
    ("logit_bias", {True: 1.0}),
    ("logit_bias", [1, 2]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [1, -1]),
    ("allowed_token_ids", 5),
    ("bad_words", [""]),
    ("bad_words", [5]),
    ("bad_words", {"word": 1}),
    ("bad_words_token_ids", [[]]),
    ("bad_words_token_ids", [5]),
    ("structured_outputs", "json"),
    ("structured_outputs", ["json"]),
    ("num_speculative_tokens", -1),
    ("thinking_token_budget", -2),
    ("thinking_token_budget", 1.0),
    ("extra_args", ["processor"]),
    ("extra_args", {1: 2}),
    ("extra_args", {"processor": print}),
    ("stop", ""),
    ("stop", ["fine", ""]),
    ("stop", 5),
    ("include_stop_str_in_output", None),
    ("stop_token_ids", "12"),
    ("stop_token_ids", [1, -2]),
    ("stop_token_ids", [1, "2"]),
    ("all_stop_token_ids", [True]),
    ("ignore_eos", 1),
    ("max_tokens", 0),
    ("max_tokens", 2.0),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("logprobs", -2),
    ("logprobs", 2.5),
    ("prompt_logprobs", -2),
    ("prompt_logprobs", "5"),
    ("detokenize", 0),
    ("skip_special_tokens", "yes"),
    ("spaces_between_special_tokens", 1),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("output_kind", "DELTA"),
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES, ids=str)
def test_a_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match=f"{name}=.* is not valid. Allowed: "):
        SamplingParams(**{name: value})


NUMBERS = [
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p"),
    *("seed", "thinking_token_budget", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"),
    "truncate_prompt_tokens",
    "num_speculative_tokens",
]


@pytest.mark.parametrize("name", NUMBERS)
def test_true_is_no_number(name: str) -> None:
    with pytest.raises(InvalidParameter, match=f"{name}=True is not valid"):
        SamplingParams(**{name: True})


def test_every_parameter_has_a_bad_value_in_the_list() -> None:
    assert {name for name, _ in BAD_VALUES} == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("bias", [100.5, float("nan"), "1"])
def test_a_bad_bias_is_named_with_its_token(bias: Any) -> None:
    with pytest.raises(InvalidParameter, match=r"logit_bias\[7\]=.* -100 to 100"):
        SamplingParams(logit_bias={7: bias})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5.*at most max_tokens=4"),
        ({"n": 2, "temperature": 0}, "n=2.*temperature=0"),
        ({"n": 2, "top_p": 0}, "n=2.*top_p=0"),
        ({"stop": "x", "detokenize": False}, "stop=.*detokenize=False"),
    ],
)
def test_parameters_that_contradict_each_other_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        SamplingParams(**fields)


def test_the_borders_of_what_is_allowed_are_allowed() -> None:
    params = SamplingParams(min_tokens=4, max_tokens=4, top_p=1.0, min_p=1.0, presence_penalty=-2.0, top_k=-1, n=1)
    assert (params.min_tokens, params.max_tokens) == (4, 4)


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="temprature.*Did you mean temperature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("temprature", "'temprature' .given: 3.*Did you mean temperature"),
        ("best_of", "best_of=3 .*Ask for n"),
        ("zebra", "'zebra'.*Allowed: n, presence_penalty"),
    ],
)
def test_an_unknown_field_of_a_dictionary_is_refused(name: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        SamplingParams.from_dict({"top_k": 1, name: 3})


def test_a_dictionary_makes_the_same_parameters() -> None:
    fields = {"top_k": 3, "stop": ["a"], "logit_bias": {"5": 1}}
    assert SamplingParams.from_dict(fields) == SamplingParams(top_k=3, stop="a", logit_bias={5: 1.0})


def test_optional_fields_that_are_none_take_their_defaults() -> None:
    params = SamplingParams.from_optional(temperature=None, top_p=None, n=None, stop=None, top_k=5)
    assert params == SamplingParams(top_k=5)
    assert SamplingParams.from_optional(max_tokens=None) == SamplingParams(max_tokens=None)
    for value in (0.5, None):
        with pytest.raises(InvalidParameter, match="There is no parameter 'top_q'"):
            SamplingParams.from_optional(top_q=value)
    with pytest.raises(InvalidParameter, match="temperature=-1"):
        SamplingParams.from_optional(temperature=-1)


def test_a_clone_is_equal_and_shares_nothing_that_changes() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"], logit_bias={5: 1.0}, extra_args={"mine": [1]}, seed=3)
    copied = params.clone()
    assert copied == params
    assert params.extra_args is not None
    params.extra_args["mine"].append(2)
    assert copied.extra_args == {"mine": [1]}


def test_a_clone_takes_other_values_and_checks_them() -> None:
    params = SamplingParams(temperature=0.5, max_tokens=4)
    assert params.clone(max_tokens=8, top_k=2) == SamplingParams(temperature=0.5, max_tokens=8, top_k=2)
    assert params.max_tokens == 4
    with pytest.raises(InvalidParameter, match="top_p=2 is not valid"):
        params.clone(top_p=2)
    with pytest.raises(InvalidParameter, match="There is no parameter 'top_q'"):
        params.clone(top_q=0.5)


def test_parameters_survive_being_sent() -> None:
    params = SamplingParams(
        n=2,
        presence_penalty=0.5,
        logit_bias={5: -1.0},
        allowed_token_ids=[5, 6],
        bad_words=["word"],
        bad_words_token_ids=[[5, 6], [7]],
        stop=["a", "b"],
        stop_token_ids=[1],
        all_stop_token_ids={2},
        extra_args={"processor": {"list": [1, 2.5, None], "text": "x"}},
        prompt_logprobs=-1,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_tiny_temperatures_are_raised_and_zero_is_greedy() -> None:
    assert SamplingParams(temperature=1e-6).temperature == 0.01
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=1.5, top_p=0).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy


def test_a_field_that_is_set_later_is_checked_like_a_new_one() -> None:
    params = SamplingParams(max_tokens=8)
    params.stop = "end"
    params.min_tokens = 8
    assert params == SamplingParams(max_tokens=8, min_tokens=8, stop=["end"])
    with pytest.raises(InvalidParameter, match="max_tokens=4|min_tokens=8.*at most max_tokens=4"):
        params.max_tokens = 4
    with pytest.raises(InvalidParameter, match="'max_token'.*Did you mean max_tokens"):
        params.max_token = 4  # type: ignore[attr-defined]
    assert params.max_tokens == 8


def test_scalars_of_numpy_are_numbers() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(7),
        max_tokens=np.int32(3),
        ignore_eos=np.bool_(True),
        stop_token_ids=[np.int64(4)],
        logit_bias={np.int64(5): np.float64(1.5)},
    )
    assert params == SamplingParams(
        temperature=0.5, top_k=7, max_tokens=3, ignore_eos=True, stop_token_ids=[4], logit_bias={5: 1.5}
    )
    params.seed = np.uint32(9)  # type: ignore[assignment]
    assert type(params.seed) is int
    with pytest.raises(InvalidParameter, match="top_k"):
        SamplingParams(top_k=np.float64(1.5))
