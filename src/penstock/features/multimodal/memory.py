"""Memory of media on the device, for the plan: the encoder cache, step inputs, and what encoding an item takes."""

from __future__ import annotations

import logging

import torch

from penstock.config import EngineConfig
from penstock.errors import ModelError
from penstock.features.multimodal.worker import encoder_inputs, encoder_of, rotary_of
from penstock.models.interface import LanguageModel
from penstock.worker.feature import WorkerServices

logger = logging.getLogger(__name__)


def cache_bytes(config: EngineConfig, model: LanguageModel, _: str, dtype: torch.dtype) -> int:
    """Bytes of the encoder cache when it is full."""
    return config.multimodal.cache_rows(config.scheduler.max_num_batched_tokens) * _row_bytes(config, model, dtype)


def input_bytes(config: EngineConfig, model: LanguageModel, _: str, dtype: torch.dtype) -> int:
    """Bytes of the step inputs: embeddings, and rows of the rotary table for positions in three axes."""
    num_tokens, num_steps = config.scheduler.max_num_batched_tokens, config.max_concurrent_batches
    num_bytes = num_steps * num_tokens * _row_bytes(config, model, dtype)
    multimodal = config.model.multimodal
    if multimodal is not None and multimodal.rope_sections is not None:
        num_bytes += num_tokens * (rotary_of(model).table[0].nbytes + num_steps * 8)
    return num_bytes


def encode_dummy(services: WorkerServices, is_largest: bool) -> None:
    """Encode the item that takes most memory of those that requests may have, or the smallest one."""
    encoder, config = encoder_of(services.model), services.config
    if encoder is None:
        return
    num_tokens = config.scheduler.max_num_batched_tokens
    most_rows = min(config.multimodal.item_rows(num_tokens), config.model.planned_context)
    item = encoder.dummy_item(most_rows if is_largest else 1)
    try:
        encoder.encode(item.modality, encoder_inputs(services.device, item.inputs))
    except ModelError as reason:
        # Of Transformers' modules nothing says what they take.
        logger.info("The encoder's activations are not in the memory plan: %s", reason)


def _row_bytes(config: EngineConfig, model: LanguageModel, dtype: torch.dtype) -> int:
    """Bytes of the features of a token; 0 on ranks without any."""
    encoder = encoder_of(model)
    if encoder is not None:
        return encoder.feature_size * (1 + encoder.num_levels) * dtype.itemsize
    return config.model.hidden_size * dtype.itemsize if config.model.enable_prompt_embeds else 0
