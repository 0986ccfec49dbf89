"""Media encoder that runs the modules of Transformers, for architectures without a native one.

Suffixes: L tokens of an item, D hidden size of the language model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from penstock.checkpoints.multimodal import MultimodalCheckpoint
from penstock.errors import ModelError, UnsupportedModel
from penstock.layers.weights import WeightSlot
from penstock.models.multimodal.interface import DummyItem, MediaEncoder
from penstock.models.transformers_fallback.buffers import create_buffers
from penstock.models.transformers_fallback.interface import CannotRun

# Attributes of Transformers' models that are the language model, and names of its head.
_LANGUAGE = ("language_model", "text_model", "lm_head")
# Forms in which checkpoints name the modules beside the language model.
_PREFIXES = ("", "model.")
# Pixels of an image's side where the configuration does not say.
_IMAGE_SIZE = 224
# Size of a spectrogram of Whisper's largest encoder, likewise.
_AUDIO_BINS, _AUDIO_POSITIONS = 128, 1500


class TransformersEncoder(MediaEncoder):
    """The modules of a multimodal model of Transformers beside its language model, an item at a time."""

    def __init__(self, checkpoint: MultimodalCheckpoint) -> None:
        super().__init__()
        self.modalities = checkpoint.modalities  # type: ignore[misc]
        self._architecture = checkpoint.architecture
        model = _build(checkpoint)
        self.feature_size = model.config.get_text_config().hidden_size
        size = (checkpoint.hf_config.get("vision_config") or {}).get("image_size")
        self._size = size if isinstance(size, int) else _IMAGE_SIZE
        audio = checkpoint.hf_config.get("audio_config") or {}
        positions = audio.get("max_source_positions") or audio.get("max_position_embeddings") or _AUDIO_POSITIONS
        # Bins and frames of a spectrogram, whose frames are halved.
        self._window = audio.get("num_mel_bins", _AUDIO_BINS), 2 * positions
        self._encode = {modality: _method(model, modality) for modality in self.modalities}
        self._prefix = "model." if hasattr(model, "model") else ""
        self.parts = _inner(model)

    def encode(self, modality: str, inputs: Mapping[str, Tensor]) -> Tensor:
        dtype = next(self.parameters()).dtype
        given = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
        try:
            output = self._encode[modality](**given)
            features = getattr(output, "pooler_output", output)
            if features is None:  # Llama 4 projects them in its forward pass
                features = self.parts.multi_modal_projector(output.last_hidden_state.flatten(0, -2))
        except Exception as error:  # Transformers raises anything
            raise ModelError(f"{self._architecture} cannot encode an item ({modality}): {error}") from error
        if isinstance(features, (list, tuple)):
            features = torch.cat([one.reshape(-1, self.feature_size) for one in features])
        return features.reshape(-1, self.feature_size)  # type: ignore[no-any-return]

    def dummy_item(self, most_rows: int) -> DummyItem:
        """See `MediaEncoder`: one image of the configured size, or windows, of two positions a row."""
        if "image" not in self.modalities:
            windows = np.zeros((max(1, most_rows // (self._window[1] // 4)), *self._window), dtype=np.float32)
            mask = np.ones((len(windows), self._window[1]), dtype=np.int64)
            return DummyItem("audio", {"input_features": windows, "input_features_mask": mask})
        return DummyItem("image", {"pixel_values": np.zeros((1, 3, self._size, self._size), dtype=np.float32)})

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        return {name: WeightSlot(tuple(tensor.shape), tensor) for name, tensor in self._tensors().items()}

    def checkpoint_name(self, name: str) -> str | None:
        known = self._tensors()
        return next((prefix + name for prefix in _PREFIXES if prefix + name in known), None)

    def _tensors(self) -> dict[str, Tensor]:
        return {self._prefix + name: tensor for name, tensor in self.parts.state_dict(keep_vars=True).items()}


def _build(checkpoint: MultimodalCheckpoint) -> Any:
    """The model without values, and without its language model."""
    model_class = getattr(transformers, checkpoint.architecture, None)
    if model_class is None:
        raise UnsupportedModel(
            f"{checkpoint.architecture} is not in Transformers {transformers.__version__}, nor implemented here."
        )
    config = model_class.config_class.from_dict(dict(checkpoint.hf_config))
    attention = "sdpa" if model_class._supports_sdpa else "eager"
    model = model_class._from_config(config, dtype=torch.float32, attn_implementation=attention)
    for name in _LANGUAGE:
        if hasattr(_inner(model), name):
            setattr(_inner(model), name, None)
    model.lm_head = None
    try:
        create_buffers(model)
    except CannotRun as reason:
        raise UnsupportedModel(f"{checkpoint.architecture} cannot encode media: {reason}.") from reason
    return model.eval().requires_grad_(False)


def _inner(model: Any) -> Any:
    """The module with the parts: the model itself, or the one below its head."""
    return getattr(model, "model", model)


def _method(model: Any, modality: str) -> Callable[..., Any]:
    name = f"get_{modality}_features"
    method: Callable[..., Any] | None = getattr(_inner(model), name, None) or getattr(model, name, None)
    if method is None:
        raise UnsupportedModel(
            f"{type(model).__name__} of Transformers has no method {name}, which encodes such items."
        )
    return method
