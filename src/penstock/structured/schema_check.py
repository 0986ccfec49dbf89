"""Decides, keyword by keyword, what of a JSON schema is enforced, and refuses the rest by name.

A schema is written anew from what is understood in it, and from nothing else. So nothing is passed over in silence:
neither a keyword that a backend does not know, nor one that it is known to get wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.errors import InvalidParameter
from penstock.structured import schema_arrays, schema_combinations, schema_objects, schema_values
from penstock.structured.keywords import ENFORCED, REFUSED
from penstock.structured.schema_walk import Walk

_MAX_REPORTED = 5
_HANDLERS = {
    **schema_combinations.HANDLERS,
    **schema_objects.HANDLERS,
    **schema_arrays.HANDLERS,
    **schema_values.HANDLERS,
}
assert _HANDLERS.keys() == ENFORCED


class NotEnforced(InvalidParameter):
    """A schema with what cannot be enforced. pointers: JSON pointers to it; keywords: that are to blame, for each."""

    def __init__(self, message: str, *, pointers: Sequence[str] = (), keywords: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.pointers = list(pointers)
        self.keywords = list(keywords)


def enforceable(schema: Any) -> dict[str, Any]:
    """The same schema in the keywords that backends enforce: an instance is valid for both or for neither.

    Two things are narrower: `format` is enforced, and names are written without escapes by number.
    Raises NotEnforced, which names what cannot be enforced by its JSON pointer.
    """
    walk = Walk(schema, _HANDLERS)
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
        raise _not_enforced(walk.refusals)
    whole: dict[str, Any] = walk.references.with_definitions(rewritten)
    return whole


def _not_enforced(refusals: list[tuple[str, str]]) -> NotEnforced:
    listed = "; ".join(f"{pointer or '/'}: {why}" for pointer, why in refusals[:_MAX_REPORTED])
    more = len(refusals) - _MAX_REPORTED
    return NotEnforced(
        f"structured_outputs.json has what cannot be enforced. {listed}{f'; and {more} more' if more > 0 else ''}. "
        "Allowed: schemas without it.",
        pointers=[pointer for pointer, _ in refusals],
        keywords=[_keyword_in(pointer) for pointer, _ in refusals],
    )


def _keyword_in(pointer: str) -> str:
    parts = pointer.split("/")
    return next((part for part in reversed(parts) if part in ENFORCED or part in REFUSED), parts[-1])
