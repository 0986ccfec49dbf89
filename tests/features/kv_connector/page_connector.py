"""The connector of the documentation's page, in a module that all processes of an engine can import."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

_PAGE = Path(__file__).parents[3] / "docs" / "kv_connectors.md"


class PageConnector:
    """A folder of blocks. config: `kv_transfer_config`. further: code behind the page's, which may derive from it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, further: str = "", name: str = "FolderConnector"):
        self.blocks = folder / "blocks"
        modules = folder / "modules"
        for one in (self.blocks, modules):
            one.mkdir()
        code = _PAGE.read_text().partition("<!-- file: folder_connector.py -->\n```python\n")[2].partition("```")[0]
        (modules / "folder_connector.py").write_text(code + further)
        monkeypatch.syspath_prepend(modules)
        monkeypatch.delitem(sys.modules, "folder_connector", raising=False)
        monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
        self.config: dict[str, Any] = {
            "kv_connector": name,
            "kv_connector_module_path": "folder_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"folder": str(self.blocks)},
        }
