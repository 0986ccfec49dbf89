"""Sampling parameters that nothing acts on yet: they are refused by name, not ignored."""

from __future__ import annotations

import msgspec

from penstock.contract import SamplingParams
from penstock.errors import InvalidParameter

NOT_SUPPORTED_YET = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "bad_words_token_ids",
    "thinking_token_budget",
    "extra_args",
    "min_tokens",
    "prompt_logprobs",
)
_DEFAULTS = msgspec.structs.asdict(SamplingParams())


def refuse_unsupported(params: SamplingParams) -> None:
    """Raise InvalidParameter for a parameter that is set and not supported yet."""
    for name in NOT_SUPPORTED_YET:
        value = getattr(params, name)
        if value != _DEFAULTS[name]:
            raise InvalidParameter(f"{name}={value!r} is not supported yet. Leave it at {_DEFAULTS[name]!r}.")
