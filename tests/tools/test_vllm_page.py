"""docs/vllm.md is what its tool writes, and names everything that the table has."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from penstock.config import vllm

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_page", ROOT / "tools/vllm_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_tool_writes(tool: ModuleType) -> None:
    page: str = tool.render(tomllib.loads(tool.TABLE.read_text(encoding="utf-8")))
    assert tool.PAGE.read_text(encoding="utf-8") == page, "python tools/vllm_page.py writes the page"


def test_the_page_has_every_name(tool: ModuleType) -> None:
    page = tool.PAGE.read_text(encoding="utf-8")
    table = vllm.table()
    names = [name for entries in table.entries.values() for name in entries if not name.startswith("_")]
    names += [name for kind in (*table.same.values(), *table.ignored.values()) for name in kind]
    names += [name for kind in table.other_names.values() for name in kind]
    assert [name for name in names if name not in page] == []
    assert [feature.name for feature in table.features if feature.name not in page] == []
