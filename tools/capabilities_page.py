"""Write docs/capabilities.md from the table that refusals at start are made from.

python tools/capabilities_page.py

"""

from __future__ import annotations

from pathlib import Path

from penstock.cli.capabilities import table_of
from penstock.worker.capabilities import DEVICES, FEATURES
from penstock.worker.capabilities.arrangements import MEANINGS

PAGE = Path(__file__).parents[1] / "docs/capabilities.md"

_HEAD = """\
# What works with what

<!-- Written by tools/capabilities_page.py. -->

Features by parallelism and executor ([parallel.md](parallel.md)), in two tables per device. A parallelism and an
executor together support the features that both support. A cell with "no" has the number of the reason: the engine
refuses that combination at start with this text. The tests go through every cell of the tables for CPUs: supported
combinations give the tokens of one worker, the others are refused. The tables for CUDA are what the engine allows; none
of their cells has been run on a GPU yet.

```sh
penstock env --capabilities
penstock env --capabilities --json
```

"""
_TAIL = """\
## What depends on sizes and contents

Also refused by name, once the model's sizes and the checkpoint's contents are known:

- heads, features or layers that cannot be divided among the workers; the error says which numbers of workers can;
- `decode_context_parallel_size` if no two workers have the same KV heads;
- GPTQ and compressed-tensors checkpoints with activation order (`desc_act`, `actorder`), with TP;
- an int8 KV cache with an attention backend that does not support it;
- several workers without the C++ kernels.
"""


def page() -> str:
    """Render the page."""
    meanings = [f"- **{name}**: {meaning}" for name, meaning in MEANINGS.items()]
    return "\n".join([_HEAD + "\n".join(meanings), *map(_section, DEVICES), _TAIL])


def _section(device: str) -> str:
    found = table_of(device)
    lines = [f"\n## On {device}\n"]
    for title, columns in found.columns.items():
        lines += [_row(title, columns), _row("---", ["---"] * len(columns))]
        for group, features in FEATURES.items():
            lines.append(_row(f"**{group}**", [""] * len(columns)))
            marks = [found.marks[feature.name] for feature in features]
            lines += [_row(one.name, [of[name] for name in columns]) for one, of in zip(features, marks, strict=True)]
        lines.append("")
    lines += [f"Not at all: {name}, {number}." for name, number in found.absent.items()]
    lines += [""] if found.absent else []
    lines += [f"{index}. {reason}" for index, reason in enumerate(found.reasons, start=1)]
    return "\n".join(lines) + "\n"


def _row(name: str, row: list[str]) -> str:
    return f"| {' | '.join([name, *row])} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
