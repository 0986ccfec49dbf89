"""Process that renders chat templates, which may be hostile, within limits of memory and CPU time.

It imports Jinja and the standard library only, so that it starts in a tenth of a second. Its environment is that of
Transformers' `apply_chat_template`.
"""

from __future__ import annotations

import datetime
import functools
import json
import marshal
import os
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Length of the message after it, in both directions.
HEADER = struct.Struct("<Q")
# Interval of checks for a living parent: forks of the parent keep the connection open.
_LONGEST_WAIT_S = 5.0
_NUM_TEMPLATES = 16
_LONGEST_ERROR = 2000


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks assistant tokens for training; rendered as plain text."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dictionary:
    """`dict` of templates: makes dictionaries, without the attributes of the type."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` of templates, without names that begin with an underscore."""

    def __init__(*args: Any, **attributes: Any) -> None:
        self, *given = args
        attributes = dict(*given, **attributes)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace() has {name!r}. Names of a namespace cannot begin with an underscore.")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_now, dict=_Dictionary(), namespace=_Namespace
    )
    return environment


@functools.lru_cache(_NUM_TEMPLATES)
def _compiled(source: str) -> tuple[Template, frozenset[str]]:
    """Compile a template; return it with all names in it."""
    environment = _environment()
    names = frozenset(node.name for node in environment.parse(source).find_all(nodes.Name))
    return environment.from_string(source), names


def syntax_error(source: str) -> str | None:
    """Why a template cannot be compiled; None if it can."""
    try:
        _environment().from_string(source)
    except TemplateError as error:
        return _described(error)
    return None


def _answer(source: str, variables: dict[str, Any] | None) -> dict[str, Any]:
    """Render a template, or list the names of its variables if there are no values; return the result or the error."""
    try:
        template, names = _compiled(source)
        return {"names": sorted(names)} if variables is None else {"text": template.render(variables)}
    except MemoryError:
        return {"needs_memory": True}
    except Exception as error:
        return {"error": _described(error)}


def _described(error: Exception) -> str:
    text = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
    # Jinja gives frames of compiled templates their own lines.
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if _is_of_template(frame.f_code)]
    line = error.lineno if isinstance(error, TemplateSyntaxError) else next(iter(lines[::-1]), None)
    where = "" if line is None else f" (line {line} of the template)"
    return text[:_LONGEST_ERROR] + where


def _is_of_template(code: Any) -> bool:
    return bool(code.co_filename == "<template>")


def _limit(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    # The system's OOM killer ends this process before the engine.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})


def _used_bytes() -> int:
    """Return the address space of this process in bytes; 0 if unknown."""
    try:
        with open("/proc/self/statm") as sizes:
            return int(sizes.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _received(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def _wait(connection: socket.socket, parent: int) -> None:
    while not select.select([connection], [], [], _LONGEST_WAIT_S)[0]:
        if os.getppid() != parent:
            raise EOFError


def main() -> None:
    """Serve templates. Arguments: parent process id, memory limit in bytes, CPU seconds per template.

    Standard input is a socket for templates and texts.
    """
    parent, memory_bytes, cpu_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    connection = socket.socket(fileno=0)
    _limit(memory_bytes)
    with suppress(EOFError, OSError):
        while True:
            _wait(connection, parent)
            (size,) = HEADER.unpack(_received(connection, HEADER.size))
            # The signal at the CPU limit ends the process, whatever Python is doing.
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            try:
                answer = _answer(*marshal.loads(_received(connection, size)))
            except MemoryError:
                answer = {"needs_memory": True}
            # Memory of this template and of compiled ones must not count against the next.
            answer["is_last"] = "needs_memory" in answer or _used_bytes() > memory_bytes // 2
            data = _encoded(answer)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.sendall(HEADER.pack(len(data)) + data)
            if answer["is_last"]:
                return


def _encoded(answer: dict[str, Any]) -> bytes:
    try:
        return json.dumps(answer, ensure_ascii=False).encode()
    except MemoryError:
        answer = {"needs_memory": True, "is_last": True}
    except UnicodeEncodeError as error:
        answer = {"error": f"its text has a lone surrogate at position {error.start}", "is_last": answer["is_last"]}
    return json.dumps(answer).encode()
