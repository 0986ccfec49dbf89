"""Constraints through llguidance: an Earley parser over lexemes, whose masks are made token by token on the host."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from penstock.contract.structured_outputs import CONSTRAINTS_BY_SCHEMA, StructuredOutputsParams
from penstock.errors import InvalidParameter
from penstock.structured.backend import MatcherError
from penstock.structured.constraint_check import schema_of, tagged_parts, translated, whitespace_of
from penstock.structured.ending import EndingMatcher, end_mask
from penstock.structured.grammar_text import as_lark
from penstock.structured.schema_narrowing import narrowed

# Escapes of characters by number are left out: they would be second spellings of a property's name.
_ALLOWED_ESCAPES = 'nrbtf\\"'
# Tokens that masks take in at once where all of them may come, as in names, words and addresses.
_LETTERS_AND_DIGITS = "[a-zA-Z0-9]+"
# The same for strings with a bound, which tokens longer than the library's own slices would be tried in one by one.
_UP_TO_100 = r'[^"\\\x00-\x1F\x7F]{1,100}'
Rewrite: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
_LIMITS = LLParserLimits(verbose_errors=False)
_ERRORS = {
    "panic": "it is too large, or has something that llguidance cannot cope with",
    "NoExtension": "it leaves nothing that could come next",
    "oneOf constraints are not supported": (
        "oneOf: its branches are not known to exclude each other. Let each require a property whose value tells them "
        "apart, or use anyOf"
    ),
}


class LLGuidanceBackend:
    """tokenizer_json: of the `tokenizers` library. eos_token_ids: each ends an output."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._tokenizer = LLTokenizer(
            tokenizer_json,
            n_vocab=vocab_size,
            eos_token=sorted(self._eos_token_ids),
            slices=[
                _LETTERS_AND_DIGITS,
                *LLTokenizer.general_slices()[:-1],
                _UP_TO_100,
                LLTokenizer.general_slices()[-1],
            ],
        )
        self._end_words = end_mask(vocab_size, self._eos_token_ids)

    def compile(self, params: StructuredOutputsParams) -> LLGuidanceGrammar:
        name = params.constraint
        whole = self._source(params, _as_it_is)
        matcher = None
        if params.disable_additional_properties and name in CONSTRAINTS_BY_SCHEMA:
            narrow = self._matcher(self._source(params, narrowed))
            matcher = None if narrow.is_error() else narrow
        # That branches of a oneOf exclude each other is known of the schema itself only.
        if matcher is None or '"oneOf"' in whole:
            checked = self._matcher(whole)
            if checked.is_error():
                raise InvalidParameter(f"structured_outputs.{name} cannot be enforced: {_said(checked)}.")
            matcher = matcher or checked
        return LLGuidanceGrammar(matcher, self._eos_token_ids, self._end_words)

    def _matcher(self, source: str) -> LLMatcher:
        """A matcher at the begin of an output; in an error state where a grammar leaves nothing to begin with."""
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            return matcher
        # The first mask is the dearest, and the first to show that there is nothing to begin with.
        first = matcher.deep_copy()
        _fill(first, np.zeros_like(self._end_words))
        return first if first.is_error() else matcher

    def _source(self, params: StructuredOutputsParams, rewrite: Rewrite) -> str:
        """The constraint as llguidance writes it. rewrite: what becomes of its schemas."""
        if params.regex is not None:
            return LLMatcher.grammar_from_regex(translated("regex", params.regex))
        if params.choice is not None:
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, params.choice)))
        if params.grammar is not None:
            return LLMatcher.grammar_from_lark(as_lark(params.grammar, self._json_options(params)))
        if params.structural_tag is not None:
            return self._tag_source(params, rewrite)
        schema = rewrite(schema_of(params))
        return LLMatcher.grammar_from_json_schema(schema, overrides=self._json_options(params))

    def _json_options(self, params: StructuredOutputsParams) -> Any:
        options: dict[str, Any] = {"json_allowed_escapes": _ALLOWED_ESCAPES}
        pattern = whitespace_of(params)
        return {**options, "whitespace_pattern": pattern} if pattern else {**options, "whitespace_flexible": False}

    def _tag_source(self, params: StructuredOutputsParams, rewrite: Rewrite) -> str:
        """Any text, in which what begins with a trigger goes on as its parts do."""
        rules = ["start: (" + " | ".join(f"tag_{index}" for index, _ in enumerate(tagged_parts(params))) + ")* TEXT"]
        rules.append(r"TEXT: /(.|\n)*/")
        options = self._json_options(params)
        for index, part in enumerate(tagged_parts(params)):
            schema = json.dumps({"x-guidance": options, **rewrite(part.schema)})
            rest = part.begin[len(part.trigger) :]
            body = " ".join(filter(None, [_quoted(rest), f"%json {schema}", _quoted(part.end)]))
            special = self._special_token(part.trigger)
            if special is not None:
                rules.append(f"tag_{index}: TEXT <[{special}]> {body}")
            else:
                rules.append(f"tag_{index}_begin[lazy]: TEXT {_quoted(part.trigger)}")
                rules.append(f"tag_{index}: tag_{index}_begin {body}")
        return LLMatcher.grammar_from_lark("\n".join(rules))

    def _special_token(self, text: str) -> int | None:
        """The special token that a text is the name of."""
        token_ids = self._tokenizer.tokenize_str(text, parse_special=True)
        is_special = len(token_ids) == 1 and self._tokenizer.is_special_token(token_ids[0])
        return token_ids[0] if is_special else None


class LLGuidanceGrammar:
    """A compiled constraint."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int], end_words: np.ndarray) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._end_words = end_words

    def start(self, prompt_token_ids: Sequence[int] = ()) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._matcher.deep_copy(), self._eos_token_ids, self._end_words)


class LLGuidanceMatcher(EndingMatcher):
    """Follows an output."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int], end_words: np.ndarray) -> None:
        super().__init__(eos_token_ids, end_words)
        self._matcher = matcher

    def _accept_text(self, token_ids: Sequence[int]) -> int:
        num_accepted: int = self._matcher.try_consume_tokens(list(token_ids))
        self._check()
        return num_accepted

    def _rollback_text(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)
        self._check()

    def _fill_text(self, words: np.ndarray) -> None:
        _fill(self._matcher, words)
        if self._matcher.is_error():
            raise MatcherError(_said(self._matcher))

    def _may_end(self) -> bool:
        may_end: bool = self._matcher.is_accepting()
        return may_end

    def _has_nothing_left(self) -> bool:
        is_stopped: bool = self._matcher.is_stopped()
        return is_stopped

    def _check(self) -> None:
        if self._matcher.is_error():
            raise MatcherError(_said(self._matcher))


def _as_it_is(schema: dict[str, Any]) -> dict[str, Any]:
    return schema


def _fill(matcher: LLMatcher, words: np.ndarray) -> None:
    matcher.unsafe_compute_mask_ptr(words.__array_interface__["data"][0], words.nbytes)


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def _said(matcher: LLMatcher) -> str:
    """What is wrong, in a line."""
    error = matcher.get_error().strip().removesuffix("<non-verbose/>").strip()
    for begin, meaning in _ERRORS.items():
        if begin in error:
            return meaning
    lines = error.splitlines()
    return lines[0][:300].rstrip(".") if lines else "it is at a limit"
