"""What a model that runs through Transformers will need: it is built and run without memory, on the meta device.

For classes of which `transformers_estimate` and `usual_decoder` know nothing: each has a forward pass of its own. This
takes seconds, most of them to import Transformers. Suffixes: T tokens, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.attention import LayerAttention
from penstock.config import ModelConfig
from penstock.contract import KVCacheSpec
from penstock.device.base import TORCH_DTYPES
from penstock.device.dtypes import DtypeChoice
from penstock.device.tensor_memory import TensorMemory
from penstock.layers.linear import LinearLayer, weights_size_bytes
from penstock.loader.loader import build_model, materialise
from penstock.models.attention_layers import attention_layers, kv_cache_specs
from penstock.parallel import ParallelContext
from penstock.worker.estimate import packed_copy_bytes
from penstock.worker.quantized_estimate import rounded_layer_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """num_parameters: values. weights: bytes of them and of buffers. activations: bytes of a step's tensors; None where
    the model does not run without values, and then why_not says why. specs: by layer. num_heads: of the queries in the
    layer that has the most.
    """

    num_parameters: int
    weights: int
    activations: int | None
    why_not: str
    specs: Mapping[str, KVCacheSpec]
    num_heads: int


def try_without_memory(
    model_config: ModelConfig, num_tokens: int, block_size: int, dtype: DtypeChoice, kv_cache_dtype: str, device: str
) -> UnloadedModel:
    """Count the tensors of a step of `num_tokens`. Raises what building the model raises, such as UnsupportedModel.

    device: on which it will run, which decides about copies of weights.
    """
    model, meta = build_model(model_config, ParallelContext()), torch.device("meta")
    materialise(model, meta, TORCH_DTYPES[dtype.name])
    context: Any = _Attention(copies_heads=dtype.name == "float32")
    activations, why_not = None, ""
    try:
        with torch.no_grad(), meta, _MemoryWithoutValues() as memory:
            model(torch.zeros(num_tokens, dtype=torch.int32), torch.zeros(num_tokens, dtype=torch.int64), context)
        activations = memory.peak_bytes
    except Exception as error:
        # Whatever an operator without values raises. A worker runs the model with values, so this ends no plan.
        why_not = f"{model_config.architecture} does not run without values: {_first_line(error)}"
        logger.warning("%s", why_not, exc_info=logger.isEnabledFor(logging.DEBUG))
    as_kept = build_model(model_config, ParallelContext())
    materialise(as_kept, meta, TORCH_DTYPES[dtype.name], TORCH_DTYPES[dtype.weights])
    heads = (
        _packed_copies(as_kept, dtype, device)
        if model_config.quantization is None
        else _saved_by_rounding(as_kept, model_config.quantization)
    )
    return UnloadedModel(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        weights=weights_size_bytes(as_kept) + heads,
        activations=activations,
        why_not=why_not,
        specs=kv_cache_specs(model, block_size, kv_cache_dtype),
        num_heads=max(layer.num_heads for layer in attention_layers(model).values()),
    )


def _packed_copies(model: nn.Module, dtype: DtypeChoice, device: str) -> int:
    """What heads will pack of weights that stay as they are, since an embedding needs them too."""
    return sum(
        packed_copy_bytes(layer.weight.numel(), dtype, device, reads_packed_rows=not layer.shares_weight)
        for layer in _linear_layers(model)
        if layer.shares_weight or layer.tied_to
    )


def _saved_by_rounding(model: nn.Module, quantization: str) -> int:
    """What integers take more than the weights in their place: a negative number."""
    return sum(
        rounded_layer_bytes(quantization, layer.output_size, layer.input_size, is_tied=bool(layer.tied_to))
        - (0 if layer.shares_weight else layer.weight.numel() * layer.weight.element_size())
        for layer in _linear_layers(model)
    )


def _linear_layers(model: nn.Module) -> list[LinearLayer]:
    return [module for module in model.modules() if isinstance(module, LinearLayer)]


class _MemoryWithoutValues(TensorMemory):
    """Counts tensors that have no values, of operators too that refuse such, although their sizes are known."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return super().__torch_dispatch__(_WITHOUT_VALUES.get(func, func), types, args, kwargs)


def _grouped_products(rows_SI: Tensor, weight_EIO: Tensor, *_: Any, **__: Any) -> Tensor:
    """The products of rows that are ordered by expert, each with its expert's weight: [S, O]."""
    return rows_SI.new_empty(rows_SI.shape[0], weight_EIO.shape[-1])


# Without values, torch takes the products of a mixture of experts for a GPU's, and refuses float32.
_WITHOUT_VALUES: dict[Any, Callable[..., Any]] = {torch.ops.aten._grouped_mm.default: _grouped_products}


class _Attention:
    """Makes the tensors that attention makes on the CPU. copies_heads: those that do not lie side by side."""

    def __init__(self, *, copies_heads: bool) -> None:
        self._copies_heads = copies_heads

    def of_all_tokens(self) -> _Attention:
        return self

    def asked_for(self, per_token: Tensor) -> Tensor:
        return per_token

    def attend(self, layer: LayerAttention, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor) -> Tensor:
        heads = (query_THD, key_TKD, value_TKD)
        kept = [tensor.contiguous() for tensor in heads] if self._copies_heads else list(heads)
        mixed_THD = torch.empty(query_THD.shape, dtype=query_THD.dtype, device=query_THD.device)
        del kept
        return mixed_THD


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
