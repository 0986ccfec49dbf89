"""Regular expressions of third parties, matched so that none of them stops the process.

RE2 matches in linear time and needs no limit. Patterns that it does not take, such as those with lookaheads, are
matched by Python's `re` in a process with limits of CPU time and memory.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from multiprocessing.spawn import get_executable
from typing import Any

import re2

from penstock.checkpoints.json_file import clipped
from penstock.errors import PenstockError
from penstock.observability.standard_streams import occupy_standard_descriptors

CPU_TIME_S = 5
MAX_CHARACTERS = 10_000
_MEMORY_BYTES = 512 << 20
# Timeout of a process that takes no CPU time.
_TIMEOUT_S = 60.0
# Syntax that Python and RE2 read in different ways: {,3} and [[:alpha:]].
_READ_DIFFERENTLY = ("{,", "[:")
_PROGRAM = """
import json, re, resource, sys
cpu_time_s, memory_bytes = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, (cpu_time_s, cpu_time_s))
resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
patterns, names = json.load(sys.stdin)
compiled = [re.compile(pattern) for pattern in patterns]
json.dump([[one.fullmatch(name) is not None for name in names] for one in compiled], sys.stdout)
"""


def syntax_error(pattern: str) -> str | None:
    """Why Python's `re` does not take a pattern; None if it does."""
    if len(pattern) > MAX_CHARACTERS:
        return f"it has {len(pattern):,} characters, at most {MAX_CHARACTERS:,} are allowed"
    try:
        re.compile(pattern)
    except (re.error, OverflowError) as error:
        return str(error)
    except RecursionError:
        return "its groups are nested too deep"
    return None


def full_matches(
    patterns: Sequence[str], names: Sequence[str], owner: str, error: type[PenstockError]
) -> list[list[bool]]:
    """Whether each valid pattern matches each whole name, as Python's `re` does: a list per pattern.

    owner: what has the patterns, for errors. Raises `error` for patterns that exceed their limits of time and memory.
    """
    is_ascii = all(map(str.isascii, names))
    linear = {pattern: _linear(pattern) if is_ascii else None for pattern in patterns}
    slow = [pattern for pattern, compiled in linear.items() if compiled is None]
    found = dict(zip(slow, _in_process(slow, names, owner, error) if slow and names else [[]] * len(slow), strict=True))
    for pattern, compiled in linear.items():
        if compiled is not None:
            found[pattern] = [compiled.fullmatch(name) is not None for name in names]
    return [found[pattern] for pattern in patterns]


@lru_cache(maxsize=1024)
def _linear(pattern: str) -> Any:
    """Compile a pattern for RE2; None for one that it does not take, or does not read as Python."""
    if not pattern.isascii() or any(part in pattern for part in _READ_DIFFERENTLY):
        return None
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error:
        return None


def _in_process(
    patterns: Sequence[str], names: Sequence[str], owner: str, error: type[PenstockError]
) -> list[list[bool]]:
    occupy_standard_descriptors()
    command = [os.fsdecode(get_executable()), "-I", "-S", "-c", _PROGRAM, str(CPU_TIME_S), str(_MEMORY_BYTES)]
    try:
        done = subprocess.run(
            command,
            input=json.dumps([patterns, names]).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            # Ctrl-C in a terminal is for the engine's process.
            process_group=0,
        )
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode != 0:
        raise error(
            f"{owner} has regular expressions that take more than {CPU_TIME_S} s or {_MEMORY_BYTES >> 20} MiB: one of "
            f"{clipped(', '.join(map(repr, patterns)))}. Allowed: patterns without nested repetitions such as (a+)+, "
            "or without lookarounds and backreferences, so that they are matched in linear time."
        )
    found: list[list[bool]] = json.loads(done.stdout)
    return found
