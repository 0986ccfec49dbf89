"""`penstock generate` as a process, over a core that makes up its tokens."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support.fake_engine import write_model

FAKE_PENSTOCK = Path(__file__).parents[1] / "support" / "fake_penstock.py"


class Command:
    """Runs `penstock generate` with a model folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.model = str(write_model(folder / "model"))
        self.environment = {**os.environ, "COLUMNS": "100"}
        self.environment.pop("PENSTOCK_LOG_LEVEL", None)

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(FAKE_PENSTOCK), "generate", "--model", self.model, *arguments]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return subprocess.Popen(command, env=self.environment, **pipes)

    def run(self, *arguments: str, stdin: str | bytes = b"", exit_code: int = 0) -> tuple[str, str]:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        process = self.start(*arguments, stdin=subprocess.PIPE)
        out, err = process.communicate(data, timeout=60)
        assert process.returncode == exit_code, err.decode()
        return out.decode(), err.decode()

    def results(self, *arguments: str, stdin: str = "") -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.run(*arguments, stdin=stdin)[0].splitlines()]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path)


def jsonl(*lines: dict[str, Any]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_one_prompt_is_answered_with_text(command: Command) -> None:
    out, err = command.run("the fox", "--max-tokens", "6")
    assert out.endswith("\n")
    assert out == command.results("the fox", "--max-tokens", "6", "--json")[0]["text"] + "\n"
    assert err == ""


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_the_prompt_may_come_from_standard_input(command: Command, arguments: list[str]) -> None:
    (result,) = command.results(*arguments, "--json", stdin="the fox\n")
    assert result["prompt"] == "the fox"


def test_text_is_written_as_it_comes(command: Command) -> None:
    command.environment["FAKE_STEP_SECONDS"] = "0.1"
    process = command.start("the fox", "--max-tokens", "50", "--seed", "16")
    assert process.stdout is not None
    first = process.stdout.read(1)
    assert first
    assert process.poll() is None
    process.kill()
    process.communicate()


def test_a_file_of_requests_gives_results_in_its_order(command: Command, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        jsonl({"prompt": "a", "max_tokens": 9}, {"prompt_token_ids": [9, 10], "id": "two"})
        + "\n"
        + jsonl({"prompt": "c", "logprobs": 1, "max_tokens": 1})
    )
    out, err = command.run("--input", str(source), "--output", str(target), "--max-tokens", "2")
    assert (out, err) == ("", "")
    results = [json.loads(line) for line in target.read_text().splitlines()]
    assert [result["index"] for result in results] == [0, 1, 2]
    assert [len(result["token_ids"]) for result in results] == [9, 2, 1]
    assert [result["prompt"] for result in results] == ["a", [9, 10], "c"]
    assert [result["id"] for result in results] == [None, "two", None]
    assert results[0]["logprobs"] is None
    (row,) = results[2]["logprobs"]
    assert row[str(results[2]["token_ids"][0])]["rank"] == 2


def test_the_models_own_parameters_count_where_no_flag_is_given(command: Command) -> None:
    Path(command.model, "generation_config.json").write_text('{"max_new_tokens": 5}')
    lines = jsonl({"prompt": "a"}, {"prompt": "b", "max_tokens": 2})
    for arguments, lengths in [([], [5, 2]), (["--max-tokens", "3"], [3, 2])]:
        results = command.results("--input", "-", *arguments, stdin=lines)
        assert [len(result["token_ids"]) for result in results] == lengths
    assert "take max_new_tokens=5 (from " in command.run("a")[1]


def test_requests_may_come_from_standard_input(command: Command) -> None:
    assert len(command.results("--input", "-", stdin=jsonl({"prompt": "a"}, {"prompt": "b"}))) == 2


def test_results_are_written_as_soon_as_their_turn_comes(command: Command) -> None:
    command.environment["FAKE_STEP_SECONDS"] = "0.2"
    requests = jsonl({"prompt": "a", "max_tokens": 1}, {"prompt": "b", "max_tokens": 50})
    process = command.start("--input", "-", stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(requests.encode())
    process.stdin.close()
    assert json.loads(process.stdout.readline())["prompt"] == "a"
    assert process.poll() is None
    process.kill()
    process.wait()


def test_a_file_without_requests_gives_no_results(command: Command) -> None:
    assert command.results("--input", "-", stdin="\n") == []


def test_logprobs_are_shown_as_json(command: Command) -> None:
    (result,) = command.results("the fox", "--logprobs", "2", "--max-tokens", "3")
    assert [len(row) for row in result["logprobs"]] == [2, 2, 2]
    assert result["cumulative_logprob"] == -3.0


def test_several_outputs_of_a_prompt_are_shown_as_json(command: Command) -> None:
    results = command.results("the fox", "--n", "3", "--max-tokens", "4", "--seed", "1")
    assert [(result["index"], result["sample"]) for result in results] == [(0, 0), (0, 1), (0, 2)]
    assert len({result["text"] for result in results}) == 3
    requests = jsonl({"prompt": "a"}, {"prompt": "b", "n": 1})
    results = command.results("--input", "-", "--n", "2", "--max-tokens", "2", stdin=requests)
    assert [(result["index"], result["sample"]) for result in results] == [(0, 0), (0, 1), (1, 0)]
    assert "--n 0 is not valid" in command.run("the fox", "--n", "0", exit_code=2)[1]


def test_stop_texts_end_the_output(command: Command) -> None:
    arguments = ("the fox", "--max-tokens", "12", "--seed", "1")
    text = command.results(*arguments, "--json")[0]["text"]
    plain = [character for character in text if character.isascii() and character.isalnum()]
    early, late = plain[1], plain[-1]
    end = text.find(early)
    assert 0 < end < text.find(late)
    (stopped,) = command.results(*arguments, "--json", "--stop", late, "--stop", early)
    assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == (text[:end], "stop", early)
    assert command.run(*arguments, "--stop", early)[0] == text[:end] + "\n"
    assert "stop=('',) is not valid" in command.run("the fox", "--stop", "", exit_code=2)[1]


def test_a_prompt_of_broken_text_is_refused(command: Command) -> None:
    assert "no UTF-8 text" in command.run(stdin=b"\xff", exit_code=2)[1]
    process = command.start(os.fsdecode(b"\xff"))
    assert b"is not a character" in process.communicate(timeout=60)[1]
    assert process.returncode == 2


def test_without_a_prompt_on_a_terminal_it_says_what_to_give(command: Command) -> None:
    controller, terminal = pty.openpty()
    process = command.start(stdin=terminal)
    os.close(terminal)
    err = process.communicate(timeout=60)[1].decode()
    os.close(controller)
    assert process.returncode == 2
    assert "There is no prompt. Give one as argument" in err


def test_failed_requests_are_counted_and_the_others_answered(command: Command) -> None:
    command.environment["FAKE_FAILING"] = "9"
    requests = jsonl({"prompt_token_ids": [9]}, {"prompt_token_ids": [10]})
    out, err = command.run("--input", "-", stdin=requests, exit_code=1)
    failed, fine = map(json.loads, out.splitlines())
    assert (failed["finish_reason"], failed["error"]) == ("error", "the logits are NaN")
    assert (fine["finish_reason"], fine["error"]) == ("length", None)
    assert "1 of 2 requests failed" in err


def test_a_failed_prompt_says_why(command: Command) -> None:
    command.environment["FAKE_FAILING"] = "0"
    out, err = command.run("x", exit_code=1)
    assert out.endswith("\n")
    assert err == "penstock: the logits are NaN\n"


def test_a_failing_start_is_one_message(command: Command) -> None:
    command.environment["FAKE_START"] = "memory"
    err = command.run("x", exit_code=1)[1]
    assert err == "penstock: OutOfMemory: 12 GiB of weights do not fit into 8 GiB.\n"


def test_a_defect_shows_its_traceback_only_when_asked(command: Command) -> None:
    command.environment["FAKE_START"] = "defect"
    quiet = command.run("x", exit_code=1)[1]
    assert quiet == (
        "penstock: internal error, ZeroDivisionError: a defect. Run it again with --debug for the traceback.\n"
    )
    assert "Traceback" in command.run("x", "--debug", exit_code=1)[1]
    command.environment["PENSTOCK_LOG_LEVEL"] = "debug"
    assert "Traceback" in command.run("x", exit_code=1)[1]


@pytest.fixture
def slow(command: Command, tmp_path: Path) -> Command:
    command.environment |= {"FAKE_STEP_SECONDS": "0.05", "FAKE_CLOSED": str(tmp_path / "closed")}
    return command


def wait_for_output(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    assert process.stdout.read(1)


def test_ctrl_c_ends_cleanly(slow: Command, tmp_path: Path) -> None:
    process = slow.start("the fox", "--max-tokens", "60")
    wait_for_output(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert out.endswith(b"\n")
    assert err == b""
    assert (tmp_path / "closed").read_text() == "0 running"


def test_a_second_ctrl_c_does_not_wait(slow: Command, tmp_path: Path) -> None:
    slow.environment["FAKE_CLOSE_SECONDS"] = "30"
    process = slow.start("the fox", "--max-tokens", "60")
    wait_for_output(process)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == -signal.SIGINT
    assert process.communicate()[1] == b""


def interrupted(command: Command, source: Path, target: Path, suffix: str = ".partial", after_s: float = 0) -> str:
    """Ctrl-C so long after there is a result in the file of that suffix; returns what is said then."""
    process = command.start("--input", str(source), "--output", str(target))
    deadline = time.monotonic() + 20
    partial = Path(f"{target}{suffix}")
    while not (partial.exists() and partial.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=20)[1].decode()
    assert process.returncode == 130
    return err


def prompts_in(path: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()]


def test_results_before_ctrl_c_are_kept_beside_what_was_there(slow: Command, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(jsonl({"prompt": "a", "max_tokens": 1}, {"prompt": "b", "max_tokens": 60}))
    err = interrupted(slow, source, target)
    assert err == (
        f"penstock: ended early; 1 line is in {target}.partial, and {target} was not touched. "
        "The same command with --resume answers the rest.\n"
    )
    assert not target.exists()
    assert prompts_in(tmp_path / "out.jsonl.partial") == ["a"]
    (tmp_path / "out.jsonl.partial").unlink()
    target.write_text("precious\n")
    interrupted(slow, source, target)
    assert target.read_text() == "precious\n"
    # What an earlier run kept stays as well, and a run that ends well leaves nothing but its output.
    slow.run("--input", str(source), "--output", str(target), "--max-tokens", "1")
    assert prompts_in(target) == ["a", "b"]
    assert prompts_in(tmp_path / "out.jsonl.partial") == ["a"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "model",
        "in.jsonl",
        "out.jsonl",
        "out.jsonl.partial",
        "closed",
    }


def test_results_that_wait_for_an_earlier_one_are_kept_too(slow: Command, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    numbers = [1, 60, 2, 60, 3]
    source.write_text(jsonl(*({"prompt": str(number), "max_tokens": number} for number in numbers)))
    slow.environment["FAKE_STEP_SECONDS"] = "0.3"
    assert "3 lines are in" in interrupted(slow, source, target, after_s=2)
    kept = (tmp_path / "out.jsonl.partial").read_text().splitlines()
    assert [json.loads(line)["index"] for line in kept] == [0, 2, 4]


def test_results_that_wait_on_standard_output_are_written_at_the_end(slow: Command, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(jsonl(*({"prompt": str(number), "max_tokens": number} for number in (1, 60, 2, 3))))
    slow.environment["FAKE_STEP_SECONDS"] = "0.1"
    process = slow.start("--input", str(source))
    assert process.stdout is not None
    first = process.stdout.readline()
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out = process.communicate(timeout=20)[0]
    assert process.returncode == 130
    assert [json.loads(line)["index"] for line in (first + out).splitlines()] == [0, 2, 3]


def test_the_same_options_twice_in_a_folder_keep_both_partial_files(slow: Command, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(jsonl({"prompt": "a", "max_tokens": 1}, {"prompt": "b", "max_tokens": 60}))
    interrupted(slow, source, target)
    err = interrupted(slow, source, target, ".partial2")
    assert f"{target}.partial2" in err
    assert prompts_in(tmp_path / "out.jsonl.partial2") == prompts_in(tmp_path / "out.jsonl.partial") == ["a"]


@pytest.mark.parametrize("kind", ["same", "symbolic link", "hard link", "relative", "standard input"])
def test_the_input_cannot_be_the_output(command: Command, tmp_path: Path, kind: str) -> None:
    source = tmp_path / "in.jsonl"
    other = tmp_path / "other.jsonl"
    source.write_text(jsonl({"prompt": "a"}))
    if kind == "symbolic link":
        other.symlink_to(source)
    elif kind == "hard link":
        other.hardlink_to(source)
    else:
        other = tmp_path / "model" / ".." / "in.jsonl" if kind == "relative" else source
    with source.open() as file:
        given = "-" if kind == "standard input" else str(source)
        process = command.start("--input", given, "--output", str(other), stdin=file)
        err = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 2
    assert f"--output {other} is the file of --input {given}. Give another one" in err
    assert source.read_text() == jsonl({"prompt": "a"})


def test_the_output_may_be_a_pipe_a_device_or_standard_output(command: Command, tmp_path: Path) -> None:
    assert json.loads(command.run("x", "--output", "/dev/stdout")[0])["prompt"] == "x"
    assert command.run("x", "--output", "/dev/null") == ("", "")
    assert Path("/dev/null").is_char_device()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = command.start("x", "--output", str(pipe))
    assert json.loads(pipe.read_text())["prompt"] == "x"
    assert process.wait(timeout=60) == 0
    log = tmp_path / "log"
    (tmp_path / "link").symlink_to("/dev/stdout")
    for name in ("/dev/stdout", "/dev/fd/1", str(tmp_path / "link")):
        with log.open("w") as file:
            number = os.fstat(file.fileno()).st_ino
            assert command.start("x", "--output", name, stdout=file).wait(timeout=60) == 0
        assert prompts_in(log) == ["x"]
        assert log.stat().st_ino == number
    assert not list(tmp_path.glob("*.partial"))


def test_a_link_stays_a_link_and_permissions_stay(command: Command, tmp_path: Path) -> None:
    target, link = tmp_path / "target.jsonl", tmp_path / "link.jsonl"
    target.write_text("before")
    target.chmod(0o640)
    link.symlink_to(target)
    command.run("x", "--output", str(link))
    assert link.is_symlink()
    assert prompts_in(target) == ["x"]
    assert target.stat().st_mode & 0o777 == 0o640
    (tmp_path / "dangling").symlink_to(tmp_path / "new.jsonl")
    command.run("x", "--output", str(tmp_path / "dangling"))
    assert prompts_in(tmp_path / "new.jsonl") == ["x"]


def test_a_run_that_fails_before_its_first_result_leaves_nothing(command: Command, tmp_path: Path) -> None:
    command.environment["FAKE_START"] = "memory"
    target = tmp_path / "out.jsonl"
    target.write_text("before")
    command.run("x", "--output", str(target), exit_code=1)
    assert target.read_text() == "before"
    assert not list(tmp_path.glob("*.partial"))
    assert "cannot be opened: Is a directory" in command.run("x", "--output", str(tmp_path), exit_code=2)[1]


def test_ctrl_c_that_a_library_turns_into_its_own_error_is_still_ctrl_c(slow: Command) -> None:
    slow.environment["FAKE_START"] = "interrupted import"
    process = slow.start("the fox")
    wait_for_output(process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert process.stderr is not None
    assert process.stderr.read() == b""


def test_ctrl_c_that_an_import_would_swallow_ends_the_command(slow: Command) -> None:
    slow.environment["FAKE_START"] = "swallowed in an import"
    process = slow.start("the fox", "--max-tokens", "60")
    wait_for_output(process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=5) == 130
    assert process.stderr is not None
    assert process.stderr.read() == b""


@pytest.mark.parametrize("output", [[], ["--json"]])
def test_a_closed_pipe_ends_it_quietly(slow: Command, tmp_path: Path, output: list[str]) -> None:
    requests = jsonl(*({"prompt": "a", "max_tokens": number} for number in range(1, 50)))
    (tmp_path / "in.jsonl").write_text(requests)
    arguments = ["--input", str(tmp_path / "in.jsonl")] if output else ["the fox", "--max-tokens", "60"]
    process = slow.start(*arguments)
    wait_for_output(process)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=20) == 141
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert (tmp_path / "closed").read_text() == "0 running"


def test_head_gets_its_line(command: Command, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(jsonl(*({"prompt": "a", "max_tokens": n} for n in range(1, 30))))
    process = command.start("--input", str(tmp_path / "in.jsonl"))
    head = subprocess.run(["head", "-1"], stdin=process.stdout, capture_output=True, timeout=60)
    assert process.stdout is not None
    process.stdout.close()
    assert json.loads(head.stdout)["index"] == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.wait(timeout=20)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_cannot_show_a_character_shows_a_question_mark(command: Command, encoding: str) -> None:
    command.environment["PYTHONIOENCODING"] = encoding
    assert "?" in command.run("the fox", "--max-tokens", "30")[0]


def test_json_is_utf_8_whatever_the_terminal(command: Command) -> None:
    command.environment["PYTHONIOENCODING"] = "ascii"
    assert command.results("über", "--json")[0]["prompt"] == "über"
