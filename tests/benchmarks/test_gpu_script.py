"""The script for a GPU on a machine without one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import prove


def test_every_part_is_reported_as_not_run_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["prove", "--out", str(tmp_path)])
    assert prove.main() == 0
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["part"] for row in rows] == [part.name for part in prove.PARTS]
    assert all("sees no CUDA device" in row["not run"] for row in rows)


def test_the_files_of_its_tests_are_there() -> None:
    root = Path(prove.__file__).parents[2]
    assert [path for paths in prove.TESTS.values() for path in paths if not (root / path).exists()] == []
