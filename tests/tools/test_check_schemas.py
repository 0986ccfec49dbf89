"""The comparison of schemas runs as its page says, and counts what passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import check_schemas


def test_a_file_of_schemas_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = [{"data": 1, "valid": True}, {"data": "a", "valid": False}]
    cases = [
        {"name": "integer", "schema": {"type": "integer"}, "tests": tests},
        {"name": "items", "schema": {"$dynamicRef": "#a"}, "tests": []},
    ]
    path = tmp_path / "schemas.jsonl"
    path.write_text("\n".join(map(json.dumps, cases)))
    monkeypatch.setattr("sys.argv", ["check_schemas.py", str(path)])
    assert check_schemas.main() == 0
    printed = capsys.readouterr().out
    for line in ("2 schemas", "1 accepted", "1 refused", "1 valid, passes", "1 invalid, does not pass"):
        assert f" {line}\n" in printed
