"""Interface of media encoders.

Suffixes: L tokens of an item, D hidden size of the language model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import numpy as np
from torch import Tensor, nn

from penstock.layers.weights import WeightSlot


class DummyItem(NamedTuple):
    """An item without contents. inputs: of the encoder, by name; arrays of floats are zeros."""

    modality: str
    inputs: Mapping[str, np.ndarray]


class MediaEncoder(nn.Module, ABC):
    """Encoder of media items into the features that take the place of token embeddings.

    It is constructed with a multimodal model's configuration: `config.json` with the defaults of all fields.
    Construction raises ModelError for a missing or invalid field, UnsupportedFeature for an unsupported value. Every
    rank has the whole encoder. `process_weights_after_loading` follows loading, as for a language model.

    has_own_slots: whether its slots are not in the table of the language model beside it.
    modalities: those that it encodes, of "image", "video" and "audio".
    ignorable: regular expressions for names of checkpoint tensors, as `checkpoint_name` returns them, that belong to
    the encoder and have no slot.
    feature_size: D. num_levels: DeepStack levels beside the features.
    """

    has_own_slots: ClassVar[bool] = True
    modalities: ClassVar[tuple[str, ...]] = ("image",)
    ignorable: tuple[str, ...] = ()
    feature_size: int
    num_levels: int = 0

    @abstractmethod
    def encode(self, modality: str, inputs: Mapping[str, Tensor]) -> Tensor:
        """Features of one item, [L, D] in the model's dtype; [L, (1 + num_levels) * D] with DeepStack levels.

        L may be more than the tokens of one run of placeholders: the rows go to all of the item's placeholders in turn.

        inputs: by name, what Transformers' processor makes of the item alone, with its batch dimension. Tensors of
        integers and booleans, such as grids and masks, are on the host; others are on the model's device in any float
        dtype. The result's bits depend on the item only. Raises ModelError for inputs that do not fit the model.
        """

    @abstractmethod
    def dummy_item(self, most_rows: int) -> DummyItem:
        """The item whose encoding takes most memory, of those with up to `most_rows` rows; or the smallest one."""

    @abstractmethod
    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Slots of all required checkpoint tensors by name."""

    @abstractmethod
    def checkpoint_name(self, name: str) -> str | None:
        """Map a checkpoint tensor's name, in any published form, to one of `checkpoint_slots` or `ignorable`.

        None for a tensor that is not the encoder's.
        """
