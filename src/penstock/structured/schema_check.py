"""Rewriting of JSON schemas to enforced keywords; those that cannot be enforced are refused by name, or left out.

The rewritten schema holds only what was understood, so that llguidance sees neither keywords that it ignores nor those
that it gets wrong.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

from penstock.errors import InvalidParameter
from penstock.structured import (
    schema_arrays,
    schema_combinations,
    schema_conditions,
    schema_objects,
    schema_values,
)
from penstock.structured.keywords import UNENFORCED
from penstock.structured.schema_constants import has_controls, needs_numbered_escapes
from penstock.structured.schema_parts import parts_of
from penstock.structured.schema_walk import Walk
from penstock.structured.schema_widths import MAX_OPTIONAL, widest

logger = logging.getLogger(__name__)
_MAX_REPORTED = 5
_HANDLERS = {
    **schema_combinations.HANDLERS,
    **schema_conditions.HANDLERS,
    **schema_objects.HANDLERS,
    **schema_arrays.HANDLERS,
    **schema_values.HANDLERS,
}


class NotEnforced(InvalidParameter):
    """Schema that cannot be enforced.

    pointers, keywords: JSON pointer and keyword of each refusal. can_be_dropped: whether it is enforceable
    without them.
    """

    def __init__(
        self, message: str, *, pointers: Sequence[str] = (), keywords: Sequence[str] = (), can_be_dropped: bool = False
    ) -> None:
        super().__init__(message)
        self.can_be_dropped = can_be_dropped
        self.pointers = list(pointers)
        self.keywords = list(keywords)


def enforceable(schema: Any, *, drops: bool = False) -> dict[str, Any]:
    """Return a schema in enforced keywords that allows no instance that is invalid for this one.

    It is narrower in some respects: `format` is enforced, names have no escapes by number, and what `contains` asks
    for has its place in the array. Unknown formats and keywords that look like misspelt ones are logged.
    drops: keywords that cannot be enforced are left out, so that the schema may allow what is invalid for this one.
    Raises NotEnforced, with the JSON pointers of what cannot be enforced.
    """
    walk = Walk(schema, _HANDLERS, drops=drops)
    try:
        result = walk.schema(schema, "", 0)
        walk.references.finish(walk.definition)
    except RecursionError:
        walk.refuse("", "it is nested too deeply")
        result = True
    if result is False:
        walk.refuse("", "nothing is valid for it")
    if not walk.refusals:
        for pointer in walk.references.endless():
            walk.refuse(pointer, "nothing finite is valid for it")
    rewritten: Any = {} if result is True else result
    if walk.refusals:
        raise _not_enforced(walk)
    whole: dict[str, Any] = walk.references.with_definitions(rewritten)
    _check_whole(walk, whole)
    if walk.refusals:
        raise _not_enforced(walk)
    if walk.warnings:
        _warn_once(_listed(list(walk.warnings.items())))
    return whole


@functools.lru_cache(maxsize=1024)
def _warn_once(text: str) -> None:
    logger.warning("A JSON schema has annotations that may have been meant as more. %s.", text)


def _check_whole(walk: Walk, whole: dict[str, Any]) -> None:
    """Refuse what only the whole rewritten schema shows."""
    if widest(whole) > MAX_OPTIONAL:
        walk.refuse("", f"more than {MAX_OPTIONAL:,} optional properties could come next; list some under required")
    if needs_numbered_escapes(whole) and any(
        has_controls(name) for part in parts_of(whole) for name in part.get("properties", ())
    ):
        walk.refuse("", "constants with control characters beside names with some, which could be written twice")


def _not_enforced(walk: Walk) -> NotEnforced:
    refusals = walk.refusals
    return NotEnforced(
        f"structured_outputs.json has what cannot be enforced. {_listed(refusals)}. Allowed: schemas without it.",
        can_be_dropped=all(refusal in walk.could_drop for refusal in refusals),
        pointers=[pointer for pointer, _ in refusals],
        keywords=[_keyword_in(pointer) for pointer, _ in refusals],
    )


def _listed(notes: list[tuple[str, str]]) -> str:
    listed = "; ".join(f"{pointer or '/'}: {why}" for pointer, why in notes[:_MAX_REPORTED])
    more = len(notes) - _MAX_REPORTED
    return f"{listed}; and {more} more" if more > 0 else listed


def _keyword_in(pointer: str) -> str:
    parts = pointer.split("/")
    return next((part for part in reversed(parts) if part in _HANDLERS or part in UNENFORCED), parts[-1])
