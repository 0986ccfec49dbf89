"""Checkouts beside each other: what is compared, and how."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from benchmarks.compare import Table, first_character, main
from benchmarks.workloads import Workload

_WORKLOAD = Workload("short", "a short one", [[10, 11]], [6], "output tok/s")


def test_ratios_are_those_within_turns():
    """The machine was twice as slow in the second turn; within each turn the second checkout took two thirds."""
    table = Table([Path("before"), Path("after")], {"threads": 2})
    table.add("Penstock int8", _WORKLOAD, [[3.0, 2.0], [6.0, 4.0], [3.0, 2.0]])
    table.add("a command", None, [[1.0, 2.0]])
    assert table.as_markdown().splitlines()[-4:] == [
        "| Penstock int8 | a short one | before | 2 output tok/s | 100% |  |",
        "| Penstock int8 | a short one | after | 3 output tok/s | 100% | 1.50 × as fast |",
        "| a command | process start to first character | before | 1.00 s | 0% |  |",
        "| a command | process start to first character | after | 2.00 s | 0% | 0.50 × as fast |",
    ]


def test_a_folder_without_penstock_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert f"{tmp_path} is no checkout of Penstock: it has no folder src/penstock" in capsys.readouterr().err


def test_a_checkout_that_does_not_run_is_named(tmp_path):
    package = tmp_path / "src" / "penstock"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('broken')\n")
    with pytest.raises(SystemExit, match=str(tmp_path)):
        first_character(tmp_path)
