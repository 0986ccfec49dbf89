"""Hostile chat templates: each ends with an error that names the limit, and nothing else notices."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from penstock.errors import ChatTemplateError
from penstock.templates import renderer as renderer_module
from penstock.templates.renderer import TemplateRenderer

FAST = "{{ number }}"
ENDLESS = "{% for a in range(9**5) %}" * 3 + "{% endfor %}" * 3
NAME = "The chat template of a model"


@pytest.fixture
def renderer() -> Iterator[TemplateRenderer]:
    renderer = TemplateRenderer()
    yield renderer
    renderer.close()


def pid_of(renderer: TemplateRenderer) -> int:
    (process,) = renderer._idle
    return process._process.pid


def wait_for_end(pid: int, timeout_s: float = 5.0) -> None:
    """Wait for the end of a process that is no child of this one; its new parent may not have reaped it yet."""
    deadline = time.monotonic() + timeout_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} has not ended"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ range(10**9)|list }}", "OverflowError: Range too big"),
        ("\n\n{{ 1/0 }}", r"ZeroDivisionError: division by zero \(line 3 of the template\)"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError: maximum recursion depth exceeded"),
        ("{{ " + "(" * 50000 + ")" * 50000 + " }}", "RecursionError"),
        ("{{ 'x' * 40000000000 }}", "it needs more than 512 MiB of memory"),
        # The system would give as much, and the text is short.
        ("{{ ('x' * 1000000000)|length }}", "it needs more than 512 MiB of memory"),
        ("{{ '%999999999999d' % 3 }}", "it needs more than 512 MiB of memory"),
        ("{{ 1 + 'a' }}", "TypeError: unsupported operand"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{% set a = namespace(__b=1) %}", "cannot begin with an underscore"),
        ("{% include 'other' %}", "no loader"),
        ("{% if %}", r"Expected an expression.* \(line 1 of the template\)"),
        ("{{ '\\ud800' }}", "its text has a lone surrogate"),
        ("{{ raise_exception('no system') }}", "cannot render these messages: no system"),
        ("{{ raise_exception('x' * 100000) }}", "cannot render these messages: x+ "),
    ],
)
def test_a_template_that_exceeds_a_limit_ends_with_its_name(
    renderer: TemplateRenderer, template: str, message: str
) -> None:
    with pytest.raises(ChatTemplateError, match=f"^{NAME} cannot render these messages: ") as caught:
        renderer.render(template, {}, name=NAME)
    caught.match(message)
    assert len(str(caught.value)) < 2500
    assert renderer.render(FAST, {"number": 3}, name=NAME) == "3"


def test_a_template_without_end_is_given_up(renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer_module, "CPU_TIME_S", 0.2)
    with pytest.raises(ChatTemplateError, match="took more than 0.2 s of CPU time"):
        renderer.render(ENDLESS, {}, name=NAME)
    assert renderer.render(FAST, {"number": 3}, name=NAME) == "3"


def test_a_text_that_is_too_long_is_refused(renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer_module, "OUTPUT_BYTES", 1 << 20)
    with pytest.raises(ChatTemplateError, match=r"its text has 2,000,\d\d\d bytes. Allowed: 1 MiB"):
        renderer.render("{{ 'x' * 2000000 }}", {}, name=NAME)
    assert renderer.render(FAST, {"number": 3}, name=NAME) == "3"


def test_others_are_rendered_while_one_does_not_end(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renderer_module, "CPU_TIME_S", 1.0)
    with ThreadPoolExecutor(1) as threads:
        endless = threads.submit(renderer.render, ENDLESS, {}, name=NAME)
        for number in range(20):
            assert renderer.render(FAST, {"number": number}, name=NAME) == str(number)
        assert not endless.done()
        assert isinstance(endless.exception(), ChatTemplateError)


def test_a_process_that_does_not_get_on_is_given_up(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renderer_module, "_TIMEOUT_S", 0.3)
    renderer.render(FAST, {"number": 3}, name=NAME)
    stopped = pid_of(renderer)
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(ChatTemplateError, match=rf"its process {stopped} did not answer"):
        renderer.render(FAST, {"number": 3}, name=NAME)
    assert not psutil.pid_exists(stopped)


def test_what_one_template_has_needed_is_not_missing_to_the_next(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled templates are kept, and could fill the memory."""
    monkeypatch.setattr(renderer_module, "MEMORY_BYTES", 64 << 20)
    for number in range(4):
        renderer.render(f"{number}" + "x" * 1000000, {}, name=NAME)
    assert renderer.render("{{ ('x' * 28000000)|length }}", {}, name=NAME) == "28000000"


def test_a_process_that_was_killed_meanwhile_is_replaced(renderer: TemplateRenderer) -> None:
    renderer.render(FAST, {"number": 3}, name=NAME)
    killed = pid_of(renderer)
    os.kill(killed, signal.SIGKILL)
    wait_for_end(killed)
    assert renderer.render(FAST, {"number": 3}, name=NAME) == "3"
    assert not psutil.pid_exists(killed)


def test_a_process_that_is_killed_while_it_renders_is_named(renderer: TemplateRenderer) -> None:
    others = set(psutil.Process().children())
    with ThreadPoolExecutor(1) as threads:
        endless = threads.submit(renderer.render, ENDLESS, {}, name=NAME)
        while not (children := set(psutil.Process().children()) - others):
            time.sleep(0.01)
        time.sleep(0.2)
        for child in children:
            child.kill()
        assert "was killed by signal 9" in str(endless.exception())


def test_processes_end_with_the_renderer(renderer: TemplateRenderer) -> None:
    renderer.render(FAST, {"number": 3}, name=NAME)
    closed = pid_of(renderer)
    renderer.close()
    renderer.close()
    assert not psutil.pid_exists(closed)
    dropped = TemplateRenderer()
    dropped.render(FAST, {"number": 3}, name=NAME)
    pid = pid_of(dropped)
    del dropped
    assert not psutil.pid_exists(pid)


def test_a_fork_has_processes_of_its_own(renderer: TemplateRenderer) -> None:
    renderer.render(FAST, {"number": 3}, name=NAME)
    pid = os.fork()
    if pid == 0:
        text = renderer.render(FAST, {"number": 4}, name=NAME)
        renderer.close()
        os._exit(0 if text == "4" else 1)
    assert os.waitpid(pid, 0)[1] == 0
    before = pid_of(renderer)
    assert renderer.render(FAST, {"number": 5}, name=NAME) == "5"
    assert pid_of(renderer) == before


PROGRAM = """
import os, sys, time
from penstock.templates.renderer import TemplateRenderer
renderer = TemplateRenderer()
assert renderer.render("{{ number }}", {"number": 3}, name="T") == "3"
(process,) = renderer._idle
report = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
os.write(report, f"{process._process.pid} {process._connection.fileno()} ".encode())
if sys.argv[2] == "fork" and os.fork() == 0:
    time.sleep(60)
if sys.argv[2] != "end":
    time.sleep(60)
"""


def start(report: Path, mode: str, **options: object) -> tuple[subprocess.Popen[bytes], int, int]:
    """A program with a renderer, the process that it has started, and the descriptor of the connection."""
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, str(report), mode], **options)  # type: ignore[call-overload]
    deadline = time.monotonic() + 30.0
    while not report.exists() or len(report.read_text().split()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pid, descriptor = map(int, report.read_text().split())
    return program, pid, descriptor


@pytest.mark.parametrize("mode", ["killed", "end"])
def test_a_process_ends_with_the_program_that_has_started_it(tmp_path: Path, mode: str) -> None:
    program, pid, _ = start(tmp_path / "report", mode)
    if mode == "killed":
        program.kill()
    program.wait()
    wait_for_end(pid)


@pytest.mark.slow
def test_a_process_ends_with_its_parent_though_a_fork_keeps_the_connection(tmp_path: Path) -> None:
    program, pid, _ = start(tmp_path / "report", "fork", start_new_session=True)
    fork = [child for child in psutil.Process(program.pid).children() if child.pid != pid]
    program.kill()
    program.wait()
    wait_for_end(pid, timeout_s=10.0)
    for child in fork:
        child.kill()


def test_no_descriptor_is_below_three(tmp_path: Path) -> None:
    command = f"exec {sys.executable} -c '{PROGRAM}' {tmp_path / 'report'} end <&- >&- 2>&-"
    subprocess.run(command, shell=True, check=True)
    _, descriptor = map(int, (tmp_path / "report").read_text().split())
    assert descriptor > 2


def test_a_process_takes_no_input_of_the_program(renderer: TemplateRenderer) -> None:
    renderer.render(FAST, {"number": 3}, name=NAME)
    files = [os.readlink(f"/proc/{pid_of(renderer)}/fd/{number}") for number in range(3)]
    assert files[0].startswith("socket:")
    assert files[1:] == [os.devnull] * 2
