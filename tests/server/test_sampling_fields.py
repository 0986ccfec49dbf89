"""Every sampling parameter over HTTP: a field of requests, its value in `SamplingParams`, and its name in the docs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.contract import SamplingParams
from penstock.server.protocol.base import SamplingFields
from penstock.server.requests.sampling import sampling_params

DOCS = Path(__file__).parents[2] / "docs"
# Parameters that requests set by other fields, or that are not theirs to set.
OTHERWISE = {
    "logprobs": "logprobs of completions, top_logprobs of chats",
    "extra_args": "vllm_xargs",
    "detokenize": "answers have texts",
    "output_kind": "stream",
    "bad_words_token_ids": "bad_words",
    "all_stop_token_ids": "stop_token_ids",
}
# Fields of OpenAI's own API.
OPENAI = {
    *("n", "presence_penalty", "frequency_penalty", "temperature", "top_p", "seed", "logit_bias", "stop", "max_tokens")
}
VALUES: dict[str, Any] = {
    "n": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "seed": 5,
    "logit_bias": {5: 1.0},
    "allowed_token_ids": [5],
    "bad_words": ["a"],
    "structured_outputs": {"regex": "a+"},
    "thinking_token_budget": 5,
    "num_speculative_tokens": 2,
    "stop": ["a"],
    "include_stop_str_in_output": True,
    "stop_token_ids": [5],
    "ignore_eos": True,
    "max_tokens": 5,
    "min_tokens": 5,
    "prompt_logprobs": 5,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 5,
}


def test_every_parameter_is_a_field_of_requests() -> None:
    missing = set(SamplingParams.__struct_fields__) - set(SamplingFields.model_fields) - set(OTHERWISE)
    assert not missing, (
        f"{sorted(missing)} cannot be set over HTTP: add it to server/protocol/base.py, as "
        "docs/internals/adding_a_sampling_parameter.md says."
    )


def test_every_field_of_a_parameter_has_a_value_here() -> None:
    missing = set(SamplingParams.__struct_fields__) - set(OTHERWISE) - set(VALUES)
    assert not missing, f"Give each of {sorted(missing)} a value in VALUES that is not its default."


@pytest.mark.parametrize("name", VALUES)
def test_a_field_sets_its_parameter(name: str) -> None:
    request = SamplingFields.model_validate_json(json.dumps({name: VALUES[name]}))
    expected = SamplingParams(**{name: VALUES[name]})
    assert getattr(expected, name) != getattr(SamplingParams(), name)
    assert sampling_params(request, SamplingParams()) == expected


@pytest.mark.parametrize("name", sorted(VALUES.keys() - OPENAI))
def test_the_page_of_the_api_names_it(name: str) -> None:
    assert f"`{name}`" in (DOCS / "http_api.md").read_text(), f"docs/http_api.md does not name {name}."
