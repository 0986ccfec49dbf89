"""docs/capabilities.md is what the tool writes of the table."""

from __future__ import annotations

from tools import capabilities_page


def test_the_page_is_renewed() -> None:
    assert capabilities_page.PAGE.read_text(encoding="utf-8") == capabilities_page.page(), "run `make docs`"
