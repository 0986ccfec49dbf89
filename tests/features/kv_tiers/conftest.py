"""Folder for blocks of the KV cache."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "blocks").mkdir()
    return tmp_path / "blocks"
