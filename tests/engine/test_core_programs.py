"""Scripts whose engines have cores in processes of their own: requirements, and leaks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.fake_engine import write_model
from support.waiting import wait_until

LIMIT_S = 120
START = """
    import os, sys, time
    from penstock import LLM, SamplingParams
    from penstock.config import EngineConfig
    from penstock.engine.core_group import CoreGroup
    from support.fake_engine import FakeCore, load_fake_core
"""


def start(folder: Path, source: str, **options: Any) -> subprocess.Popen[str]:
    script = folder / "program.py"
    script.write_text(textwrap.dedent(START) + textwrap.dedent(source))
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        **options,
    )


def wait_for_the_end_of(pids: list[int]) -> None:
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "all end with their program")


def test_a_program_needs_no_guard_and_no_close_and_says_nothing_at_its_end(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    program = f"""
        core = CoreGroup(EngineConfig.create({str(model)!r}, data_parallel_size=2), load_fake_core)
        print(*core.process_ids)
    """
    program_process = start(tmp_path, program)
    out, err = program_process.communicate(timeout=LIMIT_S)
    assert (program_process.returncode, err) == (0, "")
    wait_for_the_end_of([int(pid) for pid in out.split()])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_cores_end_with_their_program_even_while_they_stand_still(tmp_path: Path, number: signal.Signals) -> None:
    model = write_model(tmp_path / "model")
    program = f"""
        core = CoreGroup(EngineConfig.create({str(model)!r}, data_parallel_size=2), load_fake_core)
        print(*core.process_ids, flush=True)
        time.sleep(3600)
    """
    with start(tmp_path, program) as program_process:
        assert program_process.stdout is not None
        pids = [int(pid) for pid in program_process.stdout.readline().split()]
        os.kill(pids[0], signal.SIGSTOP)
        program_process.send_signal(number)
        program_process.wait(LIMIT_S)
    wait_for_the_end_of(pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.one_case_quick
def test_what_asks_a_group_of_processes_to_end_is_the_program_s_alone(tmp_path: Path, number: signal.Signals) -> None:
    """SIGTERM of the process group is handled by the script alone, which may finish with its cores and workers."""
    program = f"""
        import signal, threading

        def pids(worker):
            return os.getpid(), os.getppid()

        def generate():
            ids = [output.outputs[0].token_ids for output in llm.generate(["ROMEO:", "JULIET:"], params)]
            return ids, llm.collective_rpc(pids)

        if __name__ == "__main__":
            asked = threading.Event()
            signal.signal({int(number)}, lambda *_: asked.set())
            params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
            options = {{"device": "cpu", "num_threads": 2, "kv_cache_memory_bytes": "16MiB"}}
            with LLM("demo", enable_multiprocessing=True, tensor_parallel_size=2, **options) as llm:
                before = generate()
                print(flush=True)
                asked.wait()
                print(generate() == before)
    """
    with start(tmp_path, program, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (0, "True\n"), err


def test_what_the_program_defines_reaches_cores_and_their_workers(tmp_path: Path) -> None:
    program = """
        from penstock.runner.sampling.logits_processor import LogitsProcessor

        def name_of(worker):
            return type(worker.config.sampling.logits_processors[0]).__name__, os.getpid() != PARENT

        class OnlyFives(LogitsProcessor):
            name = "fives"

            def add_request(self, slot, params, *tokens):
                return True

            def apply(self, logits, rows):
                wanted = logits[:, 5].clone()
                logits.fill_(float("-inf"))
                logits[:, 5] = wanted
                return logits

        PARENT = os.getppid() if __name__ != "__main__" else os.getpid()
        if __name__ == "__main__":
            options = {"device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": "16MiB"}
            with LLM(
                "demo", enable_multiprocessing=True, distributed_executor_backend="mp", logits_processors=[OnlyFives],
                **options,
            ) as llm:
                (output,) = llm.generate("ROMEO:", SamplingParams(max_tokens=3, ignore_eos=True))
                print(output.outputs[0].token_ids, len(llm.collective_rpc(name_of)))
    """
    out, err = start(tmp_path, program).communicate(timeout=LIMIT_S)
    assert out.split("\n")[0] == "[5, 5, 5] 1", err


@pytest.mark.slow
def test_what_a_worker_starts_does_not_run_the_program(tmp_path: Path) -> None:
    """A script without pickled functions of its own needs no `__main__` guard."""
    (tmp_path / "extension.py").write_text(
        textwrap.dedent("""
            import multiprocessing

            def answer(answers):
                answers.put(42)

            class Extension:
                def ask(self):
                    context = multiprocessing.get_context("spawn")
                    answers = context.Queue()
                    process = context.Process(target=answer, args=(answers,))
                    process.start()
                    found = answers.get(timeout=60)
                    process.join()
                    return found
        """)
    )
    program = """
        print("runs", flush=True)
        options = {"device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": "16MiB", "enable_multiprocessing": True}
        with LLM(
            "demo", distributed_executor_backend="mp", worker_extension_cls="extension.Extension", **options
        ) as llm:
            print(llm.collective_rpc("ask"))
    """
    out, err = start(tmp_path, program).communicate(timeout=LIMIT_S)
    assert out == "runs\n[42]\n", err


def test_a_program_that_would_start_its_engine_again_is_told(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    program = f"""
        def name_of(core):
            return "a name"

        core = CoreGroup(EngineConfig.create({str(model)!r}), load_fake_core)
        print(core.collective_rpc(name_of))
    """
    _, err = start(tmp_path, program).communicate(timeout=LIMIT_S)
    assert 'under `if __name__ == "__main__":`' in err


def test_a_program_that_cannot_be_run_again_is_named(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    program = f"""
        def name_of(core):
            return "a name"

        if __name__ != "__main__":
            sys.exit("usage: program FILE")
        core = CoreGroup(EngineConfig.create({str(model)!r}), load_fake_core)
        print(core.collective_rpc(name_of))
    """
    _, err = start(tmp_path, program).communicate(timeout=LIMIT_S)
    assert "program.py was run again in a process of the engine's" in err
    assert "SystemExit: usage: program FILE. Or define that in a module" in err
