"""Write docs/media_sweep.md: every model of images and text of the installed Transformers, made tiny and compared.

python -m tools.media_sweep

It takes some minutes. `tests/tools/test_media_sweep.py` compares the page with one model at a time.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from tools.sweep_page import SweepPage, cell

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.media_sweep import NATIVE, class_names, outcome_of
from support.model_sweep import THROUGH_TRANSFORMERS

PAGE = SweepPage(
    "media_sweep.md",
    """\
# All models of images and text of Transformers {version}

<!-- Written by tools/media_sweep.py. -->

Each class that `AutoModelForImageTextToText` knows. *Native encoder*: a
[family](multimodal.md#what-models-make-of-them) whose encoder is Penstock's, compared with Transformers by the tests.
*Through Transformers*: the encoder's modules are Transformers', beside the language model here; made tiny, with random
weights, greedy tokens and log-probabilities of a text with an image are those of Transformers in float32, within 1e-4.
What the model's processor makes of an image is not part of that. *Text alone*: the language model runs with
`language_model_only`; images are refused with the reason. *Refused*: the language model does not run either.
`make test-slow` repeats it.

{counts}

| `model_type` | class | |
| --- | --- | --- |
""",
)


def main() -> None:
    PAGE.write(class_names(), row, _counts)


def row(model_type: str) -> str:
    """The table's row. Raises AssertionError for a wrong answer."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = outcome_of(model_type, Path(folder))
    return f"| `{model_type}` | {class_names()[model_type]} | {cell(outcome)} |"


def _counts(rows: dict[str, str]) -> str:
    kinds = Counter(line.split(" | ")[2].rstrip(" |").split(":")[0] for line in rows.values())
    return (
        f"Of {len(rows)} model types {kinds[NATIVE]} have a native encoder, and {kinds[THROUGH_TRANSFORMERS]} run "
        "through Transformers."
    )


if __name__ == "__main__":
    main()
