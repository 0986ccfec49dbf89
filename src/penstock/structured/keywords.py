"""Keywords of JSON Schema, of all drafts, that are not enforced: annotations, and those that are refused."""

from __future__ import annotations

import difflib
import functools

# Annotations: keywords that do not validate. `format` is not among them: it is enforced or refused.
ANNOTATIONS = frozenset(
    {
        "$anchor",
        "$comment",
        "$defs",
        "$dynamicAnchor",
        "$id",
        "$recursiveAnchor",
        "$schema",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "id",
        "readOnly",
        "title",
        "writeOnly",
    }
)

# Keywords that are always refused, with what to do instead.
REFUSED = {
    "$dynamicRef": "dynamic references are not followed; use $ref",
    "$recursiveRef": "recursive references are not followed; use $ref",
    "$vocabulary": "other vocabularies are not known",
    "contains": "items cannot be counted by a condition; use items, or prefixItems with a fixed first item",
    "dependentSchemas": "no condition on other properties can be enforced; use anyOf with one branch for each case",
    "disallow": "it belongs to draft 3; use not, or a list of types",
    "divisibleBy": "it belongs to draft 3; use multipleOf",
    "else": "conditions cannot be enforced; use anyOf with one branch for each case",
    "extends": "it belongs to draft 3; use allOf",
    "if": "conditions cannot be enforced; use anyOf with one branch for each case",
    "maxContains": "items cannot be counted by a condition; use maxItems",
    "minContains": "items cannot be counted by a condition; use minItems",
    "nullable": 'it belongs to OpenAPI; use a list of types with "null" in it',
    "then": "conditions cannot be enforced; use anyOf with one branch for each case",
}

_SIMILARITY = 0.85


def meant_instead_of(name: str, enforced: frozenset[str]) -> str | None:
    """Return the validating keyword that an unknown one misspells; None if there is none. enforced: keywords.

    Other unknown keywords are annotations, and so are those that begin with "x-" or an underscore.
    """
    if name.startswith(("x-", "_")):
        return None
    letters = "".join(filter(str.isalnum, name)).lower()
    # Bounds of the similarity that take a tenth of its time, since a schema may have thousands of such names.
    keywords = _by_letters(enforced)
    near = [one for one, (_, known) in keywords.items() if _may_be_similar(letters, one, known)]
    close = difflib.get_close_matches(letters, near, n=1, cutoff=_SIMILARITY)
    return keywords[close[0]][0] if close else None


@functools.cache
def _by_letters(enforced: frozenset[str]) -> dict[str, tuple[str, frozenset[str]]]:
    """Validating keywords by their letters, each with the set of these."""
    names = {"".join(filter(str.isalnum, name)).lower(): name for name in sorted(enforced | REFUSED.keys())}
    return {letters: (name, frozenset(letters)) for letters, name in names.items()}


def _may_be_similar(letters: str, keyword: str, known: frozenset[str]) -> bool:
    """known: the keyword's letters."""
    needed = _SIMILARITY * (len(letters) + len(keyword)) / 2
    return min(len(letters), len(keyword)) >= needed and sum(map(known.__contains__, letters)) >= needed
