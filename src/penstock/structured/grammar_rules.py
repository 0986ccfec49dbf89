"""Rules of context-free grammars as tokens, and detection of rules that never end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, TypeAlias

from penstock.structured.derivations import productive


class Kind(Enum):
    """Kind of a token in a rule's body. OPTION: optional group, in brackets; ZERO_OR_MORE: quantifier with an optional
    operand; REPEAT: quantifier with a required one.
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
    """Token of a rule's body. text: as in the grammar."""

    kind: Kind
    text: str


# Bodies by name.
Rules: TypeAlias = Mapping[str, Sequence[BodyToken]]
# Rules by name, and groups by number.
_Symbol: TypeAlias = str | int


@dataclass
class _Group:
    """Open group. sequence: symbols of its current alternative; None for a terminal."""

    symbol: _Symbol
    is_option: bool = False
    sequence: list[_Symbol | None] = field(default_factory=list)


def never_ending(rules: Rules, start: str) -> list[str]:
    """Names of the rules reachable from `start` that match no finite text. Undefined names count as finite."""
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
    """Names in a body, without duplicates."""
    return list(dict.fromkeys(token.text for token in body if token.kind is Kind.NAME))


def as_repetition(name: str, body: Sequence[BodyToken]) -> list[BodyToken]:
    """Return an equivalent body of a rule whose alternatives have its own name as their last word or nowhere:
    `r: a r | b` becomes `r: (a)* (b)`. Other bodies are returned as they are.
    """
    repeated: list[list[BodyToken]] = []
    last: list[list[BodyToken]] = []
    for alternative in _alternatives(body):
        is_recursive = len(alternative) > 1 and alternative[-1] == (Kind.NAME, name)
        (repeated if is_recursive else last).append(alternative[:-1] if is_recursive else alternative)
    if not repeated or not last or any((Kind.NAME, name) in alternative for alternative in repeated + last):
        return list(body)
    rest = [alternative for alternative in last if alternative]
    optional = [BodyToken(Kind.ZERO_OR_MORE, "?")] if len(rest) < len(last) else []
    again = [*_group(repeated), BodyToken(Kind.ZERO_OR_MORE, "*")]
    return [*again, *_group(rest), *optional] if rest else again


def _alternatives(body: Iterable[BodyToken]) -> list[list[BodyToken]]:
    """Alternatives of a body, without those of its groups."""
    found: list[list[BodyToken]] = [[]]
    depth = 0
    for token in body:
        depth += (token.kind in (Kind.OPEN, Kind.OPEN_OPTION)) - (token.kind in (Kind.CLOSE, Kind.CLOSE_OPTION))
        if token.kind is Kind.OR and not depth:
            found.append([])
        else:
            found[-1].append(token)
    return found


def _group(alternatives: Sequence[Sequence[BodyToken]]) -> list[BodyToken]:
    """Alternatives in parentheses."""
    first, *others = alternatives
    inner = [*first, *(token for other in others for token in (BodyToken(Kind.OR, "|"), *other))]
    return [BodyToken(Kind.OPEN, "("), *inner, BodyToken(Kind.CLOSE, ")")]


def _add_alternatives(
    name: str, body: Iterable[BodyToken], alternatives: list[tuple[_Symbol, list[_Symbol]]], num_groups: int
) -> int:
    """Add the alternatives of a rule and of its groups. Returns the number of groups so far."""

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
    """Rules reachable from a rule, including itself."""
    reached: set[str] = set()
    left = [start]
    while left:
        name = left.pop()
        if name not in reached:
            reached.add(name)
            left += names_in(rules.get(name, ()))
    return reached
