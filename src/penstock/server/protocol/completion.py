"""Request of `/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator, model_validator

from penstock.contract.param_checks import shown
from penstock.server.protocol.base import SamplingFields, field_error


def _prompts(value: Any) -> list[str | list[int]]:
    """Prompts of the field: text, token ids, or a list of these."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) and all(type(id) is int for id in item) for item in value):
            return value
    given = "prompt is an empty list" if value == [] else f"prompt={shown(value)} is not valid"
    raise field_error("prompt", f"{given}. Allowed: text, a list of token ids, or a list of texts or of such lists.")


class CompletionRequest(SamplingFields):
    """Request of a completion. prompt: one prompt or several, each of which gets n choices.

    echo: the text begins with the prompt; with logprobs, those of the prompt's tokens come first. Then max_tokens may
        be 0. logprobs: number of most likely tokens per position.
    """

    prompt: Annotated[
        list[str | list[int]],
        PlainValidator(_prompts, json_schema_input_type=str | list[int] | list[str] | list[list[int]]),
    ]
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        n = 1 if self.n is None else self.n
        if self.best_of not in (None, n):
            raise field_error("best_of", f"best_of={self.best_of} is not available. Allowed: n={n}, or leave it out.")
        if self.max_tokens == 0 and not self.echo:
            raise field_error("max_tokens", "max_tokens=0 is allowed only with echo=true. Allowed: at least 1.")
        return self
