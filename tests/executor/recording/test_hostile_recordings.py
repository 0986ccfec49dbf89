"""A recording is data from elsewhere: it imports nothing, and no number in it ends the process."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.contract import SamplingParams
from penstock.engine.replay import replay
from penstock.errors import InvalidRecording
from support.checkpoints import tiny_checkpoint
from support.engines import add, finish, make_core
from support.mutated_recordings import read_entries, write_entries

VOCAB_SIZE = 99


def _recorded(folder: Path, **options: Any) -> Path:
    tiny_checkpoint(folder / "model", "llama", vocab_size=VOCAB_SIZE)
    file = folder / "steps.rec"
    core = make_core(
        folder / "model",
        record=str(file),
        record_prompts=True,
        block_size=4,
        max_model_len=48,
        max_num_seqs=4,
        **options,
    )
    for number in range(5):
        params = SamplingParams(temperature=0.0, seed=1, max_tokens=6 + number, ignore_eos=True)
        add(core, str(number), [*range(1, 9), *range(20 + number, 25 + number)], params)
    finish(core, {})
    core.close()
    return file


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _recorded(tmp_path_factory.mktemp("recording"))


def _first_new(entries: list[Any]) -> Any:
    step = next(
        entry["step"] for entry in entries if entry["type"] == "executed" and entry["step"]["scheduled_new_reqs"]
    )
    return step["scheduled_new_reqs"][0]


def _last_cached(entries: list[Any]) -> Any:
    steps = [entry["step"] for entry in entries if entry["type"] == "executed"]
    return next(step for step in reversed(steps) if step["scheduled_cached_reqs"]["req_ids"])


def _decode(entries: list[Any]) -> Any:
    """A decode step that repeats no other one, whose counts the worker uses."""
    steps = [entry["step"] for entry in entries if entry["type"] == "executed"]
    return next(step for step in steps if step["scheduled_cached_reqs"]["req_ids"] and step["repeats_step_id"] is None)


def _set(container: Any, key: Any, value: Any) -> None:
    container[key] = value


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda entries: _set(_first_new(entries)["block_ids"][0], 0, 10**6), "block_ids=1000000"),
        (lambda entries: _set(_first_new(entries)["block_ids"][0], 0, -1), "block_ids=-1"),
        (lambda entries: _first_new(entries)["block_ids"][0].extend(range(1, 40)), "block_ids=4. blocks"),
        (lambda entries: _first_new(entries)["block_ids"].append([1]), "block_ids=2 lists"),
        (lambda entries: _set(_first_new(entries)["prefill_token_ids"], 0, VOCAB_SIZE), "prefill_token_ids=99"),
        (lambda entries: _set(_first_new(entries), "num_computed_tokens", 10**9), "num_computed_tokens=1000000000"),
        (
            lambda entries: _set(_decode(entries)["scheduled_cached_reqs"]["num_computed_tokens"], 0, 1),
            "num_computed_",
        ),
        (lambda entries: _set(_last_cached(entries)["num_scheduled_tokens"], "4", 30), "num_scheduled_tokens=30"),
        (lambda entries: _set(_last_cached(entries)["num_scheduled_tokens"], "4", 0), "num_scheduled_tokens"),
        (lambda entries: _set(_last_cached(entries)["num_scheduled_tokens"], "9", 1), "num_scheduled_tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "change",
)
def test_a_number_that_no_engine_records_is_refused_by_name(
    change: Callable[[list[Any]], None], named: str, recording: Path, tmp_path: Path
) -> None:
    line, entries = read_entries(recording)
    change(entries)
    write_entries(tmp_path / "changed.rec", line, entries)
    with pytest.raises(InvalidRecording, match=rf"changed.rec cannot be replayed: .*[Ss]tep \d+.*{named}"):
        replay(tmp_path / "changed.rec")


def test_an_entry_that_is_nested_too_deep_is_refused(recording: Path, tmp_path: Path) -> None:
    line, entries = read_entries(recording)
    nested: Any = 1
    for _ in range(300):
        nested = [nested]
    entries[0]["options"]["model_loader_extra_config"] = nested
    write_entries(tmp_path / "deep.rec", line, entries)
    data = (tmp_path / "deep.rec").read_bytes()
    (length,) = struct.unpack_from("<I", data, len(line) + 1)
    first = data[len(line) + 9 :][:length].replace(b"\x91" * 300, b"\x91" * 30_000)
    (tmp_path / "deep.rec").write_bytes(line + b"\n" + struct.pack("<II", len(first), zlib.crc32(first)) + first)
    with pytest.raises(InvalidRecording, match=r"deep.rec is damaged at byte \d+: maximum recursion depth"):
        replay(tmp_path / "deep.rec")


def test_the_recording_itself_is_replayed(recording: Path, tmp_path: Path) -> None:
    line, entries = read_entries(recording)
    write_entries(tmp_path / "same.rec", line, entries)
    assert replay(tmp_path / "same.rec").is_equal


@pytest.mark.parametrize(
    "option", [{"worker_cls": "evil.Worker"}, {"worker_extension_cls": "evil.X"}, {"logits_processors": ["evil:P"]}]
)
def test_what_a_recording_names_is_imported_only_if_it_is_trusted(
    option: dict[str, Any], recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    line, entries = read_entries(recording)
    entries[0]["options"] |= option
    write_entries(tmp_path / "named.rec", line, entries)
    (name,) = option
    with pytest.raises(InvalidRecording, match=f"names Python code.*{name}=.*--trust-imports"):
        replay(tmp_path / "named.rec")
    assert not (tmp_path / "imported").exists()
    other: dict[str, Any] = {name: [] if name == "logits_processors" else None}
    assert replay(tmp_path / "named.rec", **other).is_equal
    with pytest.raises(Exception, match=name):
        replay(tmp_path / "named.rec", trust_imports=True)
    assert (tmp_path / "imported").exists()


@pytest.mark.parametrize("num_examples", [8, pytest.param(400, marks=pytest.mark.slow)])
def test_no_mutation_of_a_recording_ends_the_process(num_examples: int, recording: Path) -> None:
    command = [sys.executable, "-m", "support.mutated_recordings", str(recording), str(num_examples)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
