"""Limits of the fields of requests."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

from penstock.config.checks import check_integer

# Default of max_prompt_characters: so many per token of the context, and at least so many.
_CHARACTERS_PER_TOKEN = 8
_FEWEST_CHARACTERS = 1 << 20


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of the fields of a request, which is refused by name before any work for a larger one.

    max_request_values: texts, lists and objects in the body of an HTTP request, at all levels.
    max_request_numbers: entries of lists and objects in the body of an HTTP request, numbers such as token ids, too.
    max_request_items: entries of each list of contents: messages, items, prompts, texts, documents, tools.
    max_request_choices: outputs of an HTTP request: its prompts times n.
    max_choice_tokens: tokens of a prompt, and token ids in its parameters, times n, beyond one output; tokens of all
        pairs of a query and its documents.
    max_prompt_characters: characters of a prompt with its template, or of a text to pool or tokenise, and token ids of
        a text to detokenise; None takes 8 per token of max_model_len, and at least 1,048,576.
    max_stop_strings: number of stop strings. max_stop_characters: characters of all of them together.
    max_bad_words: number of bad words. max_bad_word_characters: characters of all of them together.
    max_stop_token_ids: number of stop tokens.
    max_allowed_token_ids: number of allowed tokens.
    max_logit_bias: number of tokens with a bias.
    max_prompt_logprobs: log-probabilities of a prompt: its tokens times prompt_logprobs; max_logprobs=-1 lifts it.
    max_name_characters: characters of a name, such as model, user, cache_salt or lora_path.
    max_field_bytes: size of any other field as JSON, such as chat_template_kwargs, response_format or metadata.
    """

    max_request_values: int = 1 << 17
    max_request_numbers: int = 1 << 21
    max_request_items: int = 16_384
    max_request_choices: int = 2048
    max_choice_tokens: int = 1 << 22
    max_prompt_characters: int | None = None
    max_stop_strings: int = 64
    max_stop_characters: int = 16_384
    max_bad_words: int = 1024
    max_bad_word_characters: int = 65_536
    max_stop_token_ids: int = 1024
    max_allowed_token_ids: int = 1 << 18
    max_logit_bias: int = 16_384
    max_prompt_logprobs: int = 1 << 20
    max_name_characters: int = 4096
    max_field_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                check_integer(field.name, value, 1)

    def resolved(self, max_model_len: int) -> Self:
        """The limits with the default of max_prompt_characters."""
        if self.max_prompt_characters is not None:
            return self
        longest = max(_FEWEST_CHARACTERS, _CHARACTERS_PER_TOKEN * max_model_len)
        return dataclasses.replace(self, max_prompt_characters=longest)
