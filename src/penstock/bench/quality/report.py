"""Table, JSON and picture of `penstock eval`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Column, Table

from penstock.bench.picture import Panel, Series, chart
from penstock.bench.quality.run import Quality, Text
from penstock.observability.units import format_bytes

_MIB = 1 << 20
_FIGURES = (
    *("loss", "perplexity", "loss change", "mean change", "KL", "same top"),
    *("prompt tok/s", "output tok/s", "weights"),
)
_LAYOUT: Mapping[str, Any] = {
    "box": box.SIMPLE_HEAD,
    "padding": (0, 1, 0, 0),
    "pad_edge": False,
    "title_justify": "left",
    "title_style": "bold",
    "caption_justify": "left",
}


def table(title: str, results: Sequence[Quality]) -> Table:
    """Return a column per format, the reference first: all formats fit into 80 columns."""
    found = Table(
        *[Column(no_wrap=True), *(Column(result.format, justify="right", overflow="fold") for result in results)],
        **_LAYOUT,
        title=title,
        caption=_CAPTION,
    )
    for row in zip(_FIGURES, *map(_cells, results), strict=True):
        found.add_row(*row)
    return found


_CAPTION = (
    "loss: nats per token. Changes are from the first column: of the loss, and the mean absolute change of the "
    "log-probability of a token of the text. KL: nats, of the most likely tokens. same top: share of positions with "
    "the same most likely token. output tok/s: of one request."
)


def _cells(result: Quality) -> list[str]:
    closeness = result.closeness
    return [
        f"{result.loss:.4f}",
        f"{math.exp(result.loss):.2f}",
        f"{closeness.loss_change:+.2%}",
        f"{closeness.mean_change:.4f}",
        f"{closeness.kl:.5f}",
        f"{closeness.same_top:.1%}",
        f"{result.prompt_tokens_per_s:,.0f}",
        f"{result.output_tokens_per_s:,.1f}",
        format_bytes(result.weight_bytes),
    ]


def as_json(model: str, text: Text, results: Sequence[Quality]) -> dict[str, Any]:
    """Return all figures as data: losses in nats, sizes in bytes."""
    return {
        "model": model,
        "num_tokens": text.num_scored,
        "num_windows": len(text.windows),
        "formats": [
            {
                "format": result.format,
                "loss": result.loss,
                "perplexity": math.exp(result.loss),
                "loss_change": result.closeness.loss_change,
                "mean_change": result.closeness.mean_change,
                "kl": result.closeness.kl,
                "same_top": result.closeness.same_top,
                "prompt_tokens_per_s": result.prompt_tokens_per_s,
                "output_tokens_per_s": result.output_tokens_per_s,
                "weight_bytes": result.weight_bytes,
            }
            for result in results
        ],
    }


def as_svg(title: str, results: Sequence[Quality]) -> str:
    """Picture of a point per format: size of the weights to the right, mean change upwards."""
    marks = [((one.weight_bytes / _MIB, one.closeness.mean_change), one.format) for one in results]
    panel = Panel("mean change of a token's log-probability, nats", "weights, MiB", [Series(marks=marks)])
    return chart(title, "quality and size of weight formats", [panel])
