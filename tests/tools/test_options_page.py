"""docs/options.md is what the code says, whole."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.config import SpeculativeConfig
from penstock.config.engine import option_names
from penstock.contract import SamplingParams
from tools import options_page

ENGINE_OPTIONS = [option for options in options_page.engine_options().values() for option in options]


def test_the_page_is_what_the_tool_writes() -> None:
    assert options_page.PAGE.read_text(encoding="utf-8") == options_page.page(), "run `make docs`"


def test_no_option_is_missing_or_there_twice() -> None:
    keys = [field.name for field in dataclasses.fields(SpeculativeConfig)]
    names = [name for name in option_names() if name != "speculative_config"] + keys
    assert sorted(option.name for option in ENGINE_OPTIONS) == sorted(names)
    assert [option.name for option in options_page.sampling_parameters()] == list(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("options", [ENGINE_OPTIONS, options_page.sampling_parameters()], ids=["engine", "sampling"])
def test_every_option_has_a_meaning(options: list[options_page.Option]) -> None:
    assert [option.name for option in options if not option.meaning] == []


def test_what_is_allowed_and_which_flag_there_is_are_the_codes_own() -> None:
    by_name = {option.name: option for option in ENGINE_OPTIONS}
    assert by_name["policy"].allowed == "fcfs, priority"
    assert by_name["policy"].default == "`'fcfs'`"
    page = options_page.page()
    assert "| `num_threads` | `--threads` |" in page
    assert "| `seed` | `--engine-seed` | int |" in page
    assert "| `seed` | `--seed` | int or None |" in page
    assert "| `policy` | `--policy` | str |" in page


def test_meanings_are_found_in_lines_lists_of_names_and_after_full_stops() -> None:
    docstring = """one: the first,
        which goes on. two: the second: with a colon.
    three, four: shared

    Nothing of this: is a name. five: neither.
    """
    assert options_page.meanings_in(docstring, ["one", "two", "three", "four"]) == {
        "one": "the first, which goes on",
        "two": "the second: with a colon",
        "three": "shared",
        "four": "shared",
    }
