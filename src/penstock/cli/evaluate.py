"""`penstock eval`: what weight formats cost in quality, on a text."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import options
from penstock.cli.failures import read_text_file
from penstock.cli.plots import check_plot, write_plot


@options.engine_command(without=("quantization", "dtype", "seed", "speculative_config"))
def evaluate(
    text: Annotated[Path, typer.Option("--text", "-t", help="Text file, UTF-8, like what the model will read")],
    quantization: Annotated[
        str | None,
        typer.Option(
            "--quantization",
            "-q",
            metavar="LIST",
            help="Formats with commas between: none, int8, int4, bfloat16, float32; stored: as the files have them  "
            "[default: none,int8,int4, and stored for GGUF and quantised files]",
        ),
    ] = None,
    against: Annotated[
        str, typer.Option(metavar="FORMAT|MODEL", help="Format that changes are measured from, or another model")
    ] = "float32",
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text that are read")] = 4096,
    window: Annotated[int, typer.Option(min=2, help="Tokens that are read at once, without those before them")] = 256,
    json: Annotated[bool, typer.Option("--json", help="Write JSON: losses in nats, sizes in bytes")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw quality against size, .svg or .png")] = None,
    *,
    model: options.Model,
    engine: dict[str, Any],
) -> None:
    """Show what each weight format costs in quality, and what it saves: loss on a text, speed and size.

    The model reads the text once per format. Loss and perplexity say how well it predicts the text, the mean change and
    KL how far its probabilities move from those of --against.
    """
    from penstock.bench.quality.formats import FORMATS, default_formats, parse_formats
    from penstock.bench.quality.report import as_json, as_svg, table
    from penstock.bench.quality.run import evaluate as measure
    from penstock.config import EngineConfig

    given = None if quantization is None else parse_formats(quantization)
    content = read_text_file("--text", text)
    check_plot(plot)
    formats = given or default_formats(EngineConfig.create(model, **engine))
    is_format = against in FORMATS
    tokens, results = measure(
        model,
        content,
        formats,
        engine,
        against=against if is_format else "float32",
        reference_model=None if is_format else against,
        window=window,
        max_tokens=max_tokens,
        on_measured=lambda format: print(f"penstock: measuring {format} ...", file=sys.stderr, flush=True),
    )
    title = f"{model} on {text.name}: {tokens.num_scored:,} tokens in windows of {window:,}"
    if plot is not None:
        write_plot(plot, as_svg(title, results))
    from penstock.cli.output import show, standard_output, write

    if json:
        write(standard_output(as_json=True), json_module.dumps(as_json(model, tokens, results), indent=2) + "\n")
    else:
        show(table(title, results))
