"""`penstock generate --resume` after runs that were killed."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from cli.test_generate_command import Command, jsonl

LENGTHS = [9, 1, 30, 2, 30, 3, 1]


def own(*lengths: int) -> list[dict[str, Any]]:
    return [{"id": f"r{number}", "prompt": f"p{number}", "max_tokens": n} for number, n in enumerate(lengths)]


def batch(*lengths: int) -> list[dict[str, Any]]:
    return [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": f"p{number}", "max_tokens": n},
        }
        for number, n in enumerate(lengths)
    ]


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def told(line: dict[str, Any]) -> tuple[Any, Any]:
    """Name and text of a result, in either format."""
    if "custom_id" in line:
        return line["custom_id"], line["response"]["body"]["choices"][0]["text"]
    return line["id"], line["text"]


class Run:
    """Runs of one command over one input file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.command = Command(folder)
        self.source = folder / "in.jsonl"
        self.target = folder / "out.jsonl"
        self.partial = folder / "out.jsonl.partial"

    def end(self, number: int, num_lines: int, *arguments: str, suffix: str = "") -> tuple[int, str]:
        """Send the signal once the partial file has so many lines; returns the exit code and what was said."""
        self.command.environment["FAKE_STEP_SECONDS"] = "0.1"
        paths = ["--input", str(self.source), "--output", str(self.target)]
        process = self.command.start(*paths, "--temperature", "1", *arguments)
        deadline = time.monotonic() + 60
        partial = Path(f"{self.partial}{suffix}")
        while not (partial.exists() and partial.read_bytes().count(b"\n") >= num_lines):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        err = process.communicate(timeout=30)[1].decode()
        return process.returncode, err

    def to_the_end(self, *arguments: str, target: Path | None = None, exit_code: int = 0) -> str:
        self.command.environment["FAKE_STEP_SECONDS"] = "0"
        paths = ["--input", str(self.source), "--output", str(target or self.target)]
        return self.command.run(*paths, "--temperature", "1", *arguments, exit_code=exit_code)[1]

    def undisturbed(self) -> list[tuple[Any, Any]]:
        whole = self.folder / "whole.jsonl"
        self.to_the_end(target=whole)
        return [told(line) for line in answers(whole)]

    def left(self) -> set[str]:
        return {path.name for path in self.folder.glob("out.jsonl*")}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.mark.parametrize("form", [own, batch])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(run: Run, form: Any, number: int) -> None:
    run.source.write_text(jsonl(*form(*LENGTHS)))
    exit_code, err = run.end(number, 3)
    # Results are on disk as they come, in whatever order.
    kept = [told(line)[0] for line in answers(run.partial)]
    assert set(kept) >= {"r1", "r6", "r3"}
    assert "r0" not in kept[:2]
    if number == signal.SIGTERM:
        assert exit_code == 143
        assert "with --resume answers the rest" in err
    else:
        assert exit_code == -signal.SIGKILL
    said = run.to_the_end("--resume")
    assert f"answered {len(kept)} of 7 requests" in said
    assert [told(line) for line in answers(run.target)] == run.undisturbed()
    assert run.left() == {"out.jsonl"}


def test_a_line_that_was_cut_off_is_answered_again(run: Run) -> None:
    run.source.write_text(jsonl(*own(*LENGTHS)))
    run.end(signal.SIGKILL, 2)
    run.partial.write_bytes(run.partial.read_bytes()[:-20])
    run.to_the_end("--resume")
    assert [told(line) for line in answers(run.target)] == run.undisturbed()


@pytest.mark.slow
def test_several_killed_runs_add_up(run: Run) -> None:
    run.source.write_text(jsonl(*own(*LENGTHS)))
    run.end(signal.SIGKILL, 2)
    first = answers(run.partial)
    run.end(signal.SIGKILL, 4, "--resume", suffix="2")
    assert answers(Path(f"{run.partial}2"))[:2] == sorted(first[:2], key=lambda line: int(line["index"]))
    assert "answered 4 of 7" in run.to_the_end("--resume")
    assert [told(line) for line in answers(run.target)] == run.undisturbed()
    assert run.left() == {"out.jsonl"}


def test_what_changed_and_what_failed_runs_again(run: Run) -> None:
    lines = own(3, 3, 3)
    run.source.write_text(jsonl(lines[0], lines[1], {**lines[2], "temperature": -1}))
    run.to_the_end(exit_code=1)
    before = answers(run.target)
    run.source.write_text(jsonl(lines[0], {**lines[1], "prompt": "another"}, lines[2]))
    assert "answered 1 of 3" in run.to_the_end("--resume")
    after = answers(run.target)
    assert after[0] == before[0]
    assert [line["prompt"] for line in after] == ["p0", "another", "p2"]
    assert all(line["error"] is None for line in after)


def test_a_complete_file_stays_and_no_engine_starts(run: Run) -> None:
    run.source.write_text(jsonl(*own(3, 2)))
    run.to_the_end()
    before = run.target.read_bytes()
    run.command.environment["FAKE_START"] = "defect"
    assert "answered 2 of 2" in run.to_the_end("--resume")
    assert run.target.read_bytes() == before
    assert "answered 0 of 2" in run.to_the_end("--resume", "--seed", "5", exit_code=1)


@pytest.mark.slow
def test_results_of_a_run_that_goes_on_are_left_to_it(run: Run) -> None:
    run.source.write_text(jsonl(*own(1, 40)))
    run.command.environment["FAKE_STEP_SECONDS"] = "0.1"
    live = run.command.start("--input", str(run.source), "--output", str(run.target))
    while not (run.partial.exists() and run.partial.read_bytes()):
        time.sleep(0.01)
    assert "answered 0 of 2" in run.to_the_end("--resume", "--max-tokens", "1")
    assert live.wait(timeout=60) == 0
    assert run.left() == {"out.jsonl"}


@pytest.mark.parametrize(("arguments", "said"), [((), "without --output"), (("--output", "/dev/stdout"), "in place")])
def test_without_a_file_of_its_own_there_is_nothing_to_resume(run: Run, arguments: Any, said: str) -> None:
    assert said in run.command.run("the fox", "--resume", *arguments, exit_code=2)[1]
