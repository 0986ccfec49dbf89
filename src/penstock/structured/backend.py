"""What a library that constrains outputs must be able to do. One of them is chosen per engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from penstock.contract import StructuredOutputsParams


class Matcher(Protocol):
    """Follows one output, token by token, and says what may come next."""

    def accept(self, token_ids: Sequence[int]) -> int:
        """Take in tokens up to the first that may not come; how many were taken. Raises MatcherError."""

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens."""

    def fill(self, words: np.ndarray) -> None:
        """Write what may come next: int32 [ceil(vocabulary / 32)], a set bit allows the token. Raises MatcherError.

        Where the output may end, the end tokens are among them.
        """

    @property
    def is_terminated(self) -> bool:
        """Whether nothing but an end token may come, or one has come."""


class CompiledGrammar(Protocol):
    """A constraint that is ready to be followed, by any number of matchers, from any thread."""

    def start(self, prompt_token_ids: Sequence[int] = ()) -> Matcher:
        """A matcher at the begin of an output. prompt_token_ids: what the output follows, which may decide what counts
        as its begin."""


class GrammarBackend(Protocol):
    """Compiles constraints for one vocabulary. Called from several threads."""

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Raises InvalidParameter for what cannot be compiled or followed."""


class MatcherError(RuntimeError):
    """A matcher that cannot go on, such as at a limit of its library."""
