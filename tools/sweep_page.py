"""A page whose table has a row for each model type of Transformers, made by trying all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers

if TYPE_CHECKING:
    from support.model_sweep import Outcome

_DOCS = Path(__file__).parents[1] / "docs"


@dataclass(frozen=True, slots=True)
class SweepPage:
    """The page `name` of docs. head: text before the rows, with {version} and {counts}."""

    name: str
    head: str

    def write(
        self, model_types: Iterable[str], row: Callable[[str], str], counts: Callable[[dict[str, str]], str]
    ) -> None:
        """Try all models. row: the row of a type. counts: a sentence on all rows, by type."""
        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        rows = {model_type: row(model_type) for model_type in sorted(model_types)}
        head = self.head.format(version=transformers.__version__, counts=counts(rows))
        self._path.write_text(head + "\n".join(rows.values()) + "\n", encoding="utf-8")

    def rows(self) -> dict[str, str]:
        """Rows by model type, as the page has them."""
        table = self._path.read_text(encoding="utf-8").split("| --- |\n", 1)[1]
        return {line.split("`")[1]: line for line in table.splitlines()}

    def is_of_this_version(self) -> bool:
        """Whether the page is about the installed version of Transformers."""
        return self._path.read_text(encoding="utf-8").split("\n", 1)[0].endswith(f" {transformers.__version__}")

    @property
    def _path(self) -> Path:
        return _DOCS / self.name


def cell(outcome: Outcome) -> str:
    """An outcome as a cell of the table."""
    reason = f": {outcome.reason}" if outcome.reason else ""
    return f"{outcome.kind}{reason}".replace("|", "\\|").replace("\n", " ")
