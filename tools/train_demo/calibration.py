"""Calibration data of the demo model for int4 quantisation (GPTQ): `calibration.jsonl` of its folder."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from penstock.config.model import CALIBRATION_FILE

from .dialogue import training_conversation

NUM_CONVERSATIONS = 600


def write_calibration(folder: Path, seed: int) -> None:
    """Write conversations from the training side, one to a line."""
    rng = Random(seed)
    lines = [json.dumps({"messages": training_conversation(rng)}) for _ in range(NUM_CONVERSATIONS)]
    (folder / CALIBRATION_FILE).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
