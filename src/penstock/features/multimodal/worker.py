"""Worker side of media: the encoder's runs, the cache of features, and the step inputs that are made from them.

Suffixes: T tokens of the step, L rows of an item, D hidden size.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.contract import ArrayBytes, NewRequestData, SchedulerOutput, part_of
from penstock.contract.memory_tags import KV_CACHE
from penstock.device import Device
from penstock.errors import ModelError
from penstock.features.multimodal.item_ends import ItemEnds, rows_of
from penstock.features.multimodal.messages import MediaItem, MediaPart, StepMediaPart
from penstock.features.multimodal.rope_positions import RopePositions
from penstock.features.multimodal.saved_features import SavedFeatures
from penstock.layers.embedding import GIVEN_EMBEDDINGS, TEXT_IDS
from penstock.layers.rotary import RotaryEmbedding
from penstock.media.item import FEATURES
from penstock.models.causal_lm import CausalLM
from penstock.models.decoder import DecoderForCausalLM, added_rows
from penstock.models.interface import LanguageModel
from penstock.models.multimodal.interface import MediaEncoder
from penstock.runner.slot_owner import SlotOwner
from penstock.step.frame import Frame
from penstock.step.inputs import StepInput
from penstock.worker.feature import WorkerFeature, WorkerServices
from penstock.worker.wrapper import loses_device

logger = logging.getLogger(__name__)


class MediaWorker(WorkerFeature):
    """Features of one rank's media items, and positions of the tokens around them."""

    def __init__(self, services: WorkerServices) -> None:
        self._owners: list[SlotOwner] = []
        model, config = services.model, services.config.model
        self._features: MediaFeatures | None = None
        self._saved = SavedFeatures(services)
        assert isinstance(model, CausalLM), "models with embeddings of tokens are such"
        encoder = encoder_of(model)
        if encoder is not None or (config.enable_prompt_embeds and model.embeds_tokens):
            size = model.take_embeddings()
            self._features = MediaFeatures(services, encoder, size, self._saved)
            self._owners.append(self._features)
        multimodal = config.multimodal
        if multimodal is not None and not multimodal.may_cut_items:
            self._owners.append(ItemEnds(services.device))
        self._positions: RopePositions | None = None
        if multimodal is not None and multimodal.rope_sections is not None:
            self._positions = RopePositions(
                services.device,
                services.num_slots,
                multimodal.rope_sections,
                is_interleaved=multimodal.rope_is_interleaved,
                max_num_tokens=services.config.scheduler.max_num_batched_tokens,
            )
            self._positions.use(rotary_of(model))
            self._owners.append(self._positions)

    def slot_owners(self) -> Sequence[SlotOwner]:
        return self._owners

    def replace_model(self, model: LanguageModel) -> None:
        if self._features is not None:
            assert isinstance(model, CausalLM), "models with embeddings of tokens are such"
            model.take_embeddings()
            self._features.replace_encoder(encoder_of(model))
        if self._positions is not None:
            self._positions.use(rotary_of(model))

    def reset_encoder_cache(self) -> None:
        """Drop the features of all items; those that requests still need are computed again."""
        if self._features is not None:
            self._features.forget()

    def encode_items(self, items: Sequence[MediaItem]) -> str | None:
        """Have the features of items saved for other engines; the error of one that cannot be encoded."""
        return None if self._features is None else self._features.encode(items)

    def drop(self, tag: str) -> None:
        if tag == KV_CACHE:
            self.reset_encoder_cache()

    def close(self) -> None:
        self._saved.close()

    def get_encoder_timing_stats(self) -> dict[str, float]:
        """Number of encoded items and of their rows, and seconds of the host that encoding took, since the start."""
        return {} if self._features is None else dict(self._features.stats)


class MediaFeatures(SlotOwner):
    """The encoder, and the features of items by their keys. encoder: None where all features are given.

    size: of an embedding. saved: features of earlier engines.
    stats: number of encoded items and rows, and seconds on the host; number of items from `saved`.
    """

    def __init__(self, services: WorkerServices, encoder: MediaEncoder | None, size: int, saved: SavedFeatures) -> None:
        self._device, self._encoder, self._vocab_size = services.device, encoder, services.config.model.vocab_size
        self._size, self._dtype, self._saved = size, services.dtype, saved
        levels = 0 if encoder is None else encoder.num_levels
        self._names = [GIVEN_EMBEDDINGS, *map(added_rows, range(levels))]
        self.step_inputs = (
            *(StepInput(name, self._dtype, (size,)) for name in self._names),
            StepInput(TEXT_IDS, torch.int32),
        )
        self._items: dict[int, list[MediaItem]] = {}
        # Inputs of items that are to be encoded, and features, by key.
        self._inputs: dict[str, dict[str, ArrayBytes]] = {}
        self._cache: dict[str, Tensor] = {}
        self.stats = {"num_items": 0.0, "num_rows": 0.0, "seconds": 0.0, "num_loaded_items": 0.0}

    @property
    def num_rows(self) -> int:
        """Rows of all cached features."""
        return sum(len(features) for features in self._cache.values())

    def replace_encoder(self, encoder: MediaEncoder | None) -> None:
        """Encode with other weights from now on."""
        self._encoder = encoder
        self.forget()

    def forget(self) -> None:
        """Drop the features of all items."""
        self._cache.clear()
        self._inputs.clear()

    def begin(self, output: SchedulerOutput) -> None:
        part = part_of(output.parts, StepMediaPart)
        if part is not None:
            for key in part.evicted:
                self._cache.pop(key, None)
                self._inputs.pop(key, None)
            self._inputs.update(part.inputs)

    def add(self, slot: int, request: NewRequestData) -> None:
        part = part_of(request.parts, MediaPart)
        if part is not None:
            self._items[slot] = part.items

    def remove(self, slot: int) -> None:
        self._items.pop(slot, None)

    def has_work(self, frame: Frame) -> bool:
        return any(True for _ in rows_of(frame))

    def fill(self, frame: Frame) -> None:
        layout, named = frame.batch.layout, frame.inputs.named
        num_tokens = layout.plan.num_tokens
        slots = dict(zip(layout.req_ids, layout.slots_np.tolist(), strict=True))
        inputs = [named[name][:num_tokens].zero_() for name in self._names]
        is_given_np = np.zeros(num_tokens, dtype=bool)
        for first, one in list(rows_of(frame)):
            try:
                features = self._features_of(self._items[slots[one.req_id]][one.item])[one.row : one.row + one.count]
            except Exception as error:
                frame.errors = {**frame.errors, one.req_id: _fault_of(f"An item of request {one.req_id}", error)}
                continue
            is_given_np[first : first + one.count] = True
            # Embeddings of tokens have no rows for the levels.
            for rows_TD, of_level in zip(inputs, features.split(self._size, dim=1), strict=False):
                rows_TD[first : first + one.count] = of_level
        is_given_T = self._device.upload(is_given_np)
        named[TEXT_IDS][:num_tokens] = torch.where(is_given_T, self._vocab_size, frame.batch.input_ids[:num_tokens])

    def encode(self, items: Sequence[MediaItem]) -> str | None:
        """Have the features of items saved, and keep the cache as it is; the error of one that cannot be encoded."""
        for item in {item.key: item for item in items}.values():
            is_cached = item.key in self._cache
            try:
                self._features_of(item)
            except Exception as error:
                return _fault_of(f"An item ({item.modality})", error)
            if not is_cached:
                del self._cache[item.key]
        return None

    def _features_of(self, item: MediaItem) -> Tensor:
        """Features of an item, [L, D * (1 + levels)], computed by themselves, so that their bits depend on it alone."""
        features = self._cache.get(item.key)
        is_encoded = False
        if features is None:
            # Recordings have them with the request.
            given = self._inputs.get(item.key, item.inputs)
            features = None if FEATURES in given else self._saved.load(item, self._size * len(self._names))
            self.stats["num_loaded_items"] += features is not None
            if features is None:
                features, is_encoded = self._encoded(item, given), FEATURES not in given
        if len(features) != item.num_rows:
            raise ModelError(
                f"An item ({item.modality}) has {item.num_rows} tokens in the prompt, but {len(features)} rows of "
                "features. Either the processor's files do not belong to this model, or two items have one uuid."
            )
        if is_encoded:
            self._saved.save(item, features)
        self._cache[item.key] = features
        self._inputs.pop(item.key, None)
        return features

    def _encoded(self, item: MediaItem, given: Mapping[str, ArrayBytes]) -> Tensor:
        """Features of an item from the encoder, or as they are given."""
        began = time.perf_counter()
        inputs = encoder_inputs(self._device, {name: values.to_numpy().copy() for name, values in given.items()})
        if FEATURES in inputs:
            features = inputs[FEATURES].to(self._dtype)
        else:
            assert self._encoder is not None, "the front end takes media where there is an encoder"
            features = self._encoder.encode(item.modality, inputs)
        for name, value in zip(self.stats, (1, len(features), time.perf_counter() - began), strict=False):
            self.stats[name] += value
        return features


def _fault_of(item: str, error: Exception) -> str:
    """Text of an error that is the item's own fault, on all ranks alike; raises others. item: it, for the log."""
    if loses_device(error) or isinstance(error, torch.OutOfMemoryError):
        raise error
    logger.error("%s could not be encoded", item, exc_info=error)
    return f"{type(error).__name__}: {error}"


def encoder_inputs(device: Device, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Inputs of an encoder: floats on the device, integers, such as grids, on the host."""
    return {
        name: device.upload(array) if array.dtype.kind == "f" else torch.from_numpy(array)
        for name, array in arrays.items()
    }


def encoder_of(model: LanguageModel) -> MediaEncoder | None:
    """The encoder of media of a model; None without one, as on later pipeline stages."""
    encoder = getattr(model, "encoder", None)
    return encoder if isinstance(encoder, MediaEncoder) else None


def rotary_of(model: LanguageModel) -> RotaryEmbedding:
    """The rotary embedding of a model with positions in three axes."""
    assert isinstance(model, DecoderForCausalLM), "models with positions in three axes are Penstock's own"
    (rotary,) = model.model.rotations.embeddings
    assert isinstance(rotary, RotaryEmbedding)
    return rotary
