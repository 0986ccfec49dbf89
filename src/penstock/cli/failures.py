"""Errors of commands: one message on standard error, and an exit code.

| exit code | meaning |
| --- | --- |
| 0 | all went well |
| 1 | the engine or a request failed |
| 2 | bad input: an option, a prompt, a file |
| 130 | Ctrl-C |
| 141 | standard output was closed by its reader |
| 143 | SIGTERM |
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from penstock.cli.flags import Flags
from penstock.cli.process import EXIT_INTERRUPTED, leave_at_once
from penstock.errors import ConfigError, InvalidRequest, ModelNotFound, PenstockError
from penstock.observability import printable
from penstock.system import env

EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2
EXIT_OUTPUT_CLOSED = 128 + signal.SIGPIPE
EXIT_TERMINATED = 128 + signal.SIGTERM
# Names of pipes in a command's arguments, which the shell makes.
_OF_THE_SHELL = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
_BAD_INPUT = (ConfigError, InvalidRequest, ModelNotFound)


class OutputClosed(Exception):
    """Standard output was closed by its reader."""


class _Interrupts:
    """Signal handler that remembers Ctrl-C and SIGTERM, which a library may turn into an error of its own.

    Within an import it exits at once, since libraries catch errors of their imports; also within a download, whose
    library waits for all files that it has begun. The next download goes on from there.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _ends_at_once(frame):
            leave_at_once(number, frame)
        # A second signal ends the process at once.
        signal.signal(number, signal.SIG_DFL)
        if number == signal.SIGTERM:
            self.exit_code = EXIT_TERMINATED
            sys.exit(EXIT_TERMINATED)
        self.exit_code = EXIT_INTERRUPTED
        raise KeyboardInterrupt


def _ends_at_once(frame: FrameType | None) -> bool:
    while frame is not None:
        is_downloading = str(frame.f_globals.get("__name__")).partition(".")[0] == "huggingface_hub"
        if is_downloading or frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


@contextmanager
def readable_errors(*, debug: bool = False, flags: Flags | None = None) -> Iterator[None]:
    """Turn exceptions of a command's body into a message and an exit code.

    flags: the command's flags, which replace option names in messages. debug: print the traceback too, as with
    PENSTOCK_LOG_LEVEL=debug.
    """
    interrupts = _Interrupts()
    former_handlers = {number: signal.signal(number, interrupts) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or interrupts.exit_code is not None:
            sys.exit(interrupts.exit_code or EXIT_INTERRUPTED)
        if isinstance(error, OutputClosed):
            discard_output()
            sys.exit(EXIT_OUTPUT_CLOSED)
        _fail(error, flags, show_traceback=debug or env.log_level() == "DEBUG")
    finally:
        if interrupts.exit_code is None:
            for number, handler in former_handlers.items():
                signal.signal(number, handler)


@contextmanager
def file_named(option: str, path: Path) -> Iterator[None]:
    """Turn a file that cannot be opened into a ConfigError that names the option and the file."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be opened: {error.strerror}. Give another file.") from error


def read_file(option: str, path: Path) -> bytes:
    """Contents of a file that an option names. Raises ConfigError, naming both, for one that cannot be read.

    A pipe is one that the shell has made, such as <(command): another one may have no writer, and the command would
    wait for ever.
    """
    if not str(path).startswith(_OF_THE_SHELL) and (path.is_fifo() or path.is_socket()):
        raise ConfigError(
            f"{option} {path} is a pipe or socket. Give a file, or the output of a command as <(command)."
        )
    with file_named(option, path):
        return path.read_bytes()


def read_text_file(option: str, path: Path) -> str:
    """Text of a UTF-8 file that an option names; see `read_file`."""
    try:
        return read_file(option, path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option} {path} is not UTF-8: {error}. Give a text file.") from error


def check_writable(option: str, path: Path) -> None:
    """Raise ConfigError for a file that cannot be written, before the work for it. Leaves no new file."""
    is_new = not path.exists()
    with file_named(option, path), path.open("a"):
        pass
    if is_new:
        path.resolve().unlink()


def check_server_packages(needed_by: str) -> None:
    """Raise ConfigError without the packages of the server. needed_by: subject of the error."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{needed_by} needs the package {error.name}. Install the extra: pip install 'penstock[server]'."
        ) from error


def _fail(error: BaseException, flags: Flags | None, *, show_traceback: bool) -> NoReturn:
    if show_traceback:
        traceback.print_exception(error)
    print(f"penstock: {printable.lines(_message(error, flags))}", file=sys.stderr)
    sys.exit(EXIT_BAD_INPUT if isinstance(error, _BAD_INPUT) else EXIT_FAILURE)


def _message(error: BaseException, flags: Flags | None) -> str:
    kind = type(error).__name__
    if isinstance(error, PenstockError):
        message = str(error)
        if flags is not None:
            message = flags.of_request(message) if isinstance(error, InvalidRequest) else flags.of_engine(message)
        return f"{kind}: {message}"
    if isinstance(error, OSError):
        return str(error)
    return f"internal error, {kind}: {error}. Run it again with --debug for the traceback."


def discard_output() -> None:
    """Redirect standard output to nowhere, since Python flushes it at exit, and would report the closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
