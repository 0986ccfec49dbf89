"""`penstock plan`: the memory arithmetic of an engine, without starting it."""

from __future__ import annotations

import json as json_module
from typing import Annotated

import typer

from penstock.cli import options
from penstock.cli.failures import OutputClosed, readable_errors


def plan(
    model: Annotated[str, typer.Argument(help="demo, a folder, or a hub id")],
    json: Annotated[bool, typer.Option("--json", help="Write JSON, sizes in bytes")] = False,
    revision: Annotated[str | None, typer.Option(help="Of a hub id: branch, tag or commit")] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = None,
    load_format: options.LoadFormat = "auto",
    max_model_len: options.MaxModelLen = None,
    block_size: Annotated[int, typer.Option(help="Tokens per block of the KV cache")] = 16,
    max_num_seqs: options.MaxNumSeqs = 256,
    max_num_batched_tokens: options.MaxNumBatchedTokens = 2048,
    memory_fraction: options.MemoryFraction = None,
    kv_cache_memory_bytes: options.KVCacheMemoryBytes = None,
    kv_cache_dtype: options.KVCacheDtype = "auto",
    option: options.Options = None,
    debug: options.Debug = False,
) -> None:
    """Show what a model would need here: weights, activations, KV cache, and how many requests fit.

    Reads config.json and the headers of the weight files, never the weights; of a hub id it downloads no more.
    Ends with exit code 1 and the arithmetic when the engine could not start.
    """
    with readable_errors(debug=debug):
        from penstock.engine.plan import plan_engine

        engine_options = {
            "revision": revision,
            "device": device,
            "dtype": dtype,
            "quantization": quantization,
            "load_format": load_format,
            "max_model_len": options.parse_max_model_len(max_model_len),
            "block_size": block_size,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "memory_fraction": memory_fraction,
            "kv_cache_memory_bytes": kv_cache_memory_bytes,
            "kv_cache_dtype": kv_cache_dtype,
            **options.parse_options(option),
        }
        planned = plan_engine(model, **engine_options)
        try:
            print(json_module.dumps(planned.to_dict(), indent=2) if json else planned.table(), flush=True)
        except BrokenPipeError as error:
            raise OutputClosed from error
