"""How one request wants its tokens chosen."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from penstock.errors import InvalidParameter

MAX_SEED = 2**63 - 1
SMALLEST_TEMPERATURE = 0.01


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of one request, with the names and defaults that users of vLLM know.

    temperature: 0 is greedy; values in (0, 0.01) are raised to 0.01, since dividing by less overflows.
    top_k: number of most likely tokens kept; 0 or -1 keeps all.
    top_p: smallest set of most likely tokens whose probability reaches top_p, in (0, 1].
    min_p: tokens less likely than min_p times the most likely one are dropped, in [0, 1].
    seed: key of this request's random stream; None lets the engine draw one when it accepts the request.
    max_tokens: number of tokens to generate at most; None means up to the context's end.
    ignore_eos: go on after the end-of-sequence token.
    stop_token_ids: tokens that end generation, besides the model's own.
    logprobs: number of most likely tokens whose log-probabilities are returned, besides the sampled one's;
        None returns none.

    Raises InvalidParameter when a value is outside its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, 1e4, "0 (greedy) to 10000")
        _check_number("top_p", self.top_p, 0.0, 1.0, "more than 0, at most 1", above=True)
        _check_integer("top_k", self.top_k, -1, None, "-1 or 0 (all tokens), or a positive integer")
        _check_number("min_p", self.min_p, 0.0, 1.0, "0 to 1")
        if self.seed is not None:
            _check_integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED, "a 64-bit integer, or None")
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1, None, "at least 1, or None")
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, None, "0 or more, or None")
        if not isinstance(self.ignore_eos, bool):
            raise _invalid("ignore_eos", self.ignore_eos, "True or False")
        stop_token_ids: Any = self.stop_token_ids
        if not isinstance(stop_token_ids, (tuple, list)):
            raise _invalid("stop_token_ids", stop_token_ids, "a list of token ids")
        for token_id in stop_token_ids:
            _check_integer("stop_token_ids", token_id, 0, None, "token ids, each 0 or more")
        msgspec.structs.force_setattr(self, "stop_token_ids", tuple(stop_token_ids))
        if 0.0 < self.temperature < SMALLEST_TEMPERATURE:
            msgspec.structs.force_setattr(self, "temperature", SMALLEST_TEMPERATURE)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _check_number(name: str, value: Any, low: float, high: float, allowed: str, *, above: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value > high or value < low or (above and value == low):
        raise _invalid(name, value, allowed)


def _check_integer(name: str, value: Any, low: int, high: int | None, allowed: str) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < low or (high is not None and value > high):
        raise _invalid(name, value, allowed)


def _invalid(name: str, value: Any, allowed: str) -> InvalidParameter:
    return InvalidParameter(f"{name}={value!r} is not valid. Allowed: {allowed}.")
