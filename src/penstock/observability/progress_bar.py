"""Progress bars on standard error."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

from penstock.observability.standard_streams import is_terminal


def progress_bar(
    total: int | None, description: str = "Prompts", *, is_wanted: bool = True, **options: Any
) -> tqdm[Any]:
    """A tqdm bar of `total` items, shown if it is wanted and standard error is a terminal.

    options: further arguments of tqdm.
    """
    disable = not (is_wanted and is_terminal())
    return tqdm(total=total, desc=description, dynamic_ncols=True, disable=disable, **options)
