"""Schemas of real use and of the official suite, from files beside the checkout: what is accepted is enforced exactly.

The files are not part of the repository. Where they are is said by PENSTOCK_TEST_DATA, or they are in ../shared/data.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest
from tools.check_schemas import Check, read

from penstock.structured.schema_formats import FORMATS
from support.schema_files import REAL, SUITE, schema_file

_NUMBER = "it spells a whole number with a fraction or an exponent, and outputs do not"
_FORMAT = "it is valid because that validator passes over formats, which outputs have"
_ECMASCRIPT = "dialects of regular expressions do not agree here, and outputs have what all agree on"
_NARROW = "its format is enforced more narrowly, without leap seconds, quoted names, punycode, or control characters"
_CONTAINS = "the items that contains asks for come first"
_NOT_INTEGER = "what is a number and no integer cannot be told"
_BESIDE = "an old draft passes over what is beside its $ref, and outputs do not"
_ORDER = "its properties come in another order than the schema's"

# At least this share of the schemas is accepted. The suite asks for everything that there is.
ACCEPTED = {SUITE: 0.7, REAL: 0.97}
# Valid instances that do not pass: by schema, why, and how many of each.
NOT_PASSING: dict[str, tuple[str, int]] = {
    "const: const with 0 does not match other zero-like types": (_NUMBER, 1),
    "const: const with 1 does not match true": (_NUMBER, 1),
    "const: const with -2.0 matches integer and float types": (_NUMBER, 1),
    "const: float and integers are equal up to 64-bit representation limits": (_NUMBER, 1),
    "enum: enum with 0 does not match false": (_NUMBER, 1),
    "enum: enum with [0] does not match [false]": (_NUMBER, 1),
    "enum: enum with 1 does not match true": (_NUMBER, 1),
    "enum: enum with [1] does not match [true]": (_NUMBER, 1),
    "type: integer type matches integers": (_NUMBER, 1),
    "optional/float-overflow: all integers are multiples of 0.5, if overflow is handled": (_NUMBER, 1),
    "contains: contains keyword validation": (_CONTAINS, 3),
    "contains: contains keyword with const keyword": (_CONTAINS, 2),
    **{
        f"{file}: {case}": (_ORDER, 1)
        for file in ("dependentRequired", "optional/dependencies-compatibility")
        for case in ("single dependency", "multiple dependents required", "dependencies with escaped characters")
    },
    "minContains: minContains=2 with contains": (_CONTAINS, 1),
    "oneOf: oneOf": (_NOT_INTEGER, 1),
    "format: email format": (_FORMAT, 1),
    "format: ipv4 format": (_FORMAT, 1),
    "format: ipv6 format": (_FORMAT, 1),
    "format: hostname format": (_FORMAT, 1),
    "format: date format": (_FORMAT, 1),
    "format: date-time format": (_FORMAT, 1),
    "format: time format": (_FORMAT, 1),
    "format: json-pointer format": (_FORMAT, 1),
    "format: relative-json-pointer format": (_FORMAT, 1),
    "format: uri format": (_FORMAT, 1),
    "format: uuid format": (_FORMAT, 1),
    "format: duration format": (_FORMAT, 1),
    "Kubernetes---kb_76_Normalized": (_FORMAT, 1),
    "MCPspec---CallToolResult": (_FORMAT, 1),
    "MCPspec---GetPromptResult": (_FORMAT, 1),
    "MCPspec---ServerRequest": (_FORMAT, 1),
    "optional/ecmascript-regex: ECMA 262 \\D matches everything but ascii digits": (_ECMASCRIPT, 2),
    "optional/ecmascript-regex: ECMA 262 \\W matches everything but ascii letters": (_ECMASCRIPT, 1),
    "optional/ecmascript-regex: ECMA 262 \\s matches whitespace": (_ECMASCRIPT, 2),
    "optional/ecmascript-regex: ECMA 262 \\S matches everything but whitespace": (_ECMASCRIPT, 1),
    "optional/format/date-time: validation of date-time strings": (_NARROW, 1),
    "optional/format/email: validation of e-mail addresses": (_NARROW, 4),
    "optional/format/hostname: validation of A-label (punycode) host names": (_NARROW, 15),
    "optional/format/json-pointer: validation of JSON-pointers (JSON String Representation)": (_NARROW, 1),
    "optional/format/time: validation of time strings": (_NARROW, 4),
    "allOf: allOf": (_ORDER, 1),
    "allOf: allOf with base schema": (_ORDER, 1),
    "const: const with object": (_ORDER, 1),
    "Github_easy---o81526": (_ORDER, 1),
    "Github_easy---o89710": (_ORDER, 1),
    "Github_hard---o16749": (_ORDER, 2),
    "Github_medium---o14421": (_BESIDE, 2),
    "Github_medium---o33693": (_ORDER, 2),
    "Github_medium---o88110": (_ORDER, 1),
    **{f"Glaiveai2K---calculate_area_{one}": (_ORDER, 1) for one in ("423b749e", "7003196f", "defa27d8", "ef245c1f")},
    "JsonSchemaStore---package-configuration-schema": (_ORDER, 1),
    "Snowplow---sp_352_Normalized": (_ORDER, 2),
    "Snowplow---sp_376_Normalized": (_ORDER, 2),
    "JsonSchemaStore---debugsettings": (_ORDER, 2),
    "Snowplow---sp_163_Normalized": (_ORDER, 1),
}


def check_part(name: str, every: int, num_outputs: int) -> None:
    """Every so many schemas of a file: what passes is what is valid, apart from what is listed."""
    check = Check(num_outputs=num_outputs, shows=False)
    cases = list(read([schema_file(name)]))[::every]
    for case in cases:
        check.add(case)
    not_passing = Counter(schema for outcome, schema, _ in check.differences if outcome.startswith("valid, "))
    wrong = [one for one in check.differences if not one[0].startswith("valid, ") and not _is_of_unknown_format(one[1])]
    assert not wrong, "nothing is accepted wrongly, and what is drawn is valid"
    names = {case.get("name") or f"{case['file']}: {case['description']}" for case in cases}
    assert not_passing == {schema: number for schema, (_, number) in NOT_PASSING.items() if schema in names}
    assert check.counts["accepted"] > ACCEPTED[name] * len(cases)
    assert check.counts["valid, passes"] > len(cases) / 2


def _is_of_unknown_format(schema: str) -> bool:
    """Whether a case is of a format that is an annotation here: ecmascript-regex is that of `regex`."""
    found = re.match("optional/format/([a-z-]+)", schema)
    return found is not None and found[1] not in FORMATS


@pytest.mark.parametrize("name", [SUITE, REAL])
@pytest.mark.slow
def test_a_fifth_of_a_file(name: str) -> None:
    check_part(name, every=5, num_outputs=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [SUITE, REAL])
def test_a_whole_file_and_an_output_drawn_for_each_schema(name: str) -> None:
    check_part(name, every=1, num_outputs=1)
