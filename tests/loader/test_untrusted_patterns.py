"""Regular expressions of third parties."""

from __future__ import annotations

import re
import time

import pytest

from penstock.errors import CheckpointError
from penstock.loader import untrusted_patterns
from penstock.loader.untrusted_patterns import full_matches, syntax_error

NAMES = ["model.layers.0.self_attn.q_proj", "model.layers.11.mlp.up_proj", "lm_head", "layers.1", "aaa", ""]
# Exponential in Python's `re` on these names.
CATASTROPHE = "([a-z_.0-9]+)+!"


def _matches(patterns: list[str], names: list[str]) -> list[list[bool]]:
    return full_matches(patterns, names, "The file", CheckpointError)


def test_a_pattern_on_which_backtracking_never_ends_is_matched_in_linear_time() -> None:
    begin = time.process_time()
    assert _matches([CATASTROPHE], [*NAMES, "a" * 10_000 + "!"]) == [[False] * len(NAMES) + [True]]
    assert time.process_time() - begin < 5


@pytest.mark.parametrize(
    "pattern",
    [
        ".*q_proj",
        r"model\.layers\.(?!0\.)\d+\..*",
        r".*(?<=up)_proj",
        r"(a)\1\1",
        "a{,3}",
        "[[:a]+",
        "lm_head|aaa",
        "(?i)LM_HEAD",
        "^layers.1$",
        r"\w+",
        r"lm_head\Z",
        "(?>a+)",
        "",
    ],
)
def test_a_pattern_matches_what_it_matches_in_python(pattern: str) -> None:
    assert syntax_error(pattern) is None
    assert _matches([pattern, "aaa"], NAMES) == [
        [re.fullmatch(one, name) is not None for name in NAMES] for one in (pattern, "aaa")
    ]


def test_names_outside_ascii_are_matched_as_in_python() -> None:
    assert _matches([r"\w+", "[a-z]+"], ["ß", "a"]) == [[True, True], [False, True]]


def test_a_pattern_that_no_linear_engine_takes_has_a_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted_patterns, "CPU_TIME_S", 1)
    with pytest.raises(
        CheckpointError, match=r"The file has regular expressions that take more than 1 s .*one of '\(\?=a"
    ):
        _matches(["(?=a)" + CATASTROPHE], ["a" * 60])


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        ("(", "unterminated"),
        ("a{99999999999999}", "too large"),
        ("(" * 5_000 + ")" * 5_000, "nested too deep"),
        ("a" * 10_001, "has 10,001 characters"),
    ],
)
def test_a_pattern_that_is_not_valid_has_a_complaint(pattern: str, complaint: str) -> None:
    found = syntax_error(pattern)
    assert found is not None
    assert complaint in found
