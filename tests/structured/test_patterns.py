"""A translated pattern matches what Python matches, for all texts on which dialects agree, and never more."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from penstock.structured.patterns import PatternError, translate_full_match, translate_search
from support.constraints import allows, schema_matcher

PATTERNS = [
    r"^\d{3}$",
    r"^[a-c]+$",
    r"b",
    r"^a|b$",
    r"(^a$)",
    r"a$|^b",
    r"^(ab|ba)*$",
    r"^a{2}$",
    r"^a{1,}b?$",
    r"^a+?b*?$",
    r"^[^a]$",
    r"^[^\d]$",
    r"^[\w-]+$",
    r"^[a-]$",
    r"^[\^a]$",
    r"^[[]$",
    r"^[a&&b]+$",
    r"^[.]$",
    r"^.$",
    r"^\.$",
    r"^\s$",
    r"^\S$",
    r"^\W$",
    r"^\D$",
    r"^[\s\d]$",
    r"^[^\s]$",
    r"^[^\W]$",
    r"^[^\S]$",
    r"^(?:a|b)c$",
    r"^(?P<name>a)$",
    r"^\x61$",
    r"^\u0061$",
    r"^\/$",
    r"^\-$",
    r"^{$",
    r"^a{b$",
    r"^}$",
    r"^]$",
    r"^~~$",
    r"^a--b$",
    r"^[a~~b]+$",
    r"^[ --b]+$",
    r"^#$",
    r"^\t$",
    r"^$",
    r"^ $",
    r"",
]
CHARACTERS = "ab1_ -.\t\n[]^&{}/~#\\é٣"
TEXTS = ["", *CHARACTERS, *map("".join, itertools.product("ab1", repeat=2)), "123", "aab", "a{b", "~~", "a--b", "abba"]


@pytest.mark.filterwarnings("ignore:Possible")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_it_matches_what_python_finds(pattern: str) -> None:
    matcher = schema_matcher({"type": "string", "pattern": pattern})
    for text in TEXTS:
        found = re.search(pattern, text) is not None
        # Python alone takes a line's end for the text's, and has digits and letters of other scripts in its classes.
        is_agreed = text.isascii() and not text.endswith("\n")
        allowed = allows(matcher, json.dumps(text, ensure_ascii=False))
        assert allowed == found if is_agreed else allowed <= found, (pattern, text)


@pytest.mark.parametrize("text", ["\u00e9", "\u0663", "\u2028", "\u0085", "\ufeff", "\u001c", "\r"])
@pytest.mark.parametrize(
    "pattern", [r"^.$", r"^\w$", r"^\W$", r"^\d$", r"^\D$", r"^\s$", r"^\S$", r"^[^\w]$", r"^[^\s]$"]
)
def test_where_dialects_differ_it_matches_what_all_of_them_do(pattern: str, text: str) -> None:
    ecmascript = {
        ".": text not in "\n\r\u2028\u2029",
        "w": False,
        "d": False,
        "s": text in "\t\n\v\f\r \u00a0\ufeff\u2028\u2029",
    }
    letter = next(letter for letter in "wds." if letter in pattern.lower())
    is_negative = pattern.startswith("^[^") or "\\" + letter.upper() in pattern
    agreed = ecmascript[letter] != is_negative and re.search(pattern, text) is not None
    written = json.dumps(text, ensure_ascii=False)
    if "\\u" not in written:
        assert allows(schema_matcher({"type": "string", "pattern": pattern}), written) <= agreed


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (r"a(?=b)", "a lookahead"),
        (r"a(?!b)", "a negative lookahead"),
        (r"(?<=a)b", "a lookbehind"),
        (r"(?<!a)b", "a negative lookbehind"),
        (r"(?i)a", "a group of an unknown kind"),
        (r"(a)\1", r"\1"),
        (r"\bword", r"\b"),
        (r"\Aa\Z", r"\A"),
        (r"\p{L}", r"\p"),
        (r"\cA", r"\c"),
        (r"\ud800", "half of a surrogate pair"),
        (r"[]a]", "']' right after '['"),
        (r"[z-a]", "wrong order"),
        (r"[\d-z]", "a range from or to a class"),
        (r"[a", "not closed"),
        (r"(a", "not closed"),
        (r"a)", "closes nothing"),
        (r"*a", "nothing to repeat"),
        (r"a**", "nothing to repeat"),
        (r"a++", "nothing to repeat"),
        (r"a{,3}", "{,…}"),
        ("a\\", "escapes nothing"),
        ("(" * 60 + ")" * 60, "nested more than"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(pattern: str, said: str) -> None:
    with pytest.raises(PatternError) as refused:
        translate_search(pattern)
    assert said in str(refused.value)


def test_where_the_whole_text_must_match_anchors_at_its_ends_say_nothing() -> None:
    assert translate_full_match("^ab$") == translate_full_match("ab") == "ab"
    assert translate_full_match("^a|b$") == "a|b"
    for pattern in ("a^b", "(^a)", "a$b"):
        with pytest.raises(PatternError, match="in its middle"):
            translate_full_match(pattern)
