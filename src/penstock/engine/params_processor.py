"""Checks a request's sampling parameters against this engine, and fills in what only the front end knows.

A worker knows token ids and no text, so words become sequences of tokens here, before the request is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.config import SamplingConfig, StructuredOutputsConfig
from penstock.config.reasoning import reasoning_markers
from penstock.contract import SamplingParams, StructuredOutputsParams
from penstock.contract.param_checks import shown
from penstock.contract.sampling_params import ALL_LOGPROBS, THINKING_BUDGET
from penstock.engine.logits_processor_checks import LogitsProcessorChecks
from penstock.engine.tokenizer import Tokenizer
from penstock.errors import InvalidParameter

if TYPE_CHECKING:
    from penstock.structured.reasoning import ReasoningTokens


def check_is_params(params: Any) -> None:
    """Raise InvalidParameter for anything but sampling parameters."""
    if not isinstance(params, SamplingParams):
        raise InvalidParameter(
            f"sampling_params is a {type(params).__name__}: {shown(params)}. Allowed: SamplingParams, or None."
        )


class ParamsProcessor:
    """vocab_size: of the model; all token ids of a request must be below it."""

    def __init__(
        self,
        config: SamplingConfig,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        structured: StructuredOutputsConfig | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._structured = structured or StructuredOutputsConfig()
        self._markers = reasoning_markers(
            self._structured.reasoning_parser, config.reasoning_start_str, config.reasoning_end_str
        )
        self._last_checked: StructuredOutputsParams | None = None
        self._logits_processors = LogitsProcessorChecks(config.logits_processors)

    def process(self, params: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> SamplingParams:
        """The parameters as the worker needs them; the seed is not set here. prompt_token_ids: that they are for.

        Raises InvalidParameter.
        """
        check_is_params(params)
        for name in ("logprobs", "prompt_logprobs"):
            self._check_num_logprobs(name, getattr(params, name))
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "all_stop_token_ids"):
            self._check_ids(name, getattr(params, name) or ())
        for sequence in params.bad_words_token_ids:
            self._check_ids("bad_words_token_ids", sequence)
        if params.structured_outputs is not None:
            self._check_structured(params.structured_outputs)
        changes: dict[str, Any] = {}
        if params.bad_words:
            changes["bad_words_token_ids"] = self._spell(params)
        if params.min_tokens:
            stops = {*params.all_stop_token_ids, *params.stop_token_ids, *self._eos_token_ids}
            changes["all_stop_token_ids"] = tuple(sorted(stops))
        if params.thinking_token_budget is not None:
            budget = self._thinking_budget(params, prompt_token_ids)
            changes["extra_args"] = {**(params.extra_args or {}), THINKING_BUDGET: budget}
        # Its caller may set fields of the original meanwhile.
        params = msgspec.structs.replace(params, **changes)
        self._logits_processors.check(params)
        return params

    def _check_structured(self, constraint: StructuredOutputsParams) -> None:
        """What is wrong with it that does not take compiling it to know; equal ones are looked at once."""
        if not self._eos_token_ids:
            raise InvalidParameter("structured_outputs cannot be kept: this model has no token that ends a text.")
        if not self._tokenizer.is_fast:
            raise InvalidParameter("structured_outputs cannot be kept: this model's tokenizer has no fast version.")
        if self._structured.reasoning_parser is not None and not self._structured.enable_in_reasoning:
            self._reasoning_tokens("structured_outputs")
        if constraint == self._last_checked:
            return
        # Only who constrains outputs pays for the import.
        from penstock.structured.constraint_check import check_constraint

        check_constraint(constraint, self._structured.max_grammar_bytes)
        self._last_checked = constraint

    def _check_num_logprobs(self, name: str, asked: int | None) -> None:
        most = self._config.max_logprobs
        if asked is None or most == ALL_LOGPROBS:
            return
        if asked == ALL_LOGPROBS and most < self._vocab_size:
            raise InvalidParameter(
                f"{name}=-1 asks for all {self._vocab_size:,} tokens of the vocabulary. Allowed: at most {most}. Start "
                "the engine with max_logprobs=-1 for more."
            )
        if asked > most:
            raise InvalidParameter(
                f"{name}={shown(asked)} is not valid. Allowed: at most {most}. Start the engine with "
                f"max_logprobs={shown(asked)} for more."
            )

    def _check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if token_id >= self._vocab_size:
                raise InvalidParameter(
                    f"{name} has {shown(token_id)}, but the model's vocabulary has {self._vocab_size} tokens. "
                    f"Allowed: 0 to {self._vocab_size - 1}."
                )

    def _thinking_budget(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> dict[str, Any]:
        """Argument of the logits processor of that name."""
        start, end, *implied = self._reasoning_tokens(f"thinking_token_budget={params.thinking_token_budget}")
        argument: dict[str, Any] = {"budget": params.thinking_token_budget}
        argument |= {"start_token_ids": start, "end_token_ids": end}
        if implied:
            argument["implied_end_token_ids"] = implied
        if self._markers.starts_in_reasoning and self._stages.reasons_after(prompt_token_ids):
            argument["starts_in_thinking"] = True
        return argument

    def _reasoning_tokens(self, needed_for: str) -> list[list[int]]:
        """The markers of reasoning, as tokens: what begins it, what ends it, and what else does."""
        markers, encoded = self._markers, []
        for name, text in (("reasoning_start_str", markers.start), ("reasoning_end_str", markers.end)):
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
            if not token_ids:
                raise InvalidParameter(
                    f"{needed_for} cannot be kept: {name}={text!r} has no tokens. Start the engine with another {name}."
                )
            self._check_ids(name, token_ids)
            encoded.append(token_ids)
        implied = (self._tokenizer.encode(text, add_special_tokens=False) for text in markers.implied_ends)
        return [*encoded, *(token_ids for token_ids in implied if token_ids)]

    @functools.cached_property
    def _stages(self) -> ReasoningTokens:
        # Only engines of models that reason pay for the import.
        from penstock.engine.structured_grammar import reasoning_tokens

        return reasoning_tokens(self._tokenizer, self._markers)

    def _spell(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The bad words as tokens: as a word that begins a text, and as one after a space."""
        sequences = dict.fromkeys(tuple(sequence) for sequence in params.bad_words_token_ids)
        for word in params.bad_words:
            bare = word.lstrip()
            for text in (bare, f" {bare}"):
                token_ids = tuple(self._tokenizer.encode(text, add_special_tokens=False)) if bare else ()
                if not token_ids:
                    raise InvalidParameter(f"bad_words has {word!r}, which has no tokens. Leave it out.")
                self._check_ids("bad_words", token_ids)
                sequences[token_ids] = None
        return tuple(sequences)
