"""Dual encoders of Transformers: an encoder of images and one of texts with embeddings that are compared.

CLIP, https://arxiv.org/abs/2103.00020; SigLIP, https://arxiv.org/abs/2303.15343. An image is a prompt of one token,
whose embedding is given. Suffixes: T tokens of the step, D size of the embeddings.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.errors import ModelError, UnsupportedFeature, UnsupportedModel
from penstock.layers.embedding import GIVEN_EMBEDDINGS, TEXT_IDS
from penstock.layers.weights import WeightSlot, slots_of_modules
from penstock.models.causal_lm import CausalLM
from penstock.models.multimodal.interface import DummyItem, MediaEncoder
from penstock.models.transformers_fallback.buffers import create_buffers


class EncoderOfModel(MediaEncoder):
    """Encoder whose weights are those of a Transformers model that is loaded beside it.

    model: with the weights. size: elements of a row.
    """

    def __init__(self, model: Any, size: int) -> None:
        super().__init__()
        self._model = (model,)
        self.feature_size = size

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        return {}

    def checkpoint_name(self, name: str) -> str | None:
        return None


class ImageEncoder(EncoderOfModel):
    """The image's side of a dual encoder: one row per image."""

    def encode(self, modality: str, inputs: Mapping[str, Tensor]) -> Tensor:
        """See `MediaEncoder`. inputs: pixel_values, [1, channels, height, width]."""
        (model,) = self._model
        dtype = next(model.parameters()).dtype
        try:
            output = model.get_image_features(**{name: tensor.to(dtype) for name, tensor in inputs.items()})
        except (TypeError, ValueError, RuntimeError) as error:
            raise ModelError(f"{type(model).__name__} cannot encode an {modality}: {error}") from error
        return _features(output)

    def dummy_item(self, most_rows: int) -> DummyItem:
        """See `MediaEncoder`: one image."""
        (model,) = self._model
        size = model.config.vision_config.image_size
        return DummyItem("image", {"pixel_values": np.zeros((1, 3, size, size), dtype=np.float32)})


class ImageOrText(CausalLM):
    """The class of Transformers that `architectures` names, an image or a text at a time: base of such backbones."""

    ignorable = (r".*position_ids", r"vlm\..*lm_head\..*")
    hidden_size: int
    _image_encoder: tuple[MediaEncoder]

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.quantization is not None:
            raise UnsupportedFeature(
                f"quantization={config.quantization!r} is not supported for {config.model}, which embeds images and "
                "texts. Leave it out."
            )
        self.model = _build(config)
        self._vocab_size = config.vocab_size
        self._longest = int(self.model.config.get_text_config().max_position_embeddings)

    @abstractmethod
    def embed(self, ids_T: Tensor) -> Tensor:
        """Rows of a text's tokens, [T, D], or one for all of them."""

    @property
    def image_encoder(self) -> MediaEncoder:
        """Encoder of images, with this model's weights."""
        return self._image_encoder[0]

    def take_embeddings(self) -> int:
        return self.hidden_size

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext) -> Tensor:
        num_tokens, sequences, of_all = len(input_ids_T), context.sequences, context.of_all_tokens()
        assert sequences is not None, "a step has its sequences"
        given_TD, text_ids_T = of_all.input(GIVEN_EMBEDDINGS), of_all.input(TEXT_IDS)
        out_TD = torch.zeros(num_tokens, self.hidden_size, device=input_ids_T.device)
        is_image = set[int]()
        if given_TD is not None and text_ids_T is not None:
            out_TD.copy_(given_TD)
            is_image = set(torch.nonzero(text_ids_T == self._vocab_size)[:, 0].tolist())
        starts = sequences.query_start_loc_np[: sequences.num_actual_reqs + 1].tolist()
        for begin, end in itertools.pairwise(starts):
            if begin not in is_image and end - begin <= self._longest:
                out_TD[begin:end] = self.embed(input_ids_T[begin:end])
        return context.narrowed(out_TD)

    def compute_logits(self, hidden_LD: Tensor, context: ForwardContext) -> Tensor:
        raise NotImplementedError("a pooling model has no language model head")

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        return slots_of_modules(self.model)


class DualEncoder(ImageOrText):
    """An encoder of images and one of texts. Rows of a text are its embedding in all of its tokens."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        text_config = self.model.config.text_config
        # SigLIP has no projection of its images, and one of its texts.
        projected = getattr(self.model.config, "projection_dim", None)
        self.hidden_size = int(text_config.projection_size if projected is None else projected)
        # SigLIP was trained with texts that are filled up with padding, without a mask.
        self._padding = text_config.pad_token_id if self.model.config.model_type == "siglip" else None
        self._image_encoder = (ImageEncoder(self.model, self.hidden_size),)

    def embed(self, ids_T: Tensor) -> Tensor:
        ids = ids_T.to(torch.int64).unsqueeze(0)
        if self._padding is not None:
            ids = F.pad(ids, (0, self._longest - ids.shape[1]), value=self._padding)
        return _features(self.model.get_text_features(input_ids=ids))


def _features(output: Any) -> Tensor:
    """Embedding of one item, [1, D]."""
    return getattr(output, "pooler_output", output)  # type: ignore[no-any-return]


def _build(config: ModelConfig) -> Any:
    import transformers

    multimodal = config.multimodal
    assert multimodal is not None, "such a model has a configuration of two parts"
    try:
        model_class = getattr(transformers, multimodal.architecture)
        hf_config = model_class.config_class.from_dict(dict(multimodal.hf_config))
        with torch.device("meta"):
            model = model_class._from_config(hf_config, dtype=torch.float32, attn_implementation="eager")
    except Exception as error:  # Transformers raises anything
        raise UnsupportedModel(
            f"{config.model} ({multimodal.architecture}) cannot be built by Transformers: {error}"
        ) from error
    model = model.eval().requires_grad_(False)
    create_buffers(model)
    return model
