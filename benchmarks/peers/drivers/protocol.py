"""Protocol between driver and benchmark: one JSON object per line, jobs on standard input, replies on a pipe.

Runs in every engine's own environment, so it needs nothing but Python.

job    {"prompts": [[token ids]], "num_outputs": [tokens to generate]}
reply  {"tokens": [[the first few generated ids]], "num_tokens": total, "seconds": s, "finished_at": monotonic clock}
job    {"call": name of another method of the driver, "arguments": [its arguments]}
reply  {"result": what it returns}
       or {"error": text}; before all of them {"versions": {package: version}}
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

# Enough to see whether engines compute the same model.
_REPORTED_TOKENS = 16


class Driver(Protocol):
    """An engine with a model loaded. `generate` is greedy, ignores end tokens, and returns the tokens per prompt."""

    def generate(self, prompts: list[list[int]], num_outputs: list[int]) -> list[list[int]]: ...


def serve(load: Callable[..., Any], packages: list[str]) -> None:
    """Load the model that the command line names, then do jobs until standard input ends.

    load: called with the model's path, the number of threads, and the engine's options by name. Returns a Driver, or
    another object whose methods the jobs call.
    """
    arguments = json.loads(sys.argv[1])
    with os.fdopen(arguments["reply_fd"], "w") as replies:

        def reply(**fields: Any) -> None:
            replies.write(json.dumps(fields) + "\n")
            replies.flush()

        try:
            driver = load(arguments["model"], arguments["threads"], **arguments["options"])
            reply(versions={name: importlib.metadata.version(name) for name in packages})
            for line in sys.stdin:
                job = json.loads(line)
                if "call" in job:
                    reply(result=getattr(driver, job["call"])(*job["arguments"]))
                else:
                    reply(**_do(driver, job["prompts"], job["num_outputs"]))
        except BaseException as error:
            traceback.print_exc()
            reply(error=f"{type(error).__name__}: {error}"[:1000])
            raise


def _do(driver: Driver, prompts: list[list[int]], num_outputs: list[int]) -> dict[str, Any]:
    begin = time.perf_counter()
    rows = driver.generate(prompts, num_outputs)
    seconds = time.perf_counter() - begin
    finished_at = time.monotonic()
    lengths = [len(row) for row in rows]
    if lengths != num_outputs:
        raise RuntimeError(f"asked for {num_outputs} tokens per request, got {lengths}")
    return {
        "seconds": seconds,
        "finished_at": finished_at,
        "num_tokens": sum(lengths),
        "tokens": [[int(token) for token in row[:_REPORTED_TOKENS]] for row in rows],
    }
