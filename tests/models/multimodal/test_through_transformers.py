"""Models whose answers to media are not those of Transformers are refused by name, with the reason."""

from __future__ import annotations

import pytest

from penstock.checkpoints.multimodal import MultimodalCheckpoint
from penstock.errors import UnsupportedModel
from penstock.models.multimodal.assemble import _make_encoder


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("InstructBlip", "its encoder of images reads the prompt's text too"),
        ("Ovis2", r"visual indicators"),
        ("PerceptionLM", "its vision tower is a model of the package timm"),
        ("Unheard", "its answers to images have not been shown to be those of Transformers"),
    ],
)
def test_other_models_take_text_alone(name: str, reason: str) -> None:
    checkpoint = MultimodalCheckpoint(f"{name}ForConditionalGeneration", {}, ("image",))
    with pytest.raises(UnsupportedModel, match=rf"{name}.* takes no media here: .*{reason}.* language_model_only"):
        _make_encoder(checkpoint)
