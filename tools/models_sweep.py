"""Write docs/models_sweep.md: every causal language model of the installed Transformers, made tiny and compared.

python -m tools.models_sweep

It takes some minutes. `tests/tools/test_models_sweep.py` compares the page with one model at a time.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools.sweep_page import SweepPage, cell

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.model_sweep import NATIVE, NOT_TRIED, THROUGH_TRANSFORMERS, Outcome, class_names, has_native, outcome_of

PAGE = SweepPage(
    "models_sweep.md",
    """\
# All causal language models of Transformers {version}

<!-- Written by tools/models_sweep.py. -->

Each class that `AutoModelForCausalLM` knows was made tiny, with random weights, saved by Transformers, and served on
CPUs. Either it runs, *native* or [*through Transformers*](models.md#through-transformers): in float32 the greedy tokens
of Transformers, log-probabilities within 1e-4, mixed and chunked prompts, equal bits alone and in a batch. Or it is
*refused* at start with the reason. None gives other answers. `make test-slow` repeats it.

{counts}

| `model_type` | class | as served by default | with `model_impl="transformers"` |
| --- | --- | --- | --- |
""",
)


def main() -> None:
    PAGE.write(class_names(), row, _counts)


def row(model_type: str) -> str:
    """The table's row. Raises AssertionError for a wrong answer."""
    class_name = class_names()[model_type]
    if model_type in NOT_TRIED:
        cells = [f"not tried: {NOT_TRIED[model_type]}", ""]
    else:
        impls = ("auto", "transformers") if has_native(model_type) else ("auto",)
        cells = [cell(outcome) for outcome in _outcomes(model_type, impls)]
    return f"| `{model_type}` | {class_name} | {cells[0]} | {cells[1] if len(cells) > 1 else ''} |"


def _outcomes(model_type: str, impls: tuple[str, ...]) -> Iterator[Outcome]:
    for impl in impls:
        with tempfile.TemporaryDirectory() as folder:
            yield outcome_of(model_type, Path(folder), model_impl=impl)


def _counts(rows: dict[str, str]) -> str:
    defaults = [line.split(" | ")[2] for line in rows.values()]
    native, through = (sum(cell.startswith(kind) for cell in defaults) for kind in (NATIVE, THROUGH_TRANSFORMERS))
    return f"Of {len(rows)} model types {native} run natively, {through} through Transformers."


if __name__ == "__main__":
    main()
