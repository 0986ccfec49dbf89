"""The demo model in float32, and the same after some training."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

DEMO = Path(__file__).parents[2] / "src" / "penstock" / "assets" / "demo"


def old_and_new(folder: Path) -> tuple[Path, Path]:
    """Folders of both, with the tokenizer."""
    made = folder / "old", folder / "new"
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32, trust_remote_code=False)
    for seed, path in enumerate(made):
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(seed * 0.1 * parameter.std() * torch.randn_like(parameter))
        model.save_pretrained(path)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO / name, path)
    return made
