"""Interface of grammars and matchers, which llguidance and reasoning implement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from penstock.contract import StructuredOutputsParams
from penstock.errors import InvalidRequest


class Matcher(Protocol):
    """State of one output within its grammar, advanced token by token."""

    def accept(self, token_ids: Sequence[int]) -> int:
        """Accept tokens up to the first that is not allowed; return their number. Raises MatcherError."""

    def rollback(self, num_tokens: int) -> None:
        """Undo the last tokens."""

    def fill(self, words: np.ndarray) -> None:
        """Write the bitmask of the next token: int32 [ceil(vocabulary / 32)], a set bit allows it. Raises MatcherError.

        End tokens are allowed where the output may end.
        """

    @property
    def is_terminated(self) -> bool:
        """Whether only end tokens are allowed, or one was accepted."""


class CompiledGrammar(Protocol):
    """Compiled constraint, for any number of matchers in any thread."""

    def start(self, prompt_token_ids: Sequence[int] = ()) -> Matcher:
        """Return a matcher at the start of an output. prompt_token_ids: the prompt, which may have begun reasoning."""


class GrammarBackend(Protocol):
    """Compiler of constraints for one vocabulary, called from several threads."""

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Compile a constraint. Raises InvalidParameter for one that cannot be enforced."""


class TextTokenizer(Protocol):
    """A tokenizer, as markers in texts need it."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class MatcherError(RuntimeError):
    """Failure of a matcher."""


class ConstraintTooLarge(MatcherError, InvalidRequest):
    """A constraint that reaches a limit of the matcher's library at this output."""
