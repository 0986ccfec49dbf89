"""The corpus: the part to learn from, the part to be measured on, and where speeches begin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HELD_OUT_SHARE = 0.06


@dataclass(frozen=True)
class Corpus:
    """The plays, cut in two at a speech boundary: the end of the file is never trained on."""

    train: str
    held_out: str

    @classmethod
    def read(cls, path: Path) -> Corpus:
        """Read the corpus file (UTF-8, speeches separated by an empty line)."""
        text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
        cut = text.index("\n\n", int(len(text) * (1 - HELD_OUT_SHARE))) + 2
        return cls(text[:cut], text[cut:])


def speech_starts(text: str) -> list[int]:
    """Character offsets at which a speech begins."""
    starts = [0]
    while (gap := text.find("\n\n", starts[-1])) != -1:
        starts.append(gap + 2)
    return starts[:-1] if starts[-1] >= len(text) else starts
