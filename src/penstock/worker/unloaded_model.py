"""What a model that runs through Transformers will need: it is built and run without memory, on the meta device.

Each of its classes has a forward pass of its own, so nothing general can be said about them. This takes seconds, most
of them to import Transformers. Suffixes: T tokens, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from penstock.attention import LayerAttention
from penstock.config import ModelConfig
from penstock.contract import FullAttentionSpec, SlidingWindowSpec
from penstock.device.base import TORCH_DTYPES
from penstock.device.tensor_memory import TensorMemory
from penstock.layers.linear import weights_size_bytes
from penstock.loader.loader import build_model, materialise
from penstock.models.attention_layers import kv_cache_specs
from penstock.parallel import ParallelContext

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """num_parameters: values. weights: bytes of them and of buffers. activations: bytes of a step's tensors; None where
    their sizes depend on values, as with a mixture of experts. specs: by layer.
    """

    num_parameters: int
    weights: int
    activations: int | None
    specs: Mapping[str, FullAttentionSpec | SlidingWindowSpec]


def try_without_memory(
    model_config: ModelConfig, num_tokens: int, block_size: int, dtype: str, weights_dtype: str, kv_cache_dtype: str
) -> UnloadedModel:
    """Count the tensors of a step of `num_tokens`. Raises what building the model raises, such as UnsupportedModel.

    dtype: of the computation. weights_dtype: of the matrices that are kept in another.
    """
    model, meta = build_model(model_config, ParallelContext()), torch.device("meta")
    materialise(model, meta, TORCH_DTYPES[dtype])
    context: Any = _Attention(copies_heads=dtype == "float32")
    activations: int | None = None
    try:
        with torch.no_grad(), meta, TensorMemory() as memory:
            model(torch.zeros(num_tokens, dtype=torch.int32), torch.zeros(num_tokens, dtype=torch.int64), context)
        activations = memory.peak_bytes
    except Exception as error:  # whatever an operator without values raises; the plan has another way
        logger.debug("%s cannot run without memory", model_config.architecture, exc_info=error)
    as_kept = build_model(model_config, ParallelContext())
    materialise(as_kept, meta, TORCH_DTYPES[dtype], TORCH_DTYPES[weights_dtype])
    return UnloadedModel(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        weights=weights_size_bytes(as_kept),
        activations=activations,
        specs=cast(dict[str, FullAttentionSpec | SlidingWindowSpec], kv_cache_specs(model, block_size, kv_cache_dtype)),
    )


class _Attention:
    """Makes the tensors that attention makes on the CPU. copies_heads: those that do not lie side by side."""

    def __init__(self, *, copies_heads: bool) -> None:
        self._copies_heads = copies_heads

    def attend(self, layer: LayerAttention, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor) -> Tensor:
        heads = (query_THD, key_TKD, value_TKD)
        kept = [tensor.contiguous() for tensor in heads] if self._copies_heads else list(heads)
        mixed_THD = torch.empty(query_THD.shape, dtype=query_THD.dtype, device=query_THD.device)
        del kept
        return mixed_THD
