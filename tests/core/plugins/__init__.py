"""Features as plugins would add them: each module registers itself and changes nothing of the package."""

from __future__ import annotations

from pathlib import Path

import pytest


def install_plugin(folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make these modules known to all processes that are started, as an installed package with entry points does."""
    info = folder / "penstock_test_plugins-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock-test-plugins\nVersion: 1.0\n")
    entry_points = "\n".join(f"{name} = core.plugins.{name}:register" for name in names)
    (info / "entry_points.txt").write_text(f"[penstock.general_plugins]\n{entry_points}\n")
    monkeypatch.syspath_prepend(str(folder))
