"""`penstock plan`: memory plan of an engine, without starting it."""

from __future__ import annotations

import json as json_module
from typing import Annotated, Any

import typer

from penstock.cli import options
from penstock.cli.output import standard_output, write


@options.engine_command(without=("tokenizer", "num_threads", "seed"), shows_log=False)
def plan(
    json: Annotated[bool, typer.Option("--json", help="Write JSON, sizes in bytes")] = False,
    *,
    model: options.Model,
    engine: dict[str, Any],
) -> None:
    """Show the memory that a model needs here: weights, activations, KV cache, and how many requests fit.

    Reads config.json and the headers of the weight files, not the weights, and downloads only those of a hub id.
    Exit code 1 means that the engine could not start.
    """
    from penstock.engine.planning.plan import plan_engine

    planned = plan_engine(model, **engine)
    text = json_module.dumps(planned.to_dict(), indent=2) if json else planned.table()
    write(standard_output(as_json=json), f"{text}\n")
