"""Renderer of chat templates in sandbox processes, since templates come from checkpoints and requests."""

from __future__ import annotations

import marshal
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.spawn import get_executable
from typing import Any

import msgspec

from penstock.errors import ChatTemplateError
from penstock.observability.standard_streams import occupy_standard_descriptors
from penstock.system import env

# Limits of one template.
CPU_TIME_S = 5.0
MEMORY_BYTES = 512 << 20
OUTPUT_BYTES = 64 << 20
# Timeout of a process that takes no CPU time.
_TIMEOUT_S = 60.0
_MAX_IDLE_PROCESSES = 2
_PROGRAM = "from penstock.templates.program import main; main()"
_LENGTH_BYTES = 8


class _Answer(msgspec.Struct):
    """Answer of a process (see `program`)."""

    is_last: bool
    text: str = ""
    names: list[str] = []
    error: str | None = None
    needs_memory: bool = False


_answers = msgspec.json.Decoder(_Answer)


class TemplateRenderer:
    """Renders Jinja templates with limits of time, memory and output, in processes started on demand.

    Thread-safe; a fork of this process gets processes of its own.

    has_warned_of_tools: whether the log has said that a template shows no tools.
    """

    def __init__(self) -> None:
        self.has_warned_of_tools = False
        self._idle: deque[_Process] = deque()
        self._most_idle = _MAX_IDLE_PROCESSES
        weakref.finalize(self, _end_all, self._idle)

    def render(self, template: str, variables: Mapping[str, Any], *, name: str) -> str:
        """Render a template with plain data as variables.

        name: the template's name for errors. Raises ChatTemplateError for any error of the template.
        """
        return self._ask(template, dict(variables), name).text

    def names_of(self, template: str, *, name: str) -> list[str]:
        """Names of a template's variables. Raises ChatTemplateError as `render`."""
        return self._ask(template, None, name).names

    def _ask(self, template: str, variables: dict[str, Any] | None, name: str) -> _Answer:
        process = self._take()
        try:
            answer = process.ask(marshal.dumps((template, variables)))
        except _NoAnswer as reason:
            process.end()
            raise ChatTemplateError(f"{name} cannot render these messages: {reason}") from None
        except BaseException:
            process.end()
            raise
        if answer.is_last or len(self._idle) >= self._most_idle:
            process.end()
        else:
            self._idle.append(process)
        error = f"it needs more than {MEMORY_BYTES >> 20} MiB of memory" if answer.needs_memory else answer.error
        if error is not None:
            raise ChatTemplateError(f"{name} cannot render these messages: {error}")
        return answer

    def close(self) -> None:
        """End all processes; later templates start new ones, which end with their template."""
        self._most_idle = 0
        _end_all(self._idle)

    def _take(self) -> _Process:
        with suppress(IndexError):
            while True:
                process = self._idle.pop()
                if process.can_be_asked():
                    return process
                process.end()
        return _Process()


class _NoAnswer(Exception):
    """Reason why a process was killed."""


class _Process:
    """Process that runs `program`, and the connection to it."""

    def __init__(self) -> None:
        occupy_standard_descriptors()
        self._parent_pid = os.getpid()
        self._connection, its_end = socket.socketpair()
        search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        limits = [str(self._parent_pid), str(MEMORY_BYTES), str(CPU_TIME_S)]
        with its_end:
            self._process = subprocess.Popen(
                [os.fsdecode(get_executable()), "-P", "-c", _PROGRAM, *limits],
                stdin=its_end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=env.with_changes({"PYTHONPATH": search_path}),
                # Ctrl-C in a terminal is for the engine's process.
                process_group=0,
            )

    def can_be_asked(self) -> bool:
        """Whether the process is idle and belongs to this process, not to its parent before a fork."""
        if os.getpid() != self._parent_pid:
            return False
        # An idle process sends nothing: readable means that it has ended.
        return not select.select([self._connection], [], [], 0)[0]

    def ask(self, message: bytes) -> _Answer:
        """Send a message and return the answer. Raises _NoAnswer for a process that must be killed."""
        deadline = time.monotonic() + _TIMEOUT_S
        try:
            self._connection.settimeout(_TIMEOUT_S)
            self._connection.sendall(len(message).to_bytes(_LENGTH_BYTES, "little"))
            self._connection.sendall(message)
            size = int.from_bytes(self._receive(_LENGTH_BYTES, deadline), "little")
            if size > OUTPUT_BYTES:
                raise _NoAnswer(f"its text has {size:,} bytes. Allowed: {OUTPUT_BYTES >> 20} MiB")
            return _answers.decode(self._receive(size, deadline))
        except TimeoutError:
            raise _NoAnswer(f"its process {self._process.pid} did not answer for {_TIMEOUT_S:g} s") from None
        except (OSError, EOFError, msgspec.MsgspecError):
            raise _NoAnswer(self._reason_of_end()) from None

    def end(self) -> None:
        """Kill the process, if it is this one's child, and wait for its end."""
        self._connection.close()
        if os.getpid() != self._parent_pid:
            # A child of the parent process cannot be waited for here.
            self._process.returncode = 0
            return
        self._process.kill()
        self._process.wait()

    def _receive(self, size: int, deadline: float) -> bytearray:
        data = bytearray()
        while len(data) < size:
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            piece = self._connection.recv(min(size - len(data), 1 << 20))
            if not piece:
                raise EOFError
            data += piece
        return data

    def _reason_of_end(self) -> str:
        try:
            exit_code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return f"its process {self._process.pid} closed its connection"
        if exit_code == -signal.SIGPROF:
            return f"it took more than {CPU_TIME_S:g} s of CPU time"
        how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
        return f"its process {self._process.pid} {how}"


def _end_all(processes: deque[_Process]) -> None:
    with suppress(IndexError):
        while True:
            processes.pop().end()
