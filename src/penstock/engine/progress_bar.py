"""How far a batch of prompts is."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self


class ProgressBar:
    """tqdm's bar, if it is wanted and standard error is a terminal; else nothing."""

    def __init__(self, num_prompts: int, *, is_wanted: bool) -> None:
        self._bar: Any = None
        if is_wanted and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=num_prompts, desc="Prompts", dynamic_ncols=True)

    def update(self) -> None:
        """One more prompt is done."""
        if self._bar is not None:
            self._bar.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
