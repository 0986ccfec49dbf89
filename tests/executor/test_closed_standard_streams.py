"""Engines start, and keep their descriptors apart, in a process whose standard streams are closed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.checkpoints import tiny_checkpoint
from support.engines import SMALL
from support.fake_engine import byte_level_tokenizer, write_tokenizer

pytestmark = pytest.mark.fresh_interpreters
PROGRAM = """
import os
for descriptor in {closed}:
    os.close(descriptor)
import psutil
from penstock import LLM, SamplingParams

def main():
    with LLM({folder!r}, **{options!r}) as llm:
        tokens = llm.generate("hello", SamplingParams(max_tokens=4, temperature=0))[0].outputs[0].token_ids
        lines = [f"tokens {{list(tokens)}}"]
        for process in psutil.Process().children():
            for descriptor in (0, 1, 2):
                target = os.readlink(f"/proc/{{process.pid}}/fd/{{descriptor}}")
                lines.append(f"{{process.pid}} {{descriptor}} {{target}}")
    open({out!r}, "w").write("\\n".join(lines))

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_checkpoint(path, vocab_size=400)
    write_tokenizer(path, byte_level_tokenizer())
    return path


def run(tmp_path: Path, folder: Path, closed: tuple[int, ...], **options: object) -> list[str]:
    out = tmp_path / "out.txt"
    program = tmp_path / f"program{len(closed)}.py"
    settings = {**SMALL, "max_model_len": 64, **options}
    program.write_text(PROGRAM.format(closed=closed, folder=str(folder), options=settings, out=str(out)))
    subprocess.run([sys.executable, str(program)], check=True, timeout=120, stdout=subprocess.DEVNULL)
    return out.read_text().splitlines()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.slow
def test_the_answer_is_the_same_without_standard_streams(tmp_path: Path, folder: Path, num_ranks: int) -> None:
    options = {"tensor_parallel_size": num_ranks, "num_threads": 2}
    expected = run(tmp_path, folder, (), **options)
    closed = run(tmp_path, folder, (0, 1, 2), **options)
    assert closed[0] == expected[0]
    descriptors = [line.split(maxsplit=2)[2] for line in closed[1:]]
    assert set(descriptors) <= {os.devnull}, closed
    assert num_ranks == 1 or len(descriptors) >= 3 * num_ranks


@pytest.mark.slow
def test_a_model_loads_in_a_process_that_began_without_standard_error(folder: Path) -> None:
    script = f"""
import sys
assert sys.stderr is None
from penstock import LLM
LLM({str(folder)!r}, **{ {**SMALL, "max_model_len": 64}!r}).close()
print("ready")
"""
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, script], capture_output=True, timeout=120
    )
    assert done.stdout == b"ready\n"


def test_messages_do_not_mix_with_results_when_standard_error_is_closed(tmp_path: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "penstock", "generate", "-m", str(folder / "missing"), "hello"]
    done = subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", *command], capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, b"")


def test_results_without_standard_output_are_refused(folder: Path) -> None:
    command = [sys.executable, "-m", "penstock", "generate", "-m", str(folder), "hello"]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == 2
    assert b"Standard output is closed" in done.stderr
