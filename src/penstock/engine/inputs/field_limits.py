"""Checks of the sizes of a request's fields, before anything is done with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import msgspec

from penstock.config.request_limits import RequestLimits
from penstock.contract import SamplingParams
from penstock.errors import InvalidParameter, InvalidRequest


class FieldLimit(NamedTuple):
    """Limit of a field. option: of `RequestLimits`. measure: size of any value, 0 for one of another type."""

    option: str
    unit: str
    measure: Callable[[Any], int]


def _count(value: Any) -> int:
    return len(value) if isinstance(value, (list, tuple, dict, set, frozenset)) else 0


def _num_contents(value: Any) -> int:
    """Number of entries, but not of a prompt's token ids, which the context bounds."""
    return 0 if isinstance(value, list) and value and type(value[0]) is int else _count(value)


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    return sum(len(text) for text in value if isinstance(text, str)) if isinstance(value, (list, tuple)) else 0


def _json_bytes(value: Any) -> int:
    if value is None or isinstance(value, (bool, int, float)):
        return 0
    try:
        return len(msgspec.json.encode(value))
    except (UnicodeEncodeError, ValueError, TypeError, RecursionError):  # refused later, by name
        return len(value) if isinstance(value, str) else 0


_ITEMS = FieldLimit("max_request_items", "items", _num_contents)
_FIELD_COUNT = FieldLimit("max_request_items", "fields", len)
_STOPS = (
    FieldLimit("max_stop_strings", "texts", _count),
    FieldLimit("max_stop_characters", "characters", _characters),
)
_STOP_IDS = (FieldLimit("max_stop_token_ids", "token ids", _count),)
_NAME = (FieldLimit("max_name_characters", "characters", _characters),)
_OTHER = (FieldLimit("max_field_bytes", "bytes as JSON", _json_bytes),)
# Fields of sampling parameters.
_SAMPLING: dict[str, tuple[FieldLimit, ...]] = {
    "stop": _STOPS,
    "bad_words": (
        FieldLimit("max_bad_words", "texts", _count),
        FieldLimit("max_bad_word_characters", "characters", _characters),
    ),
    "bad_words_token_ids": (FieldLimit("max_bad_words", "lists", _count),),
    "stop_token_ids": _STOP_IDS,
    "all_stop_token_ids": _STOP_IDS,
    "allowed_token_ids": (FieldLimit("max_allowed_token_ids", "token ids", _count),),
    "logit_bias": (FieldLimit("max_logit_bias", "token ids", _count),),
    "extra_args": _OTHER,
}
_CHARACTERS_PER_TOKEN = 8
_LISTED = ("stop_token_ids", "all_stop_token_ids", "allowed_token_ids", "logit_bias")
# Contents, whose texts have limits of their own where they become prompts.
_CONTENTS = (
    "messages",
    "input",
    "inputs",
    "prompt",
    "prompt_embeds",
    "system",
    "instructions",
    "tools",
    "documents",
    "images",
    "query",
    "text_1",
    "text_2",
    "texts",
    "sentences",
)
_NAMES = (
    "model",
    "user",
    "cache_salt",
    "request_id",
    "previous_response_id",
    "prompt_name",
    "prompt_cache_key",
    "safety_identifier",
    "reasoning_effort",
    "task",
    "lora_name",
    "lora_path",
    "profile_prefix",
)
_FIELDS: dict[str, tuple[FieldLimit, ...]] = {
    **_SAMPLING,
    "stop_sequences": _STOPS,
    "tokens": (FieldLimit("max_prompt_characters", "token ids", _count),),
    **dict.fromkeys(_CONTENTS, (_ITEMS,)),
    **dict.fromkeys(_NAMES, _NAME),
}


def check_body(fields: Mapping[str, Any], limits: RequestLimits) -> None:
    """Check the fields at the top level of a request's body. Raises InvalidParameter."""
    _check("The body", fields, (_FIELD_COUNT,), limits)
    for name, value in fields.items():
        _check(name, value, _FIELDS.get(name, _OTHER), limits)


def check_sampling_fields(params: SamplingParams, limits: RequestLimits) -> None:
    """Check the sizes of sampling parameters. Raises InvalidParameter."""
    for name, of_field in _SAMPLING.items():
        if value := getattr(params, name):
            _check(name, value, of_field, limits)


def check_num_items(name: str, num_items: int, limits: RequestLimits) -> None:
    """Check the number of entries that a field has with those of a stored conversation. Raises InvalidParameter."""
    if num_items > limits.max_request_items:
        allowed = _allowed("max_request_items", num_items, limits.max_request_items)
        raise InvalidParameter(f"{name} has {num_items:,} items with those of the conversation before. {allowed}")


def check_name(name: str, value: Any, limits: RequestLimits) -> None:
    """Check the length of a name, such as a cache salt. Raises InvalidParameter."""
    _check(name, value, _NAME, limits)


def check_text(text: str, limits: RequestLimits, *, where: str = "The prompt") -> None:
    """Check the length of a text that is to be tokenised. Raises InvalidRequest."""
    most = limits.max_prompt_characters
    if most is not None and len(text) > most:
        raise InvalidRequest(
            f"{where} has {len(text):,} characters. {_allowed('max_prompt_characters', len(text), most)}"
        )


def check_choices(prompts: Sequence[Any], n: int, limits: RequestLimits) -> None:
    """Check the number of outputs of a request's prompts together, and about their tokens. Raises InvalidParameter."""
    num_prompts = len(prompts)
    num_choices, most = num_prompts * n, limits.max_request_choices
    if num_choices > most:
        given = f"n={n:,}" if num_prompts == 1 else f"prompt has {num_prompts:,} prompts, with n={n:,} each, which"
        raise InvalidParameter(
            f"{given} makes {num_choices:,} choices. {_allowed('max_request_choices', num_choices, most)}"
        )
    size, most = sum(map(_least_tokens, prompts)) * n, limits.max_choice_tokens
    if num_prompts > 1 and n > 1 and size > most:
        raise InvalidParameter(
            f"n={n:,} with the tokens of {num_prompts:,} prompts makes {size:,} tokens or more. "
            f"{_allowed('max_choice_tokens', size, most)}"
        )


def check_pairs(pairs: Sequence[tuple[str, str]], limits: RequestLimits) -> None:
    """Check about the tokens of all pairs: a query costs as often as it has documents. Raises InvalidRequest."""
    size = sum(len(first) + len(second) for first, second in pairs) // _CHARACTERS_PER_TOKEN
    if size > limits.max_choice_tokens:
        raise InvalidRequest(
            f"The request has {len(pairs):,} pairs of texts with {size:,} tokens or more. "
            f"{_allowed('max_choice_tokens', size, limits.max_choice_tokens)}"
        )


def _least_tokens(prompt: Any) -> int:
    """Number of a prompt's tokens, or what a text of so many characters has about at least."""
    given = prompt.get("prompt_token_ids") or prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    size = len(given) if isinstance(given, Sized) else 0
    return size // _CHARACTERS_PER_TOKEN if isinstance(given, str) else size


def check_products(params: SamplingParams, num_prompt_tokens: int, limits: RequestLimits, max_logprobs: int) -> None:
    """Check what grows with a prompt and a parameter together. Raises InvalidParameter."""
    num_listed = sum(len(getattr(params, name) or ()) for name in _LISTED) + sum(map(len, params.bad_words_token_ids))
    size, most = (num_prompt_tokens + num_listed) * params.n, limits.max_choice_tokens
    if params.n > 1 and size > most:
        listed = f" and {num_listed:,} listed token ids" if num_listed else ""
        raise InvalidParameter(
            f"n={params.n:,} with a prompt of {num_prompt_tokens:,} tokens{listed} makes {size:,} tokens. "
            f"{_allowed('max_choice_tokens', size, most)}"
        )
    size, most = num_prompt_tokens * (params.prompt_logprobs or 0), limits.max_prompt_logprobs
    if max_logprobs > 0 and size > most:
        raise InvalidParameter(
            f"prompt_logprobs={params.prompt_logprobs} with a prompt of {num_prompt_tokens:,} tokens makes {size:,} "
            f"log-probabilities. {_allowed('max_prompt_logprobs', size, most)}"
        )


def _check(name: str, value: Any, of_field: tuple[FieldLimit, ...], limits: RequestLimits) -> None:
    for option, unit, measure in of_field:
        size, most = measure(value), getattr(limits, option)
        if most is not None and size > most:
            raise InvalidParameter(f"{name} has {size:,} {unit}. {_allowed(option, size, most)}")


def _allowed(option: str, size: int, most: int) -> str:
    return f"Allowed: at most {most:,} ({option}). Make it smaller, or start the engine with {option}={size}."
