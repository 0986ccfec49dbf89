"""Constraints through xgrammar: a pushdown automaton, most of whose masks are made when a constraint is compiled."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from penstock.config.structured import XGRAMMAR
from penstock.contract import StructuredOutputsParams
from penstock.errors import InvalidParameter
from penstock.structured.backend import MatcherError
from penstock.structured.constraint_check import check_read, schema_of, tagged_parts, translated, whitespace_of
from penstock.structured.ending import EndingMatcher, end_mask
from penstock.structured.xgrammar_grammar import grammar_of
from penstock.structured.xgrammar_patterns import as_rule, quoted


class XGrammarBackend:
    """tokenizer_json: of the `tokenizers` library. eos_token_ids: each ends an output."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        import xgrammar

        self._library = xgrammar
        self._eos_token_ids = frozenset(eos_token_ids)
        self._end_words = end_mask(vocab_size, self._eos_token_ids)
        vocabulary, self._special_texts = _vocabulary(tokenizer_json, vocab_size)
        info = xgrammar.TokenizerInfo(
            vocabulary,
            _kind(tokenizer_json, xgrammar.VocabType),
            vocab_size=vocab_size,
            stop_token_ids=sorted(self._eos_token_ids),
        )
        # Grammars are cached by who compiles them, who also has threads.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, params: StructuredOutputsParams) -> XGrammarGrammar:
        name = params.constraint
        try:
            compiled = self._compile(params)
        except RuntimeError as error:
            raise InvalidParameter(f"structured_outputs.{name} cannot be enforced: {_said(error)}.") from error
        grammar = XGrammarGrammar(self._library.GrammarMatcher(compiled), self._eos_token_ids, self._end_words)
        first = np.zeros_like(self._end_words)
        grammar.start().fill(first)
        if not first.any():
            raise InvalidParameter(
                f"structured_outputs.{name} cannot be enforced: it leaves nothing that could come next."
            )
        return grammar

    def _compile(self, params: StructuredOutputsParams) -> Any:
        if params.structural_tag is not None:
            return self._compiler.compile_structural_tag(self._tag(params))
        return self._compiler.compile_grammar(self._source(params))

    def _source(self, params: StructuredOutputsParams) -> str:
        """The constraint as xgrammar writes it."""
        if params.regex is not None:
            return f"root ::= {as_rule(translated('regex', params.regex, XGRAMMAR))}"
        if params.choice is not None:
            return "root ::= " + " | ".join(map(quoted, params.choice))
        if params.grammar is not None:
            check_read(params, XGRAMMAR)
            return params.grammar
        return grammar_of(schema_of(params, XGRAMMAR), whitespace_of(params))

    def _tag(self, params: StructuredOutputsParams) -> str:
        """Any text, in which what begins with a trigger goes on as its parts do."""
        parts = tagged_parts(params, XGRAMMAR)
        special = next((part.trigger for part in parts if part.trigger in self._special_texts), None)
        if special is not None:
            raise InvalidParameter(
                f"structured_outputs.structural_tag has the trigger {special!r}, a special token. Allowed with "
                "structured_outputs_backend='xgrammar': triggers that are text."
            )
        tags = [
            {
                "type": "tag",
                "begin": part.begin,
                "content": {"type": "grammar", "grammar": grammar_of(part.schema, whitespace_of(params))},
                "end": part.end,
            }
            for part in parts
        ]
        triggers = list(dict.fromkeys(part.trigger for part in parts))
        return json.dumps(
            {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": triggers, "tags": tags}}
        )


class XGrammarGrammar:
    """A compiled constraint."""

    def __init__(self, matcher: Any, eos_token_ids: frozenset[int], end_words: np.ndarray) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._end_words = end_words

    def start(self, prompt_token_ids: Sequence[int] = ()) -> XGrammarMatcher:
        return XGrammarMatcher(self._matcher.fork(), self._eos_token_ids, self._end_words)


class XGrammarMatcher(EndingMatcher):
    """Follows an output."""

    def __init__(self, matcher: Any, eos_token_ids: frozenset[int], end_words: np.ndarray) -> None:
        super().__init__(eos_token_ids, end_words)
        self._matcher = matcher

    def _accept_text(self, token_ids: Sequence[int]) -> int:
        for num_accepted, token_id in enumerate(token_ids):
            if not self._matcher.accept_token(token_id):
                return num_accepted
        return len(token_ids)

    def _rollback_text(self, num_tokens: int) -> None:
        try:
            self._matcher.rollback(num_tokens)
        except RuntimeError as error:
            raise MatcherError(_said(error)) from error

    def _fill_text(self, words: np.ndarray) -> None:
        try:
            self._matcher.fill_next_token_bitmask(words)
        except RuntimeError as error:
            raise MatcherError(_said(error)) from error

    def _may_end(self) -> bool:
        is_completed: bool = self._matcher.is_completed()
        return is_completed

    def _has_nothing_left(self) -> bool:
        if not self._may_end():
            return False
        words = np.zeros_like(self._end_words)
        self._fill_text(words)
        return bool((words == self._end_words).all())


def _vocabulary(tokenizer_json: str, vocab_size: int) -> tuple[list[str], frozenset[str]]:
    """Every token as it is spelt, and the special ones, which are left out: they are no text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json)
    special = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    vocabulary = [""] * vocab_size
    for text, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if number < vocab_size and number not in special:
            vocabulary[number] = text
    return vocabulary, frozenset(special.values())


def _kind(tokenizer_json: str, kinds: Any) -> Any:
    """How tokens spell bytes, which what decodes them tells."""
    decoder = json.dumps(json.loads(tokenizer_json).get("decoder"))
    if '"ByteLevel"' in decoder:
        return kinds.BYTE_LEVEL
    return kinds.BYTE_FALLBACK if '"ByteFallback"' in decoder else kinds.RAW


def _said(error: Exception) -> str:
    """What is wrong, in a line: without the time and the source that the library begins with."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else "it is at a limit"
    return first.partition(": ")[2][:300].rstrip(".") if first.startswith("[") else first[:300].rstrip(".")
