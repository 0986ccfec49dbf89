"""Lag of an event loop while an AsyncEngine takes in requests that are long, or hard to check.

python -m benchmarks.event_loop_lag [--model demo] [--only TEXT] [--timeout 60]

A task that sleeps for a millisecond, again and again, notes by how much it is late. Each request is given to the engine
once, to its first output or refusal; the longest delay meanwhile is the lag.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

from penstock import AsyncEngine, SamplingParams, StructuredOutputsParams
from penstock.errors import PenstockError

_TICK_S = 0.001
_SENTENCE = "To be, or not to be, that is the question. "


def _constrained(**constraint: Any) -> Callable[[], tuple[Any, SamplingParams]]:
    def make() -> tuple[Any, SamplingParams]:
        return "ROMEO:", SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(**constraint))

    return make


def _prompt(prompt: Any) -> Callable[[], tuple[Any, SamplingParams]]:
    return lambda: (prompt, SamplingParams(max_tokens=4))


def _chained_definitions(number: int) -> str:
    definitions = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(number)}
    return json.dumps({"$defs": {**definitions, f"d{number}": {"type": "integer"}}, "$ref": "#/$defs/d0"})


def requests() -> dict[str, Callable[[], tuple[Any, SamplingParams]]]:
    """Factories of prompts and parameters, by the kind of slow request."""
    repeated_key = "{" + ",".join(f'"k{index}": {{}}' for index in range(60_000)) + ', "k59999": {}}'
    return {
        "a short prompt": _prompt(_SENTENCE),
        "a prompt of 2 kB": _prompt(_SENTENCE * 46),
        "a prompt of 4 kB": _prompt(_SENTENCE * 92),
        "a prompt of 12 kB": _prompt(_SENTENCE * 280),
        "a prompt of 700 kB": _prompt(_SENTENCE * 16_300),
        "a prompt of 7 MB": _prompt(_SENTENCE * 163_000),
        "a million token ids": _prompt({"prompt_token_ids": [7] * 1_000_000}),
        "a grammar of 20,000 escapes": _constrained(grammar="start: /" + "\\/" * 20_000),
        "JSON with 60,000 keys, the last one twice": _constrained(json=repeated_key),
        "a regex of 80,000 groups": _constrained(regex="(a)" * 80_000),
        "a regex of 500,000 open braces": _constrained(regex="a{" * 500_000),
        "8,000 chained definitions": _constrained(json=_chained_definitions(8_000)),
    }


async def lag_during(work: Coroutine[Any, Any, str]) -> tuple[float, str]:
    """Largest lag of the event loop in seconds, and the result of the work."""
    task, longest = asyncio.ensure_future(work), 0.0
    while not task.done():
        before = time.perf_counter()
        await asyncio.sleep(_TICK_S)
        longest = max(longest, time.perf_counter() - before - _TICK_S)
    return longest, task.result()


async def _first_output(engine: AsyncEngine, prompt: Any, params: SamplingParams, timeout_s: float) -> str:
    try:
        async with asyncio.timeout(timeout_s), aclosing(engine.generate(prompt, params)) as outputs:
            async for output in outputs:
                return output.error or "answered"
    except (PenstockError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    return "no output"


async def _measure(model: str, only: str, timeout_s: float) -> None:
    async with AsyncEngine(model) as engine:
        lag, _ = await lag_during(_tokenizer(engine))
        print(f"{1000 * lag:8.1f} ms  get_tokenizer")
        for name, make in requests().items():
            if only not in name:
                continue
            prompt, params = make()
            lag, outcome = await lag_during(_first_output(engine, prompt, params, timeout_s))
            print(f"{1000 * lag:8.1f} ms  {name} ({outcome[:100]})", flush=True)


async def _tokenizer(engine: AsyncEngine) -> str:
    await asyncio.sleep(2 * _TICK_S)
    return type(engine.get_tokenizer()).__name__


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--only", default="", help="only requests whose name has this text")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for a request")
    arguments = parser.parse_args()
    asyncio.run(_measure(arguments.model, arguments.only, arguments.timeout))


if __name__ == "__main__":
    main()
