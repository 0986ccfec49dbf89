"""Least fixpoint over alternatives: which symbols of a grammar, or parts of a schema, derive something finite."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

Symbol = TypeVar("Symbol", bound=Hashable)


def productive(alternatives: Iterable[tuple[Symbol, Sequence[Symbol]]]) -> set[Symbol]:
    """The symbols that derive something finite.

    alternatives: a symbol, and the symbols that one of its alternatives consists of, any number of times each symbol.
    A symbol is productive if all symbols of one of its alternatives are. Takes time linear in the size of all of them
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
