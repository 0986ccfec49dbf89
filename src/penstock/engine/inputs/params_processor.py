"""Processing of sampling parameters: checks them against this engine, and tokenises their texts.

Workers know token ids and no text, so bad words and markers become token sequences here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.config import SamplingConfig, StructuredOutputsConfig
from penstock.config.reasoning import reasoning_markers
from penstock.config.sampling import LOGITS_PROCESSORS_GROUP
from penstock.contract import SamplingParams, StructuredOutputsParams
from penstock.contract.param_checks import shown
from penstock.contract.sampling_params import ALL_LOGPROBS, THINKING_BUDGET
from penstock.errors import InvalidParameter
from penstock.text.tokenizer import TextToEncode, Tokenizer

if TYPE_CHECKING:
    from penstock.runner.sampling import LogitsProcessor
    from penstock.structured.reasoning import ReasoningTokens


def check_is_params(params: Any) -> None:
    """Raise InvalidParameter for anything but sampling parameters."""
    if not isinstance(params, SamplingParams):
        raise InvalidParameter(
            f"sampling_params is a {type(params).__name__}: {shown(params)}. Allowed: SamplingParams, or None."
        )


class ParamsProcessor:
    """Processor of sampling parameters. vocab_size: of the model; all token ids of a request must be below it."""

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
        """Return the parameters as the worker needs them, without a seed. Raises InvalidParameter."""
        check_is_params(params)
        for name in ("logprobs", "prompt_logprobs"):
            self._check_num_logprobs(name, getattr(params, name))
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "all_stop_token_ids"):
            self._check_ids(name, getattr(params, name) or ())
        for sequence in params.bad_words_token_ids:
            self._check_ids("bad_words_token_ids", sequence)
        # The caller may change its own dictionaries meanwhile.
        given = {name: getattr(params, name) for name in ("logit_bias", "extra_args")}
        changes: dict[str, Any] = {name: dict(value) for name, value in given.items() if value is not None}
        if params.structured_outputs is not None:
            changes["structured_outputs"] = constraint = self._with_defaults(params.structured_outputs)
            self._check_structured(constraint)
        if params.bad_words:
            changes["bad_words_token_ids"] = self._spell(params)
        if params.min_tokens:
            stops = {*params.all_stop_token_ids, *params.stop_token_ids, *self._eos_token_ids}
            changes["all_stop_token_ids"] = tuple(sorted(stops))
        if params.thinking_token_budget is not None:
            budget = self._thinking_budget(params, prompt_token_ids)
            changes["extra_args"] = {**(params.extra_args or {}), THINKING_BUDGET: budget}
        # A copy, since the caller may change fields of the original meanwhile.
        params = params.with_fields(**changes)
        self._logits_processors.check(params)
        return params

    def _with_defaults(self, constraint: StructuredOutputsParams) -> StructuredOutputsParams:
        """The constraint with the engine's `structured_outputs_unenforced`, unless it says that itself."""
        if constraint.unenforced is not None or constraint.json is None:
            return constraint
        return msgspec.structs.replace(constraint, unenforced=self._structured.structured_outputs_unenforced)

    def _check_structured(self, constraint: StructuredOutputsParams) -> None:
        """Check a constraint without compiling it; a repeated one is checked once."""
        if not self._eos_token_ids:
            raise InvalidParameter("structured_outputs cannot be kept: this model has no token that ends a text.")
        if not self._tokenizer.is_fast:
            raise InvalidParameter("structured_outputs cannot be kept: this model's tokenizer has no fast version.")
        if self._structured.reasoning_parser is not None and not self._structured.enable_in_reasoning:
            self._reasoning_tokens("structured_outputs")
        if constraint == self._last_checked:
            return
        # Imported on first use.
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
        """Argument of the thinking-budget logits processor."""
        start, end, *implied = self._reasoning_tokens(f"thinking_token_budget={params.thinking_token_budget}")
        argument: dict[str, Any] = {"budget": params.thinking_token_budget}
        argument |= {"start_token_ids": start, "end_token_ids": end}
        if implied:
            argument["implied_end_token_ids"] = implied
        if self._markers.starts_in_reasoning and self._reasoning.reasons_after(prompt_token_ids):
            argument["starts_in_thinking"] = True
        return argument

    def _reasoning_tokens(self, needed_for: str) -> list[list[int]]:
        """Token sequences of the reasoning markers: start, end, and implied ends."""
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
    def _reasoning(self) -> ReasoningTokens:
        # Imported on first use.
        from penstock.structured.reasoning import reasoning_tokens

        return reasoning_tokens(self._tokenizer, self._markers)

    def _spell(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Tokenise the bad words, both at the beginning of a text and after a space."""
        sequences = dict.fromkeys(tuple(sequence) for sequence in params.bad_words_token_ids)
        spelled = [text for word in params.bad_words for text in (word.lstrip(), f" {word.lstrip()}")]
        encoded = self._tokenizer.encode_texts([TextToEncode(text, add_special_tokens=False) for text in spelled])
        for number, (token_ids, _) in enumerate(encoded):
            word = params.bad_words[number // 2]
            if not word.lstrip() or not token_ids:
                raise InvalidParameter(f"bad_words has {shown(word)}, which has no tokens. Leave it out.")
            self._check_ids("bad_words", token_ids)
            sequences[tuple(token_ids)] = None
        return tuple(sequences)


class LogitsProcessorChecks:
    """Validation of requests by custom logits processors, whose classes are loaded on first use.

    configured: the engine's option logits_processors.
    """

    def __init__(self, configured: tuple[str | type, ...]) -> None:
        self._configured = configured
        self._are_any = bool(configured) or bool(entry_points(group=LOGITS_PROCESSORS_GROUP))

    def check(self, params: SamplingParams) -> None:
        """Raise InvalidParameter for `extra_args` of an unknown processor, or if a processor refuses the request."""
        if not self._are_any and params.extra_args is None:
            return
        names = [processor.name for processor in self._classes]
        for name, value in (params.extra_args or {}).items():
            if name not in names:
                raise InvalidParameter(
                    f"extra_args has {shown(name)} (given: {shown(value)}), but there is no logits processor of "
                    f"that name. Allowed: {', '.join(names)}. Others are loaded with the option logits_processors."
                )
        for processor in self._classes:
            try:
                processor.validate(params)
            except ValueError as error:
                raise InvalidParameter(f"Logits processor {processor.name!r} refuses the request: {error}") from error

    @functools.cached_property
    def _classes(self) -> list[type[LogitsProcessor]]:
        # Not imported unless there are processors: it needs torch.
        from penstock.runner.sampling.load_processors import load_logits_processors

        return load_logits_processors(self._configured)
