"""Least fixpoint of productive symbols, in grammars and schemas."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

Symbol = TypeVar("Symbol", bound=Hashable)


def productive(alternatives: Iterable[tuple[Symbol, Sequence[Symbol]]]) -> set[Symbol]:
    """Return the symbols that derive a finite text.

    alternatives: pairs of a symbol and the symbols of one of its alternatives. A symbol is productive if all symbols of
    one of its alternatives are. Linear in the total size
    (W. F. Dowling and J. H. Gallier, Linear-time algorithms for testing the satisfiability of propositional Horn
    formulae, 1984).
    """
    heads: list[Symbol] = []
    num_missing: list[int] = []
    used_in: defaultdict[Symbol, list[int]] = defaultdict(list)
    ready: deque[Symbol] = deque()
    for number, (head, body) in enumerate(alternatives):
        heads.append(head)
        num_missing.append(len(body))
        for symbol in body:
            used_in[symbol].append(number)
        if not body:
            ready.append(head)
    found: set[Symbol] = set()
    while ready:
        symbol = ready.popleft()
        if symbol in found:
            continue
        found.add(symbol)
        for number in used_in[symbol]:
            num_missing[number] -= 1
            if not num_missing[number]:
                ready.append(heads[number])
    return found
