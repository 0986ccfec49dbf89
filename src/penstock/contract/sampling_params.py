"""Sampling parameters of a request."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from enum import Enum
from typing import Any, Self

from penstock.contract import param_checks as check
from penstock.contract.named_parameters import Parameters
from penstock.contract.structured_outputs import StructuredOutputsParams, structured_outputs_from

MAX_SEED = 2**63 - 1
MAX_N = 16_384
SMALLEST_TEMPERATURE = 0.01
LARGEST_BIAS = 100.0
LARGEST_BUDGET = 2**31 - 1
ALL_LOGPROBS = -1
# Key in `extra_args` of the front end's form of thinking_token_budget.
THINKING_BUDGET = "thinking_budget"


class RequestOutputKind(Enum):
    """Content of a stream's outputs: everything so far, only new tokens, or a final output only."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(Parameters, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of one request, with the names and defaults that users of vLLM know.

    A field can be set later, with the same checks; running requests are not affected.

    Which tokens:
    n: number of outputs for the prompt.
    presence_penalty: subtracted from the logits of tokens that the output has, -2 to 2.
    frequency_penalty: subtracted as often as the output has the token, -2 to 2.
    repetition_penalty: divides positive logits (and multiplies negative ones) of tokens of the prompt or output;
        1 changes nothing.
    temperature: 0 is greedy; values in (0, 0.01) are raised to 0.01, since dividing by less overflows.
    top_p: smallest set of most likely tokens whose probability reaches top_p; 0 is greedy, 1 keeps all.
    top_k: number of most likely tokens kept; 0 or -1 keeps all.
    min_p: tokens less likely than min_p times the most likely one are dropped, in [0, 1].
    seed: key of this request's random stream; None lets the engine draw one when it accepts the request.
    logit_bias: added to the logits of these tokens, -100 to 100.
    allowed_token_ids: only these tokens are generated; None allows all.
    bad_words: texts that are not generated.
    structured_outputs: the form that the output must have, such as a JSON schema; a dictionary of its fields will do.
    thinking_token_budget: tokens after the begin of thinking at which its end is forced; None or -1 for no limit.
    num_speculative_tokens: maximum draft tokens of this request per step, with speculative decoding; 0 for none, None
        for the engine's setting.
    extra_args: arguments of custom logits processors by name; plain data.

    When it ends:
    stop: texts that end generation. include_stop_str_in_output: whether the output keeps the one that ended it.
    stop_token_ids: tokens that end generation, besides the model's own.
    ignore_eos: go on after the end-of-sequence token.
    max_tokens: number of tokens to generate at most; None means up to the context's end.
    min_tokens: number of tokens before which no end token, nor one of stop_token_ids, is generated.

    What is returned:
    logprobs: number of most likely tokens whose log-probabilities are returned, besides the sampled one's;
        -1 returns those of all tokens, None none.
    prompt_logprobs: as logprobs, for the tokens of the prompt.
    detokenize: whether the output has text. skip_special_tokens: whether the text leaves out special tokens.
    spaces_between_special_tokens: whether the text has spaces between special tokens.
    truncate_prompt_tokens: keep only so many of the prompt's last tokens; -1 keeps as many as fit.
    output_kind: content of a stream's outputs (see `RequestOutputKind`).

    Filled in by the engine when it accepts the request, besides the seed, unless given:
    bad_words_token_ids: token sequences of the bad words.
    all_stop_token_ids: tokens that min_tokens suppresses: the model's end tokens and stop_token_ids.

    Raises InvalidParameter for a value outside its range or an unknown name, UnsupportedParameter for a parameter of
    vLLM that Penstock does not have.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None
    num_speculative_tokens: int | None = None
    extra_args: dict[str, Any] | None = None
    stop: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    all_stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        self._check_choice_of_tokens()
        self._check_ending()
        self._check_returned()
        self._check_together()

    @classmethod
    def from_optional(cls, **fields: Any) -> Self:
        """Create parameters with the default for each None, except for max_tokens.

        Raises InvalidParameter as `from_dict`.
        """
        defaults = dict(zip(cls.__struct_fields__, cls.__struct_defaults__, strict=True))
        is_default = {name: value is None and name != "max_tokens" for name, value in fields.items()}
        return cls.from_dict({name: defaults.get(name) if is_default[name] else fields[name] for name in fields})

    def with_fields(self, **changes: Any) -> Self:
        """Return a copy with fields of the engine's own, which are not checked again; it shares the other values."""
        copied = copy.copy(self)
        for name, value in changes.items():
            copied._set(name, value)
        return copied

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_p == 0.0

    def _check_choice_of_tokens(self) -> None:
        check.check_integer("n", self.n, 1, MAX_N, f"1 to {MAX_N}")
        for name in ("presence_penalty", "frequency_penalty"):
            check.check_number(name, getattr(self, name), -2.0, 2.0, "-2 to 2 (0 changes nothing)")
        penalty = "more than 0 (1 changes nothing)"
        check.check_number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, penalty, above=True)
        check.check_number("temperature", self.temperature, 0.0, 1e4, "0 (greedy) to 10000")
        check.check_number("top_p", self.top_p, 0.0, 1.0, "0 (greedy) to 1")
        check.check_integer("top_k", self.top_k, -1, None, "-1 or 0 (all tokens), or a positive integer")
        check.check_number("min_p", self.min_p, 0.0, 1.0, "0 to 1")
        if self.seed is not None:
            check.check_integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED, "a 64-bit integer, or None")
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", check.token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise check.invalid("allowed_token_ids", self.allowed_token_ids, "at least one token id, or None")
        if self.thinking_token_budget is not None:
            allowed = f"0 to {LARGEST_BUDGET}, or None"
            check.check_integer("thinking_token_budget", self.thinking_token_budget, -1, LARGEST_BUDGET, allowed)
        if self.num_speculative_tokens is not None:
            check.check_integer("num_speculative_tokens", self.num_speculative_tokens, 0, None, "0 or more, or None")
        self._set("logit_bias", check.biases("logit_bias", self.logit_bias, LARGEST_BIAS))
        self._set("bad_words", check.texts("bad_words", self.bad_words))
        self._set("bad_words_token_ids", check.token_sequences("bad_words_token_ids", self.bad_words_token_ids))
        self._set("structured_outputs", structured_outputs_from(self.structured_outputs))
        self._set("extra_args", check.plain_data("extra_args", self.extra_args))
        if self.thinking_token_budget == -1:
            self._set("thinking_token_budget", None)
        if 0.0 < self.temperature < SMALLEST_TEMPERATURE:
            self._set("temperature", SMALLEST_TEMPERATURE)

    def _check_ending(self) -> None:
        if self.max_tokens is not None:
            check.check_integer("max_tokens", self.max_tokens, 1, None, "at least 1, or None")
        check.check_integer("min_tokens", self.min_tokens, 0, None, "0 or more")
        check.check_flag("ignore_eos", self.ignore_eos)
        check.check_flag("include_stop_str_in_output", self.include_stop_str_in_output)
        self._set("stop", check.texts("stop", self.stop))
        self._set("stop_token_ids", check.token_ids("stop_token_ids", self.stop_token_ids))
        self._set("all_stop_token_ids", check.token_ids("all_stop_token_ids", self.all_stop_token_ids))

    def _check_returned(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                check.check_integer(name, value, ALL_LOGPROBS, None, "0 or more, -1 (all tokens), or None")
        for name in ("detokenize", "skip_special_tokens", "spaces_between_special_tokens"):
            check.check_flag(name, getattr(self, name))
        check.check_member("output_kind", self.output_kind, RequestOutputKind)
        check.check_num_kept(self.truncate_prompt_tokens)

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise check.invalid("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        if self.n > 1 and self.is_greedy:
            raise check.invalid(
                "n", self.n, "1 with temperature=0 or top_p=0, which would give the same output n times"
            )
        if self.stop and not self.detokenize:
            raise check.invalid("stop", self.stop, "none with detokenize=False, since stop texts are found in the text")
