"""How far a batch of prompts is."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm


def progress_bar(num_prompts: int, *, is_wanted: bool = True) -> tqdm[Any]:
    """tqdm's bar, shown if it is wanted and standard error is a terminal."""
    return tqdm(total=num_prompts, desc="Prompts", dynamic_ncols=True, disable=None if is_wanted else True)
