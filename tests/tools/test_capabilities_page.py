"""docs/capabilities.md is what the tool writes of the table."""

from __future__ import annotations

import pytest

from tools import capabilities_page


def test_the_page_is_renewed() -> None:
    assert capabilities_page.PAGE.read_text(encoding="utf-8") == capabilities_page.page(), "run `make docs`"


@pytest.mark.parametrize("test", capabilities_page.ELSEWHERE.values())
def test_each_refusal_outside_of_the_table_has_its_test(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"def {name}(" in (capabilities_page.PAGE.parents[1] / file).read_text()
