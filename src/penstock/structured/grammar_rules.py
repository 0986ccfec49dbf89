"""Rules of context-free grammars as tokens, whatever notation they come from, and which of them never end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, TypeAlias

from penstock.structured.derivations import productive


class Kind(Enum):
    """Kind of a token in a rule's body. OPTION: an optional group, in brackets; ZERO_OR_MORE: any quantifier with which
    what stands before it may be left out; REPEAT: one with which it may not.
    """

    NAME = auto()
    TERMINAL = auto()
    OPEN = auto()
    CLOSE = auto()
    OPEN_OPTION = auto()
    CLOSE_OPTION = auto()
    OR = auto()
    ZERO_OR_MORE = auto()
    REPEAT = auto()


class BodyToken(NamedTuple):
    """Part of a rule's body. text: as it stands in the grammar."""

    kind: Kind
    text: str


# Bodies by rule.
Rules: TypeAlias = Mapping[str, Sequence[BodyToken]]
# A rule by its name, or a group by its number.
_Symbol: TypeAlias = str | int


@dataclass
class _Group:
    """A group that is open. sequence: of its present alternative; None stands for what is no symbol."""

    symbol: _Symbol
    is_option: bool = False
    sequence: list[_Symbol | None] = field(default_factory=list)


def never_ending(rules: Rules, start: str) -> list[str]:
    """The rules that `start` leads to and that match no finite text. Names without a rule are taken to match some."""
    alternatives: list[tuple[_Symbol, list[_Symbol]]] = []
    num_groups = 0
    for name, body in rules.items():
        num_groups = _add_alternatives(name, body, alternatives, num_groups)
    undefined = {
        symbol for _, sequence in alternatives for symbol in sequence if isinstance(symbol, str)
    } - rules.keys()
    ending = productive([*alternatives, *((symbol, []) for symbol in undefined)])
    reached = _reached(rules, start)
    return [name for name in rules if name in reached and name not in ending]


def names_in(body: Iterable[BodyToken]) -> list[str]:
    """The names that a body has, each once."""
    return list(dict.fromkeys(token.text for token in body if token.kind is Kind.NAME))


def _add_alternatives(
    name: str, body: Iterable[BodyToken], alternatives: list[tuple[_Symbol, list[_Symbol]]], num_groups: int
) -> int:
    """Add the alternatives of a rule and of the groups in it. Returns how many groups there are by now."""

    def end_alternative(group: _Group) -> None:
        alternatives.append((group.symbol, [symbol for symbol in group.sequence if symbol is not None]))
        group.sequence = []

    open_groups = [_Group(name)]
    for token in body:
        innermost = open_groups[-1]
        if token.kind in (Kind.OPEN, Kind.OPEN_OPTION):
            num_groups += 1
            open_groups.append(_Group(num_groups, token.kind is Kind.OPEN_OPTION))
        elif token.kind in (Kind.CLOSE, Kind.CLOSE_OPTION):
            if len(open_groups) > 1:
                end_alternative(open_groups.pop())
                open_groups[-1].sequence.append(None if innermost.is_option else innermost.symbol)
        elif token.kind is Kind.OR:
            end_alternative(innermost)
        elif token.kind is Kind.ZERO_OR_MORE:
            if innermost.sequence:
                innermost.sequence[-1] = None
        elif token.kind is not Kind.REPEAT:
            innermost.sequence.append(token.text if token.kind is Kind.NAME else None)
    for group in open_groups:
        end_alternative(group)
    return num_groups


def _reached(rules: Rules, start: str) -> set[str]:
    """The rules that one leads to, itself included."""
    reached: set[str] = set()
    left = [start]
    while left:
        name = left.pop()
        if name not in reached:
            reached.add(name)
            left += names_in(rules.get(name, ()))
    return reached
