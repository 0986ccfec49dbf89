"""Request of `/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator, model_validator

from penstock.contract.param_checks import shown
from penstock.server.protocol.base import SamplingFields, field_error


def _prompts(value: Any) -> list[str | list[int]]:
    """Prompts of the field: text, token ids, or a list of these."""
    if isinstance(value, str):
        return [value]
    if value == []:
        return []
    if isinstance(value, list):
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) and all(type(id) is int for id in item) for item in value):
            return value
    allowed = "text, a list of token ids, or a list of texts or of such lists"
    raise field_error("prompt", f"prompt={shown(value)} is not valid. Allowed: {allowed}.")


def _embeddings(value: Any) -> list[str]:
    """Prompts of embeddings: base64 of one, or a list of such."""
    listed = [] if value is None else [value] if isinstance(value, str) else value
    if isinstance(listed, list) and all(isinstance(item, str) for item in listed):
        return listed
    raise field_error(
        "prompt_embeds",
        f"prompt_embeds={shown(value)} is not valid. Allowed: base64 of what torch.save writes, or a list of such.",
    )


class CompletionRequest(SamplingFields):
    """Request of a completion. prompt: one prompt or several, each of which gets n choices.

    prompt_embeds: prompts of embeddings, whose choices come before those of `prompt`; each is base64 of what
        `torch.save` writes of a tensor [tokens, hidden size]. An empty text beside them is no prompt.

    echo: the text begins with the prompt; with logprobs, those of the prompt's tokens come first. Then max_tokens may
        be 0. logprobs: number of most likely tokens per position.
    """

    prompt: Annotated[
        list[str | list[int]],
        PlainValidator(_prompts, json_schema_input_type=str | list[int] | list[str] | list[list[int]]),
    ] = Field(default_factory=list)
    prompt_embeds: Annotated[list[str], PlainValidator(_embeddings, json_schema_input_type=str | list[str] | None)] = (
        Field(default_factory=list)
    )
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True

    @property
    def texts(self) -> list[str | list[int]]:
        """Prompts of text and token ids."""
        return [] if self.prompt_embeds and self.prompt == [""] else self.prompt

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if not self.prompt and not self.prompt_embeds:
            raise field_error(
                "prompt", "prompt is missing, or an empty list. Give text or token ids, or prompt_embeds."
            )
        if self.prompt_embeds and self.echo:
            raise field_error("echo", "echo is not available with prompt_embeds, which have no text. Leave it out.")
        n = 1 if self.n is None else self.n
        if self.best_of not in (None, n):
            raise field_error("best_of", f"best_of={self.best_of} is not available. Allowed: n={n}, or leave it out.")
        if self.max_tokens == 0 and not self.echo:
            raise field_error("max_tokens", "max_tokens=0 is allowed only with echo=true. Allowed: at least 1.")
        return self
