"""Child processes that are forked from one interpreter with torch already imported, in place of fresh interpreters.

A fresh interpreter imports torch for a second or two. `PreloadedInterpreter` pays it once per test process: it stays
without threads, and forks itself for each process that an engine starts. The fork is a child of the test process,
as a fresh interpreter would be (CLONE_PARENT of Linux's clone), so that exit codes, signals and the death of the
parent work as usual.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence

from penstock.executor.processes import ProcessStarter, end_with_parent
from penstock.system import env

# Modules that processes of engines import; each brings its own.
_PRELOADED = (
    "torch",
    "penstock.engine.processes.child_main",
    "penstock.engine.processes.core_server",
    "penstock.engine.core.startup",
    "penstock.executor.multiprocess",
    "penstock.executor.uni",
    "penstock.executor.worker_process",
    "penstock.worker.wrapper",
    "penstock.worker.worker",
    "penstock.models.llama",
)
# Variables that a process may be given without a fresh interpreter: none of them is read by what was imported.
_FREE_VARIABLES = {"OMP_NUM_THREADS", "PYTEST_CURRENT_TEST", "PYTHONPATH"}
_SERVE = "from support.preloaded_processes import serve; serve()"
_CLONE_PARENT = 0x8000
_SYSTEM_CALL_OF_CLONE = {"x86_64": 56, "aarch64": 220}
# Descriptors from here on are free while those of a new process are put in their places.
_FREE_DESCRIPTORS = 500
_STANDARD = (1, 2)
_MOST_DESCRIPTORS = 32
_LONGEST_REQUEST = 1 << 20


class ForkedProcess(subprocess.Popen[bytes]):
    """Handle of a child process that another process has forked for this one."""

    def __init__(self, pid: int, arguments: Sequence[str]) -> None:
        self.pid = pid
        self.args = list(arguments)
        self.returncode = None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self._waitpid_lock = threading.Lock()


class PreloadedInterpreter:
    """Interpreter that forks itself for each process. Ends with this process, and on `close`."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._environment = dict(os.environ)
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._starter = ProcessStarter()
        with theirs:
            descriptor = theirs.fileno()
            self._process = self._starter.start(
                _SERVE, [os.getpid(), descriptor], [descriptor], {"OMP_NUM_THREADS": "1"}
            )

    def can_start(self, variables: Mapping[str, str]) -> bool:
        """Whether a process with these variables would be as a fresh interpreter's."""
        names = {*variables, *self._environment} - _FREE_VARIABLES
        return (
            os.getpid() == self._pid
            and self._process.poll() is None
            and all(map(_is_open, _STANDARD))
            and all(variables.get(name) == self._environment.get(name) for name in names)
        )

    def start(
        self, source: str, arguments: Sequence[str], descriptors: Sequence[int], variables: Mapping[str, str]
    ) -> ForkedProcess:
        request = {
            "source": source,
            "arguments": arguments,
            "descriptors": [*_STANDARD, *descriptors],
            "variables": dict(variables),
            "folder": os.getcwd(),
        }
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [*_STANDARD, *descriptors])
            pid = int(self._socket.recv(32))
        return ForkedProcess(pid, [sys.executable, "-c", source, *arguments])

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()
        self._starter.close()


class PreloadedStart:
    """`ProcessStarter.start` and `close` that fork a preloaded interpreter where a process would not differ.

    is_on: whether processes are forked at all.
    """

    _interpreter: PreloadedInterpreter

    def __init__(self) -> None:
        self.is_on = True
        self._started: weakref.WeakKeyDictionary[ProcessStarter, list[ForkedProcess]] = weakref.WeakKeyDictionary()
        self._start, self._close = ProcessStarter.start, ProcessStarter.close

    @contextlib.contextmanager
    def installed(self) -> Iterator[PreloadedStart]:
        """Replace the methods of all starters, where the system has this call."""
        if sys.platform != "linux" or os.uname().machine not in _SYSTEM_CALL_OF_CLONE:
            yield self
            return
        self._interpreter = PreloadedInterpreter()
        start, close = self.start, self.close
        ProcessStarter.start = lambda self, *arguments: start(self, *arguments)  # type: ignore[method-assign]
        ProcessStarter.close = lambda self: close(self)  # type: ignore[method-assign]
        try:
            yield self
        finally:
            ProcessStarter.start, ProcessStarter.close = self._start, self._close  # type: ignore[method-assign]
            self._interpreter.close()

    def start(
        self,
        starter: ProcessStarter,
        source: str,
        arguments: Sequence[object],
        descriptors: Sequence[int],
        environment: Mapping[str, str],
    ) -> subprocess.Popen[bytes]:
        search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        variables = env.with_changes({"PYTHONPATH": search_path, **environment})
        if not self.is_on or not self._interpreter.can_start(variables):
            return self._start(starter, source, arguments, descriptors, environment)
        process = self._interpreter.start(source, list(map(str, arguments)), descriptors, variables)
        if starter not in self._started:
            self._started[starter] = []
            weakref.finalize(starter, _kill_all, self._started[starter]).atexit = False
        self._started[starter].append(process)
        return process

    def close(self, starter: ProcessStarter) -> None:
        """End a starter, and so the processes that it started."""
        self._close(starter)
        _kill_all(self._started.get(starter, []))


def _kill_all(started: Sequence[ForkedProcess]) -> None:
    for process in started:
        process.kill()


def serve() -> None:
    """Fork a process for each request, in the preloaded interpreter; in the fork, run it."""
    end_with_parent(int(sys.argv[1]))
    requests = socket.socket(fileno=int(sys.argv[2]))
    for name in _PRELOADED:
        importlib.import_module(name)
    num_threads = len(os.listdir("/proc/self/task"))
    assert num_threads == 1, f"a process with {num_threads} threads cannot be forked"
    gc.collect()
    gc.freeze()
    while True:
        message, received, _, _ = socket.recv_fds(requests, _LONGEST_REQUEST, _MOST_DESCRIPTORS)
        if not message:
            return
        pid = _fork_sibling()
        if pid == 0:
            requests.close()
            break
        for descriptor in received:
            os.close(descriptor)
        requests.send(str(pid).encode())
    _become(json.loads(message), received)


def _fork_sibling() -> int:
    """Fork this process, with this one's parent as parent. Returns the child's pid; 0 in the child."""
    api = ctypes.pythonapi
    call = _SYSTEM_CALL_OF_CLONE[os.uname().machine]
    api.PyOS_BeforeFork()
    pid: int = ctypes.PyDLL(None).syscall(call, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    (api.PyOS_AfterFork_Child if pid == 0 else api.PyOS_AfterFork_Parent)()
    return pid


def _become(request: dict[str, object], received: Sequence[int]) -> None:
    """Run the requested source as a fresh interpreter would."""
    targets, variables = request["descriptors"], request["variables"]
    assert isinstance(targets, list)
    assert isinstance(variables, dict)
    moved = [_move_out_of_the_way(descriptor) for descriptor in received]
    for descriptor, target in zip(moved, targets, strict=True):
        os.dup2(descriptor, target, inheritable=True)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(str(request["folder"]))
    sys.path[:] = variables["PYTHONPATH"].split(os.pathsep)
    sys.argv = ["-c", *request["arguments"]]  # type: ignore[misc]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(str(request["source"]), "<string>", "exec"), main.__dict__)


def _move_out_of_the_way(descriptor: int) -> int:
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD, _FREE_DESCRIPTORS)
    os.close(descriptor)
    return moved


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
