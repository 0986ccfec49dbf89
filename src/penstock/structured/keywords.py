"""Keywords of JSON Schema, of all drafts: enforced, refused, annotations."""

from __future__ import annotations

import difflib

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

# Keywords that are enforced, at least in some forms.
ENFORCED = frozenset(
    {
        "$ref",
        "additionalItems",
        "additionalProperties",
        "allOf",
        "anyOf",
        "const",
        "dependencies",
        "dependentRequired",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "items",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "not",
        "oneOf",
        "pattern",
        "patternProperties",
        "prefixItems",
        "properties",
        "propertyNames",
        "required",
        "type",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)

_BY_LETTERS = {"".join(filter(str.isalnum, name)).lower(): name for name in sorted(ENFORCED | REFUSED.keys())}
_SIMILARITY = 0.85
_LETTERS_OF = {letters: frozenset(letters) for letters in _BY_LETTERS}


def meant_instead_of(name: str) -> str | None:
    """Return the validating keyword that an unknown one misspells; None if there is none.

    Other unknown keywords are annotations, and so are those that begin with "x-" or an underscore.
    """
    if name.startswith(("x-", "_")):
        return None
    letters = "".join(filter(str.isalnum, name)).lower()
    # Bounds of the similarity that take a tenth of its time, since a schema may have thousands of such names.
    near = [one for one, known in _LETTERS_OF.items() if _may_be_similar(letters, one, known)]
    close = difflib.get_close_matches(letters, near, n=1, cutoff=_SIMILARITY)
    return _BY_LETTERS[close[0]] if close else None


def _may_be_similar(letters: str, keyword: str, known: frozenset[str]) -> bool:
    """known: the keyword's letters."""
    needed = _SIMILARITY * (len(letters) + len(keyword)) / 2
    return min(len(letters), len(keyword)) >= needed and sum(map(known.__contains__, letters)) >= needed
