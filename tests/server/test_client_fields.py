"""Fields of OpenAI's client: each is a field of our requests, accepted without an effect, or refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.protocol.completion import CompletionRequest
from penstock.server.protocol.other_fields import OTHER_FIELDS


@pytest.mark.parametrize(
    ("client", "ours"),
    [
        (completion_create_params.CompletionCreateParamsStreaming, CompletionRequest),
        (chat_create_params.CompletionCreateParamsStreaming, ChatCompletionRequest),
    ],
)
def test_every_parameter_of_the_client_is_known(client: Any, ours: Any) -> None:
    params = client.__required_keys__ | client.__optional_keys__
    assert {"model", "temperature", "stream"} <= params
    assert params <= ours.model_fields.keys() | OTHER_FIELDS.keys()
