"""Grammar backend llguidance: an Earley parser over lexemes, with bitmasks computed per token on the host."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from penstock.contract.structured_outputs import CONSTRAINTS_BY_SCHEMA, StructuredOutputsParams
from penstock.errors import InvalidParameter, UnsupportedFeature
from penstock.structured.backend import ConstraintTooLarge, MatcherError
from penstock.structured.constraint_check import format_of, schema_of, translated, whitespace_of
from penstock.structured.grammar_text import as_lark
from penstock.structured.pattern_names import without_empty_patterns
from penstock.structured.schema_constants import needs_numbered_escapes
from penstock.structured.schema_narrowing import DefaultBounds, narrowed
from penstock.structured.schema_widths import widest
from penstock.structured.tag_grammar import TagGrammar

# Without \u escapes, which would be second spellings of a property's name, unless a constant needs them.
_ALLOWED_ESCAPES = 'nrbtf\\"'
# Token slice of names and words: its tokens are allowed at once where the grammar allows all of them.
_LETTERS_AND_DIGITS = "[a-zA-Z0-9]+"
# Slice for bounded strings, beyond the length of llguidance's own slices.
_UP_TO_100 = r'[^"\\\x00-\x1F\x7F]{1,100}'
Rewrite: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
# Forced tokens would restrict a mask to the tokenizer's own spelling of a forced text, which is less than the matcher
# accepts; for the name of a special token they are that token, which the matcher does not accept as text.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
# llguidance's own limit of parser items at one place, and the items of an optional property that may come next. A mask
# takes time that grows with the square of these items, so the limit grows with a schema's properties only.
_MAX_ITEMS = LLParserLimits().max_items_in_row
_ITEMS_PER_OPTIONAL = 4
# Longest token that llguidance's trie holds.
_MAX_TOKEN_BYTES = 1024
# Tokens of the trial run of a new grammar.
_NUM_TRIED = 8
_ERRORS = {
    "Current row has": (
        "at one place too much could come next. Use fewer alternatives, or write rules that repeat with * or +, or "
        "with the recursion first (a: a b | b) rather than last"
    ),
    "initial lexer configuration": "its texts, names and patterns are too much together",
    "too many expressions": "its patterns repeat too much within each other",
    "regex parse error": "it has a pattern that is not valid",
    "panic": "it is too large, or has something that llguidance cannot cope with",
    "NoExtension": "it leaves nothing that could come next",
}


def _as_it_is(schema: dict[str, Any]) -> dict[str, Any]:
    return schema


class LLGuidanceBackend:
    """Compiler of constraints for one tokenizer.

    tokenizer_json: of the `tokenizers` library. bounds: default ones of what a schema leaves open.
    Raises UnsupportedFeature for a tokenizer that llguidance does not read, such as one without a decoder.
    """

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        bounds: DefaultBounds | None = None,
    ) -> None:
        self._narrowed = partial(narrowed, bounds=bounds)
        self._eos_token_ids = frozenset(eos_token_ids)
        content = json.loads(tokenizer_json)
        _check_tokens(content)
        general = LLTokenizer.general_slices()
        try:
            self._tokenizer = LLTokenizer(
                tokenizer_json,
                n_vocab=vocab_size,
                eos_token=sorted(self._eos_token_ids),
                slices=[_LETTERS_AND_DIGITS, *general[:-1], _UP_TO_100, general[-1]],
            )
        except ValueError as error:
            raise UnsupportedFeature(
                f"Structured outputs are not for this model: llguidance cannot read its tokenizer ({error})."
            ) from error
        self._end_words = _end_mask(vocab_size, self._eos_token_ids)
        self._special_ids = {
            token["content"]: token["id"]
            for token in content.get("added_tokens") or ()
            if token["id"] < vocab_size and self._tokenizer.is_special_token(token["id"])
        }
        longest_first = sorted(self._special_ids, key=len, reverse=True)
        # Matches nothing if there are no special tokens.
        self._special_tokens = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def compile(self, params: StructuredOutputsParams) -> LLGuidanceGrammar:
        name = params.constraint
        widths: list[int] = []
        whole = self._source(params, _as_it_is, widths)
        limits = LLParserLimits(
            verbose_errors=False, max_items_in_row=_MAX_ITEMS + _ITEMS_PER_OPTIONAL * max(widths, default=0)
        )
        matcher = None
        if params.disable_additional_properties and name in CONSTRAINTS_BY_SCHEMA:
            narrow = self._matcher(self._source(params, self._narrowed, []), limits)
            matcher = None if narrow.is_error() else narrow
        if matcher is None:
            matcher = self._matcher(whole, limits)
            if matcher.is_error():
                raise InvalidParameter(f"structured_outputs.{name} cannot be enforced: {_reason(matcher)}.")
        return LLGuidanceGrammar(matcher, self._eos_token_ids, self._end_words)

    def _matcher(self, source: str, limits: LLParserLimits) -> LLMatcher:
        """Matcher at the start of an output; in an error state if no token is allowed."""
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        if matcher.is_error():
            return matcher
        # The first mask is the most expensive one, and shows whether any token is allowed. A trial run of some tokens
        # meets limits that are there from the beginning.
        tried, words = matcher.deep_copy(), np.zeros_like(self._end_words)
        _fill(tried, words)
        for _ in range(_NUM_TRIED):
            allowed = np.flatnonzero(words)
            if tried.is_error() or tried.is_stopped() or not len(allowed):
                break
            word = int(words[allowed[0]])
            tried.try_consume_tokens([int(allowed[0]) * 32 + (word & -word).bit_length() - 1])
            _fill(tried, words)
        return tried if tried.is_error() else matcher

    def _source(self, params: StructuredOutputsParams, rewrite: Rewrite, widths: list[int]) -> str:
        """Write the constraint in Lark's notation. rewrite: applied to its schemas. widths: the widest objects of its
        schemas are added.
        """

        def write_schema(schema: dict[str, Any], rewrite: Rewrite = rewrite) -> str:
            widths.append(widest(schema))
            return self._json_text(schema, params, rewrite)

        if params.regex is not None:
            return _lark_of_regex(translated("regex", params.regex)) + _NO_FORCING
        if params.choice is not None:
            # One terminal, since thousands of alternatives of a rule are at a limit.
            return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, params.choice)) + _NO_FORCING
        if params.grammar is not None:
            return as_lark(params.grammar, lambda schema: write_schema(schema, _as_it_is)) + _NO_FORCING
        if params.structural_tag is not None:
            grammar = TagGrammar(write_schema, self._special_tokens.split, self._special_ids.__getitem__)
            return grammar.source(format_of(params)) + _NO_FORCING
        return f"start: %json {write_schema(schema_of(params))}{_NO_FORCING}"

    def _json_text(self, schema: Any, params: StructuredOutputsParams, rewrite: Rewrite) -> str:
        options = self._json_options(params, schema)
        # Options come last: llguidance moves the last keyword to their place, which must not change the order of
        # properties.
        return json.dumps({**rewrite(without_empty_patterns(schema, _ALLOWED_ESCAPES)), "x-guidance": options})

    def _json_options(self, params: StructuredOutputsParams, schema: dict[str, Any]) -> Any:
        escapes = _ALLOWED_ESCAPES + "u" * needs_numbered_escapes(schema)
        options: dict[str, Any] = {"json_allowed_escapes": escapes}
        pattern = whitespace_of(params)
        return {**options, "whitespace_pattern": pattern} if pattern else {**options, "whitespace_flexible": False}


class LLGuidanceGrammar:
    """Compiled constraint, as a matcher at the start of an output."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int], end_words: np.ndarray) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._end_words = end_words

    def start(self, prompt_token_ids: Sequence[int] = ()) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._matcher.deep_copy(), self._eos_token_ids, self._end_words)


class LLGuidanceMatcher:
    """Matcher of one output. llguidance has no end tokens: they are counted here, and rolled back like any token.

    end_words: bitmask of the end tokens alone, as `_end_mask` makes it.
    """

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int], end_words: np.ndarray) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._end_words = end_words
        self._num_end_tokens = 0

    def accept(self, token_ids: Sequence[int]) -> int:
        if self._eos_token_ids.isdisjoint(token_ids):
            return 0 if self._num_end_tokens else self._accept_text(token_ids)
        for num_accepted, token_id in enumerate(token_ids):
            if not (self._accept_end() if token_id in self._eos_token_ids else self.accept([token_id])):
                return num_accepted
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        num_end_tokens = min(num_tokens, self._num_end_tokens)
        self._num_end_tokens -= num_end_tokens
        if num_tokens > num_end_tokens:
            self._matcher.rollback(num_tokens - num_end_tokens)
            self._check()

    def fill(self, words: np.ndarray) -> None:
        if self._num_end_tokens:
            words[:] = self._end_words
            return
        _fill(self._matcher, words)
        self._check()

    @property
    def is_terminated(self) -> bool:
        return self._num_end_tokens > 0 or bool(self._matcher.is_stopped())

    def _accept_text(self, token_ids: Sequence[int]) -> int:
        num_accepted: int = self._matcher.try_consume_tokens(list(token_ids))
        self._check()
        return num_accepted

    def _accept_end(self) -> bool:
        has_ended = self._num_end_tokens > 0 or bool(self._matcher.is_accepting())
        self._num_end_tokens += has_ended
        return has_ended

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _reason(self._matcher)
            if reason in _ERRORS.values():
                raise ConstraintTooLarge(f"The output cannot follow its constraint any further: {reason}.")
            raise MatcherError(reason)


def _check_tokens(tokenizer: Mapping[str, Any]) -> None:
    """Raise UnsupportedFeature for a token that is longer than those of llguidance."""
    # Texts are the keys, or the first members of the entries.
    vocabulary = tokenizer.get("model", {}).get("vocab") or ()
    texts = (entry if isinstance(entry, str) else entry[0] for entry in vocabulary)
    longest = max((len(text.encode()) for text in texts), default=0)
    if longest > _MAX_TOKEN_BYTES:
        raise UnsupportedFeature(
            f"The model's tokenizer has a token of {longest:,} bytes. Structured outputs need tokens of at most "
            f"{_MAX_TOKEN_BYTES:,} bytes."
        )


def _end_mask(vocab_size: int, eos_token_ids: Iterable[int]) -> np.ndarray:
    """Bitmask that allows these tokens alone: int32 [ceil(vocabulary / 32)]."""
    words = np.zeros((vocab_size + 31) // 32, np.int32)
    for token_id in eos_token_ids:
        words.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words


def _fill(matcher: LLMatcher, words: np.ndarray) -> None:
    matcher.unsafe_compute_mask_ptr(words.__array_interface__["data"][0], words.nbytes)


def _lark_of_regex(pattern: str) -> str:
    lark: str = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
    return lark


def _reason(matcher: LLMatcher) -> str:
    """First line of the error of a matcher."""
    error = matcher.get_error().strip().removesuffix("<non-verbose/>").strip()
    for begin, meaning in _ERRORS.items():
        if begin in error:
            return meaning
    lines = error.splitlines()
    return lines[0][:300].rstrip(".") if lines else "it is at a limit"
