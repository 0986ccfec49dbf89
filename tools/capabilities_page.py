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

Each feature, with each arrangement of an engine's workers ([parallel.md](parallel.md)), in two tables per device: how
workers share a model, and where they run. One of each together can do what both can. Where a cell says no, an engine
that is asked for both ends at start with an error that says why, and what to do instead, by the number of the cell. The
tests go through every cell of the tables for CPUs: what is allowed gives the tokens of one worker, and what is not is
refused with these words.

```sh
penstock env --capabilities
penstock env --capabilities --json
```

"""
_TAIL = """\
## What depends on sizes and contents

Refused by name as well, where a model's sizes or a checkpoint's contents are known:

- numbers of heads, features or layers that do not divide among so many workers, or that have too few for them; the
  error says which numbers can;
- `decode_context_parallel_size` where no two workers have the same KV heads;
- GPTQ and compressed-tensors checkpoints whose groups have inputs from anywhere (`desc_act`, `actorder`), with TP;
- int8 keys and values with an attention backend that cannot read them;
- several workers without the C++ kernels.
"""


def page() -> str:
    """The whole page."""
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
