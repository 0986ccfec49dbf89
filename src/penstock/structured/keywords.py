"""Keywords of JSON Schema, of all drafts, that are not enforced: annotations, and those that cannot be."""

from __future__ import annotations

import difflib
import functools

# Annotations: keywords that do not validate. `format` is not among them: known ones are enforced.
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

# Keywords that are never enforced, with what to do instead.
UNENFORCED = {
    "$dynamicRef": "dynamic references are not followed; use $ref",
    "$recursiveRef": "recursive references are not followed; use $ref",
    "$vocabulary": "other vocabularies are not known",
}

# Keywords of other notations, which are annotations here, with what to do instead.
FOREIGN = {
    "disallow": "disallow belongs to draft 3; use not, or a list of types",
    "divisibleBy": "divisibleBy belongs to draft 3; use multipleOf",
    "extends": "extends belongs to draft 3; use allOf",
    "nullable": 'nullable belongs to OpenAPI; use a list of types with "null" in it',
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
    names = {"".join(filter(str.isalnum, name)).lower(): name for name in sorted(enforced | UNENFORCED.keys())}
    return {letters: (name, frozenset(letters)) for letters, name in names.items()}


def _may_be_similar(letters: str, keyword: str, known: frozenset[str]) -> bool:
    """known: the keyword's letters."""
    needed = _SIMILARITY * (len(letters) + len(keyword)) / 2
    return min(len(letters), len(keyword)) >= needed and sum(map(known.__contains__, letters)) >= needed
