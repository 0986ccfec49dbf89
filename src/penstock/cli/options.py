"""Options that several commands take, and how they become the engine's."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from penstock.errors import ConfigError

# Names that people bring from other engines.
OTHER_NAMES = {"gpu-memory-utilization": "memory-fraction"}

Model = Annotated[str, typer.Option("--model", "-m", help="demo, a folder, or a hub id")]
TokenizerName = Annotated[str | None, typer.Option("--tokenizer", help="The same, if not the model's own")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16")]
Quantization = Annotated[str | None, typer.Option(help="int8 or int4: round the weights while loading")]
Threads = Annotated[int | None, typer.Option("--threads", help="CPU threads  [default: one per physical core]")]
LoadFormat = Annotated[str, typer.Option(help="auto, safetensors, pt, sharded_state, dummy")]
MaxModelLen = Annotated[str | None, typer.Option(metavar="N|auto", help="Longest context  [default: the model's]")]
MaxNumSeqs = Annotated[int, typer.Option(help="Requests that run at once")]
MaxNumBatchedTokens = Annotated[int, typer.Option(help="Tokens of one step")]
MemoryFraction = Annotated[
    float | None, typer.Option(help="Share of the device's memory (also: --gpu-memory-utilization)")
]
KVCacheMemoryBytes = Annotated[int | None, typer.Option(help="KV cache size, instead of what that leaves")]
KVCacheDtype = Annotated[str, typer.Option("--kv-cache-dtype", help="auto, float32, bfloat16, int8")]
EngineSeed = Annotated[int, typer.Option(help="Makes the seeds of requests without one")]
Options = Annotated[
    list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="Any other engine option; repeatable")
]
Debug = Annotated[bool, typer.Option("--debug", help="Verbose log, and tracebacks")]


def parse_max_model_len(value: str | None) -> int | str | None:
    """Digits as a number; the configuration judges everything else."""
    return int(value) if value is not None and value.isdecimal() else value


def parse_options(options: list[str] | None) -> dict[str, Any]:
    """`NAME=VALUE` pairs as engine options. Values are JSON where they can be, else text.

    Raises ConfigError for something without an equals sign.
    """
    parsed = {}
    for option in options or []:
        name, equals, value = option.partition("=")
        if not equals or not name:
            raise ConfigError(f"--option {option!r} is not valid. Allowed: NAME=VALUE, such as block_size=32.")
        name = name.strip().replace("-", "_")
        if name == "model":
            raise ConfigError(f"--option {option!r} is not valid. The model has an option of its own: --model.")
        parsed[name] = parse_value(value.strip())
    return parsed


def parse_value(value: str) -> Any:
    """A value as people write it: JSON or a constant of Python where it can be, else text."""
    python_constants = {"True": True, "False": False, "None": None}
    if value in python_constants:
        return python_constants[value]
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value
