"""Processes that end when they are told to, when they are let go of, and when whoever started them dies."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.spawn import get_executable
from typing import TypeAlias

from penstock.config import env

_Process: TypeAlias = subprocess.Popen[bytes]
_Launches: TypeAlias = "queue.SimpleQueue[tuple[Callable[[], _Process], Future[_Process]] | None]"
_THREAD_NAME = "penstock-processes"
# Of prctl, on Linux: the signal that a process gets when the thread that started it ends.
_PR_SET_PDEATHSIG = 1
_ASK_TO_END = {signal.SIGINT, signal.SIGTERM}
# What the system sends to a program for what it has done itself; any other signal comes from somebody else.
_OWN_FAULTS = {"SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP"}


class ProcessStarter:
    """Starts fresh interpreters, whose programs begin with `end_with_parent`.

    It has a thread for that which lives as long as it does: Linux takes a process's parent for dead when the thread
    that started it ends, and callers' threads come and go.
    """

    def __init__(self) -> None:
        self._launches: _Launches = queue.SimpleQueue()
        # It does not end before Python does, as one that Python waits for would, but with a starter that is dropped.
        self._thread = threading.Thread(target=_launch_all, args=(self._launches,), name=_THREAD_NAME, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._launches.put, None).atexit = False

    def start(
        self, program: str, arguments: Sequence[object], descriptors: Sequence[int], environment: Mapping[str, str]
    ) -> _Process:
        """Run Python source with these arguments. It imports from where this process does, and runs no script again.

        descriptors: that it inherits, under the same numbers. environment: changes to this process's.
        """
        warnings = [f"-W{option}" for option in sys.warnoptions]
        command = [os.fsdecode(get_executable()), "-P", *warnings, "-c", program, *map(str, arguments)]
        search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        variables = env.with_changes({"PYTHONPATH": search_path, **environment})

        def launch() -> _Process:
            return subprocess.Popen(command, env=variables, pass_fds=descriptors, stdin=subprocess.DEVNULL)

        started: Future[_Process] = Future()
        self._launches.put((launch, started))
        return started.result()

    def close(self) -> None:
        """What it has started and is not over by now, ends."""
        self._launches.put(None)
        self._thread.join()


def _launch_all(launches: _Launches) -> None:
    # Processes inherit that: until a program has said that it leaves its end to its parent, one would end it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ASK_TO_END)
    while (wanted := launches.get()) is not None:
        launch, started = wanted
        try:
            started.set_result(launch())
        except BaseException as error:
            started.set_exception(error)


def end_with_parent(parent_pid: int) -> None:
    """Let this process be killed when its parent dies, even while it is stopped, or ends without a word if it has."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def leave_end_to_parent() -> None:
    """Take no notice of what asks a whole group of processes to end: the parent says what follows from it.

    Ctrl-C in a terminal does, and so does whoever stops a service. What this process starts can be ended nevertheless.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Unlike a signal that is ignored, one that a function is called for is not inherited by other programs.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.siginterrupt(signal.SIGTERM, False)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASK_TO_END)


def keep_to_this_process(connection: Connection, *descriptors: int) -> None:
    """Let no process that this one starts or forks have the connection, whose end is to be the end of this one."""
    for descriptor in (connection.fileno(), *descriptors):
        os.set_inheritable(descriptor, False)
    os.register_at_fork(after_in_child=connection.close)


def limit_waits(connection: Connection, *, send_s: float | None = None, receive_s: float | None = None) -> None:
    """Let what the other side does not take in, or does not finish saying, fail with BlockingIOError after a while."""
    with socket.socket(fileno=os.dup(connection.fileno())) as shared:
        for option, timeout_s in ((socket.SO_SNDTIMEO, send_s), (socket.SO_RCVTIMEO, receive_s)):
            if timeout_s is not None:
                seconds, fraction = divmod(timeout_s, 1)
                shared.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(fraction * 1e6)))


def was_killed(exit_code: int | None) -> bool:
    """Whether somebody else may have ended this process: a person, or the system for want of memory."""
    return exit_code is None or (exit_code < 0 and _name_of_signal(-exit_code) not in _OWN_FAULTS)


def describe_end(exit_code: int | None) -> str:
    """How a process ended, as the rest of a sentence; None for one that has not, as far as is known."""
    if exit_code is None:
        return "closed its connection"
    if exit_code < 0:
        return f"was killed by signal {-exit_code} ({_name_of_signal(-exit_code)})"
    return f"ended with exit code {exit_code}"


def where_to_look(exit_code: int | None) -> str:
    """What else may say why a process ended as it did."""
    if exit_code == -signal.SIGKILL:
        return "If nobody killed it, the system may have, for want of memory: its log says so (dmesg)."
    return "What it wrote before may say why."


def _name_of_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"
