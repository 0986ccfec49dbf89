"""`penstock generate` as people run it: the real core, the shipped demo model, a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "penstock.cli", "generate", "--device", "cpu", "--option", "num_threads=1"]


def start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def run(*arguments: str, exit_code: int = 0) -> tuple[str, str]:
    process = start(*arguments)
    out, err = process.communicate(timeout=120)
    assert process.returncode == exit_code, err.decode()
    return out.decode(), err.decode()


def test_garbage_is_collected_once_the_engine_has_started() -> None:
    """Objects of start-up are frozen; the library leaves its process's settings alone."""
    program = """
import gc, sys
from penstock.cli.main import main
from penstock.engine.session import Session
start = Session.__init__
def watched(self, config):
    print(gc.isenabled(), file=sys.stderr)
    start(self, config)
Session.__init__ = watched
sys.argv = ["penstock", "generate", "To be", "--max-tokens", "3", "--device", "cpu"]
try:
    main()
finally:
    print(gc.isenabled(), gc.get_freeze_count() > 100_000, file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    answers = [line for line in result.stderr.splitlines() if set(line.split()) <= {"True", "False"}]
    assert answers == ["False", "True True"]


def test_text_is_streamed_and_the_log_is_short() -> None:
    process = start("To be", "--max-tokens", "100", "--ignore-eos")
    assert process.stdout is not None
    first = process.stdout.read(1)
    assert process.poll() is None
    rest, err = process.communicate(timeout=120)
    assert len(first + rest) > 50
    assert len(err.decode().splitlines()) <= 10
    assert process.returncode == 0


def test_transformers_is_not_imported_on_the_way_to_the_first_character() -> None:
    command = [sys.executable, "-X", "importtime", *COMMAND[1:], "To be", "--max-tokens", "1"]
    err = subprocess.run(command, capture_output=True, text=True, timeout=120).stderr
    imported = {line.rsplit("|", 1)[-1].strip() for line in err.splitlines() if line.startswith("import time:")}
    assert "torch" in imported
    assert not imported & {"transformers", "huggingface_hub", "rich", "jinja2"}


def test_a_file_of_requests_is_answered_in_order(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "To be", "max_tokens": 3 + number, "ignore_eos": True} for number in range(5)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run("--input", str(source), "--output", str(target))
    results = [json.loads(line) for line in target.read_text().splitlines()]
    assert [result["index"] for result in results] == [0, 1, 2, 3, 4]
    assert [len(result["token_ids"]) for result in results] == [3, 4, 5, 6, 7]


def test_the_text_is_that_of_the_python_interface() -> None:
    from penstock import LLM, SamplingParams

    out, _ = run("To be", "--max-tokens", "8", "--seed", "4", "--top-k", "20", "--ignore-eos")
    with LLM("demo", device="cpu", num_threads=1, kv_cache_memory_bytes=32 * 1024**2) as llm:
        params = SamplingParams(max_tokens=8, seed=4, top_k=20, ignore_eos=True)
        assert llm.generate("To be", params)[0].outputs[0].text == out.removesuffix("\n")


def test_ctrl_c_ends_cleanly() -> None:
    process = start("To be", "--max-tokens", "900", "--ignore-eos")
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err.decode()


@pytest.mark.parametrize("delay_s", [0.1, 0.2, 0.5, 1.0])
def test_ctrl_c_while_starting_ends_cleanly(delay_s: float) -> None:
    process = start("To be", "--max-tokens", "900", "--ignore-eos")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=delay_s)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    # On a busy machine the interpreter itself may not be up yet: then the signal ends it, which shells call 130 too.
    assert process.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in err.decode()


def test_a_closed_pipe_ends_it_quietly() -> None:
    process = start("To be", "--max-tokens", "900", "--ignore-eos")
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr is not None
    err = process.stderr.read().decode()
    assert "Traceback" not in err
    assert "BrokenPipe" not in err


def test_a_prompt_that_does_not_fit_is_one_message() -> None:
    out, err = run("word " * 2000, exit_code=2)
    assert out == ""
    assert "ContextTooLong: The prompt has" in err
    assert "Traceback" not in err
