"""Every command and every snippet of the pages for users runs as it stands."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.pages import REASONS, REPOSITORY, RUN, SHOWN, USER_PAGES, Block, blocks_of, prepare, run_block

MARKS = ("", "file", "fails", "not run", "slow")
ALL_BLOCKS = [block for page in USER_PAGES for block in blocks_of(page)]
PAGES = [page for page in USER_PAGES if any(block.language in RUN for block in blocks_of(page))]
SLOW_PAGES = [page for page in PAGES if any(block.mark == "slow" for block in blocks_of(page))]


def name_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The present folder: Python finds modules in it, as for a script that runs there."""
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def run(blocks: list[Block]) -> None:
    """Blocks of one page, in their order. Engines that a page leaves open are closed."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        for block in blocks:
            run_block(block, namespace)
    finally:
        for value in namespace.values():
            if hasattr(value, "close") and type(value).__module__.startswith("penstock"):
                value.close()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
@pytest.mark.one_case_quick
def test_a_page_runs(page: Path, folder: Path) -> None:
    run([block for block in blocks_of(page) if block.mark != "slow"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", SLOW_PAGES, ids=name_of)
def test_a_page_runs_with_what_takes_long(page: Path, folder: Path) -> None:
    run(blocks_of(page))


def test_every_block_says_what_it_is() -> None:
    """So that none is passed over because of how it is written."""
    assert [str(block) for block in ALL_BLOCKS if block.language not in (*RUN, *SHOWN)] == []
    assert [str(block) for block in ALL_BLOCKS if block.mark not in MARKS] == []
    for page in USER_PAGES:
        assert page.read_text(encoding="utf-8").count("```") == 2 * len(blocks_of(page)), f"{page}: an odd fence"


def test_what_is_not_run_has_one_of_the_reasons() -> None:
    without = [block for block in ALL_BLOCKS if block.mark == "not run"]
    assert [f"{block}: {block.argument}" for block in without if block.argument not in REASONS] == []


def test_a_block_that_is_wrong_is_noticed(folder: Path) -> None:
    for language, code in (
        ("python", "1 / 0\n"),
        ("sh", "penstock generate --no-such-flag\n"),
        ("sh", "false\ntrue\n"),
    ):
        with pytest.raises((AssertionError, ZeroDivisionError)):
            run_block(Block("README.md", 1, language, "", "", code), {})
    with pytest.raises(AssertionError, match="should fail"):
        run_block(Block("README.md", 1, "sh", "fails", "", "true\n"), {})
