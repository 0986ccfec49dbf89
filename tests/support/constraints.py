"""Constraints on the demo model's tokens, and the outputs that they allow."""

from __future__ import annotations

import functools
import queue
from typing import Any

import numpy as np

from penstock.checkpoints.resolve import resolve_model_folder
from penstock.contract import StructuredOutputsParams
from penstock.structured.backend import CompiledGrammar, GrammarBackend, Matcher
from penstock.structured.compiler import GrammarCompiler
from penstock.structured.llguidance_backend import LLGuidanceBackend
from penstock.text.tokenizer import Tokenizer, load_tokenizer

END = 2
VOCAB_SIZE = 1536
NUM_WORDS = VOCAB_SIZE // 32


@functools.cache
def demo_tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model_folder("demo"))


@functools.cache
def demo_backend() -> GrammarBackend:
    as_json = demo_tokenizer().as_json()
    assert as_json is not None
    return LLGuidanceBackend(as_json, VOCAB_SIZE, [END])


def compiled_beside(**fields: Any) -> CompiledGrammar:
    """Compile a grammar in a thread, as engines do."""
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    compiler = GrammarCompiler(demo_backend, timeout_s=60.0, max_cached=1)
    compiler.compile(StructuredOutputsParams(**fields), lambda _, result: told.put(result))
    result = told.get(timeout=60)
    compiler.close()
    if isinstance(result, Exception):
        raise result
    return result  # type: ignore[no-any-return]


def matcher_for(**fields: Any) -> Matcher:
    return demo_backend().compile(StructuredOutputsParams(**fields)).start()


def schema_matcher(schema: Any, **fields: Any) -> Matcher:
    return matcher_for(json=schema, **fields)


def encode(text: str) -> list[int]:
    return demo_tokenizer().encode(text, add_special_tokens=False)


def allows(matcher: Matcher, text: str) -> bool:
    """Whether a text followed by the end is allowed. Leaves the matcher unchanged."""
    token_ids = [*encode(text), END]
    num_accepted = matcher.accept(token_ids)
    matcher.rollback(num_accepted)
    return num_accepted == len(token_ids)


def may_begin(matcher: Matcher, text: str) -> bool:
    """Whether an output may begin with a text. Leaves the matcher unchanged."""
    token_ids = encode(text)
    num_accepted = matcher.accept(token_ids)
    matcher.rollback(num_accepted)
    return num_accepted == len(token_ids)


def allowed_tokens(matcher: Matcher) -> list[int]:
    words = np.zeros(NUM_WORDS, np.int32)
    matcher.fill(words)
    return tokens_of(words)


def tokens_of(words: np.ndarray, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Token ids of a bitmask row, by its definition."""
    return [token for token in range(vocab_size) if int(words[token // 32]) >> token % 32 & 1]


def random_output(matcher: Matcher, generator: np.random.Generator, max_tokens: int = 400) -> str | None:
    """Draw an allowed text token by token; None if it reaches no end.

    After a while tokens that end things are preferred.
    """
    closing = {encode(character)[0] for character in '}]"0,'}
    token_ids: list[int] = []
    for number in range(max_tokens):
        allowed = allowed_tokens(matcher)
        assert allowed, "something may always come"
        if END in allowed and (len(allowed) == 1 or generator.random() < 0.5):
            matcher.rollback(len(token_ids))
            return demo_tokenizer().decode(token_ids)
        preferred = [token for token in allowed if token in closing]
        choose_from = preferred if preferred and generator.random() < (0.2 if number < 80 else 0.9) else allowed
        token = int(generator.choice([token for token in choose_from if token != END]))
        assert matcher.accept([token]) == 1, "what the bitmask allows is accepted"
        token_ids.append(token)
    matcher.rollback(len(token_ids))
    return None
