"""Child processes that end on request, when their connection closes, and when their parent dies."""

from __future__ import annotations

import ctypes
import functools
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

from penstock.errors import LifecycleError
from penstock.system import env

_Process: TypeAlias = subprocess.Popen[bytes]
_Launches: TypeAlias = "queue.SimpleQueue[tuple[Callable[[], _Process], Future[_Process]] | None]"
_THREAD_NAME = "penstock-processes"
# Option of Linux's prctl: the signal that a process gets when the thread that started it ends.
_PR_SET_PDEATHSIG = 1
_ASK_TO_END = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
# Signals for a process's own faults; any other signal comes from outside.
_OWN_FAULTS = {"SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP"}


class ProcessStarter:
    """Starts fresh interpreters, which call `end_with_parent` first.

    One thread starts them all and lives as long as the starter: Linux takes a process's parent for dead when the thread
    that started it ends, and callers' threads come and go.
    """

    def __init__(self) -> None:
        self._launches: _Launches = queue.SimpleQueue()
        # A daemon thread lives until the interpreter exits or the starter is dropped.
        self._thread = threading.Thread(target=_launch_all, args=(self._launches,), name=_THREAD_NAME, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._launches.put, None).atexit = False

    def start(
        self, source: str, arguments: Sequence[object], descriptors: Sequence[int], environment: Mapping[str, str]
    ) -> _Process:
        """Run Python source with these arguments and this process's module search path; no script runs again.

        descriptors: inherited under the same numbers. environment: changes to this process's environment.
        """
        warnings = [f"-W{option}" for option in sys.warnoptions]
        command = [os.fsdecode(get_executable()), "-P", *warnings, "-c", source, *map(str, arguments)]
        search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        variables = env.with_changes({"PYTHONPATH": search_path, **environment})

        def launch() -> _Process:
            return subprocess.Popen(command, env=variables, pass_fds=descriptors, stdin=subprocess.DEVNULL)

        started: Future[_Process] = Future()
        self._launches.put((launch, started))
        return started.result()

    def close(self) -> None:
        """End the starter's thread, and so the processes that it started."""
        self._launches.put(None)
        self._thread.join()


def _launch_all(launches: _Launches) -> None:
    # Children inherit the mask: a signal must not end one before `leave_end_to_parent` has run.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ASK_TO_END)
    while (wanted := launches.get()) is not None:
        launch, started = wanted
        try:
            started.set_result(launch())
        except BaseException as error:
            started.set_exception(error)


def end_with_parent(parent_pid: int) -> None:
    """Have this process killed when its parent dies, even while stopped; exit at once if the parent is dead already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def leave_end_to_parent() -> None:
    """Ignore SIGINT, SIGTERM and SIGHUP, which a terminal or a service manager sends to a process group: the parent
    decides.

    Processes that this one starts still end on these signals.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in _ASK_TO_END - {signal.SIGINT}:
        # Unlike SIG_IGN, a handler is not inherited across exec.
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
        os.register_at_fork(after_in_child=functools.partial(signal.signal, number, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASK_TO_END)


def keep_to_this_process(connection: Connection, *descriptors: int) -> None:
    """Keep the connection out of child processes: its end must be the end of this process."""
    for descriptor in (connection.fileno(), *descriptors):
        os.set_inheritable(descriptor, False)
    os.register_at_fork(after_in_child=connection.close)


def limit_waits(connection: Connection, *, send_s: float | None = None, receive_s: float | None = None) -> None:
    """Set send and receive timeouts of a connection, which then raise BlockingIOError."""
    with socket.socket(fileno=os.dup(connection.fileno())) as shared:
        for option, timeout_s in ((socket.SO_SNDTIMEO, send_s), (socket.SO_RCVTIMEO, receive_s)):
            if timeout_s is not None:
                seconds, fraction = divmod(timeout_s, 1)
                shared.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(fraction * 1e6)))


def refuse_at_exit() -> None:
    """Raise LifecycleError while the interpreter exits: threads can no longer start, nor be joined."""
    # The main thread counts as ended when it runs the functions of `atexit`. Other threads may go on before that.
    main = threading.main_thread()
    if threading.current_thread() is main and not main.is_alive():
        raise LifecycleError(
            "No engine can start while the interpreter exits, such as in a function that atexit calls. Start it "
            "before, and let that function use or close it."
        )


def was_killed(exit_code: int | None) -> bool:
    """Whether a process may have been killed from outside: by a user, or by the system for want of memory."""
    return exit_code is None or (exit_code < 0 and _name_of_signal(-exit_code) not in _OWN_FAULTS)


def describe_end(exit_code: int | None) -> str:
    """Describe a process's end, as the rest of a sentence. exit_code: None for a process that may still run."""
    if exit_code is None:
        return "closed its connection"
    if exit_code < 0:
        return f"was killed by signal {-exit_code} ({_name_of_signal(-exit_code)})"
    return f"ended with exit code {exit_code}"


def where_to_look(exit_code: int | None) -> str:
    """Return advice where to look for the cause of a process's end."""
    if exit_code == -signal.SIGKILL:
        return "Unless it was killed on purpose, the kernel's out-of-memory killer may have ended it: see dmesg."
    return "What it wrote before may say why."


def _name_of_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"
