"""Models of images of pages and of queries, with a vector per token of either: ColPali (Faysse et al. 2024,
https://arxiv.org/abs/2407.01449) and ColQwen2.

The class of Transformers runs whole, an image or a text at a time. A prompt with an image has all tokens of its page,
whose vectors are the item's features. Suffixes: T tokens of a prompt, D size of the vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.config import ModelConfig
from penstock.errors import ModelError
from penstock.models.multimodal.interface import DummyItem
from penstock.models.pooling.dual_encoder import EncoderOfModel, ImageOrText

# Beginnings of the names of tensors in checkpoints of other versions of Transformers, and their own names.
_RENAMES = (
    ("vlm.language_model.model.", "vlm.language_model."),
    ("vlm.model.language_model.", "vlm.language_model."),
    ("vlm.model.", "vlm."),
)


class PageImages(EncoderOfModel):
    """Encoder of pages: the vectors of all tokens of their prompts."""

    def encode(self, modality: str, inputs: Mapping[str, Tensor]) -> Tensor:
        """See `MediaEncoder`. inputs: what the model's processor makes of an image, input_ids among them."""
        (model,) = self._model
        weight = next(model.parameters())
        given = {
            name: tensor.to(weight if tensor.is_floating_point() else weight.device) for name, tensor in inputs.items()
        }
        try:
            return _vectors(model, **given)
        except Exception as error:  # Transformers raises anything
            raise ModelError(f"{type(model).__name__} cannot encode an {modality}: {error}") from error

    def dummy_item(self, most_rows: int) -> DummyItem:
        """See `MediaEncoder`: nothing says how many tokens an image of some size has."""
        return DummyItem("image", {"pixel_values": np.zeros((1, 3, 1, 1), dtype=np.float32)})


class PageEncoder(ImageOrText):
    """A model of images of pages and of queries."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.hidden_size = int(self.model.config.embedding_dim)
        self._image_encoder = (PageImages(self.model, self.hidden_size),)

    def embed(self, ids_T: Tensor) -> Tensor:
        return _vectors(self.model, ids_T.to(torch.int64).unsqueeze(0))

    def checkpoint_name(self, name: str) -> str:
        return next((new + name.removeprefix(old) for old, new in _RENAMES if name.startswith(old)), name)

    ignorable = (r".*position_ids", r".*lm_head\..*")


def _vectors(model: Any, input_ids: Tensor, **images: Tensor) -> Tensor:
    """Vectors of a prompt's tokens, [T, D]."""
    output = model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **images)
    return output.embeddings[0]  # type: ignore[no-any-return]
