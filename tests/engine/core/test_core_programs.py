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
    from penstock.engine.processes.core_group import CoreGroup
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


@pytest.mark.slow
def test_a_script_needs_no_main_guard_and_no_close_and_exits_silently(tmp_path: Path) -> None:
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
@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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


SENDING = """
    from dataclasses import dataclass
    from penstock.runner.sampling.logits_processor import LogitsProcessor

    print("runs", flush=True)

    class OnlyFives(LogitsProcessor):
        name = "fives"

        def add_request(self, slot, params, *tokens):
            return True

        def apply(self, logits, rows):
            return only(logits, 5)

    def only(logits, token):
        wanted = logits[:, token].clone()
        logits.fill_(float("-inf"))
        logits[:, token] = wanted
        return logits

    @dataclass
    class Found:
        name: str
        is_elsewhere: bool

    def found(worker):
        return Found(worker.config.sampling.logits_processors[0].__name__, os.getpid() != PARENT)

    PARENT = os.getpid()
    options = {"device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": "16MiB"}
    with LLM(
        "demo", enable_multiprocessing=True, distributed_executor_backend="mp", logits_processors=[OnlyFives], **options
    ) as llm:
        (output,) = llm.generate("ROMEO:", SamplingParams(max_tokens=3, ignore_eos=True))
        print(output.outputs[0].token_ids, llm.collective_rpc(found), llm.collective_rpc(lambda worker: worker.rank))
        print([type(answer) is Found for answer in llm.collective_rpc(found)])
"""
SENT = "runs\n[5, 5, 5] [Found(name='OnlyFives', is_elsewhere=True)] [0]\n[True]\n"


@pytest.mark.slow
def test_functions_and_classes_of_a_script_reach_cores_and_workers_and_answers_come_back(tmp_path: Path) -> None:
    """Without a `__main__` guard: only the script's own process runs it."""
    out, err = start(tmp_path, SENDING).communicate(timeout=LIMIT_S)
    assert out == SENT, err


@pytest.mark.slow
@pytest.mark.parametrize("way", ["stdin", "-c", "spawned"])
def test_so_do_those_of_a_notebook_and_of_a_spawned_process(tmp_path: Path, way: str) -> None:
    source = textwrap.dedent(START) + textwrap.dedent(SENDING)
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": LIMIT_S}
    options["env"] = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    if way == "spawned":
        # What follows the definitions, in a function that the child calls.
        definitions, separator, calls = source.replace('print("runs", flush=True)\n', "").partition("options =")
        body = textwrap.indent('print("runs", flush=True)\n' + separator + calls, "    ")
        guarded = 'if __name__ == "__main__":\n    import multiprocessing\n'
        guarded += '    process = multiprocessing.get_context("spawn").Process(target=run)\n'
        guarded += "    process.start()\n    process.join()\n"
        script = tmp_path / "program.py"
        script.write_text(f"{definitions}\ndef run():\n{body}\n{guarded}")
        done = subprocess.run([sys.executable, str(script)], **options)
    elif way == "stdin":
        done = subprocess.run([sys.executable, "-"], input=source, **options)
    else:
        done = subprocess.run([sys.executable, "-c", source], **options)
    assert done.stdout == SENT, done.stderr


@pytest.mark.slow
def test_what_a_worker_starts_does_not_run_the_program(tmp_path: Path) -> None:
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
