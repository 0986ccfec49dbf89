"""What a worker will need, from a model's shape and its checkpoint's headers. Needs no torch and no device.

Every figure is the one that the worker measures or counts later, derived from what the code keeps at its fullest
moment; `docs/memory.md` shows the derivation. All sizes are bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.config import env
from penstock.contract.kv_cache import DTYPE_BYTES
from penstock.errors import UnsupportedFeature
from penstock.loader.headers import TensorHeader
from penstock.models.shape import ModelShape
from penstock.worker.memory_plan import StepMemory

_FLOAT_BYTES = 4
_FLOAT_DTYPES = ("F32", "BF16", "F16", "FloatStorage", "BFloat16Storage", "HalfStorage")
# What checkpoints hold although it follows from the configuration: rotary frequencies and causal masks.
_NO_WEIGHTS = re.compile(r".*\.rotary_emb\.inv_freq|.*\.(attn|attention)\.(masked_)?bias")
_HEADS = ("lm_head.weight",)
# Where kernels.linear packs a float32 weight for oneDNN; a head that is tied to the embedding is then there twice. Our
# own kernels hold it once.
_MIN_PACKED_ELEMENTS = 256 * 1024
# Logits at their fullest moment, the draw: raw and processed ones, probabilities, and these and their running sum in
# float64.
_SAMPLING_BYTES_PER_LOGIT = 3 * 4 + 2 * 8
# Of a process that has imported torch and what else an engine needs, before it loads a model.
PROCESS_BYTES = {"cpu": 230 << 20, "cuda": 0}
# What libraries take at their first product: code, tables and buffers of the CPU's; cuBLAS's workspace.
_LIBRARY_BYTES = {"cpu": 8 << 20, "cuda": 32 << 20}


def count_parameters(headers: Mapping[str, TensorHeader], shape: ModelShape) -> int:
    """Values of a checkpoint's weights; what it holds beside them does not count.

    Raises UnsupportedFeature for a tensor of a dtype that cannot be loaded.
    """
    num_parameters = 0
    for name, header in headers.items():
        if _NO_WEIGHTS.fullmatch(name) or (shape.ties_embeddings and name in _HEADS):
            continue
        if header.dtype not in _FLOAT_DTYPES:
            raise UnsupportedFeature(
                f"The tensor {name} has the dtype {header.dtype}, which cannot be loaded. Take a checkpoint in "
                "float32, bfloat16 or float16."
            )
        num_parameters += header.num_elements
    return num_parameters


def estimate_weights(num_parameters: int, shape: ModelShape, dtype: str, device: str, max_model_len: int) -> int:
    """Parameters and buffers in the compute dtype, whatever dtype the checkpoint has."""
    head = shape.vocab_size * shape.hidden_size
    is_packed = device == "cpu" and dtype == "float32" and head >= _MIN_PACKED_ELEMENTS and not _has_native_kernels()
    packed_copy = head if shape.ties_embeddings and is_packed else 0
    rotary_table = max_model_len * shape.rotary_dim * _FLOAT_BYTES
    return (num_parameters + packed_copy) * DTYPE_BYTES[dtype] + rotary_table


def _has_native_kernels() -> bool:
    """Whether the C++ kernels were built and are wanted; importing them would import torch."""
    built = (Path(__file__).parents[1] / "kernels" / "native").glob("_kernels*.*")
    return env.cpu_kernels() != "torch" and any(built)


def weights_of_shape(shape: ModelShape) -> dict[str, TensorHeader]:
    """The tensors of a plain decoder with gated layers, for random weights, which have no checkpoint."""
    hidden, inner, layers = shape.hidden_size, shape.intermediate_size, shape.num_layers
    sizes = {
        "embed_tokens": (shape.vocab_size, hidden),
        "qkv_proj": (layers, shape.qkv_size, hidden),
        "o_proj": (layers, hidden, shape.num_heads * shape.head_size),
        "gate_up_proj": (layers, 2 * inner, hidden),
        "down_proj": (layers, hidden, inner),
        "norms": (2 * layers + 1, hidden),
        "lm_head.weight": (shape.vocab_size, hidden),
    }
    return {name: TensorHeader("F32", size) for name, size in sizes.items()}


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """is_gated: the feed-forward network multiplies two projections. normalises_heads: queries and keys are copied
    when they are normalised, instead of being turned where they lie.
    """

    is_gated: bool
    normalises_heads: bool

    @classmethod
    def read(cls, headers: Mapping[str, TensorHeader]) -> LayerTraits:
        """What the names of the weights tell."""
        return cls(
            is_gated=any(".gate_proj." in name or "gate_up_proj" in name for name in headers),
            normalises_heads=any(".q_norm." in name or ".query_key_norm." in name for name in headers),
        )


def estimate_step(
    shape: ModelShape, traits: LayerTraits, *, num_tokens: int, num_rows: int, dtype: str, device: str
) -> StepMemory:
    """The heaviest step: `num_tokens` through the layers, and `num_rows` requests to sample for."""
    value = DTYPE_BYTES[dtype]
    # The residual stream and the normalised input of this layer, and the two that the layer before it returned.
    kept = 4 * shape.hidden_size * value
    inside = max(
        _norm_bytes(shape.hidden_size, value),
        _head_norm_bytes(shape, value) if traits.normalises_heads else 0,
        _attention_values(shape, traits) * value,
        _mlp_values(shape, traits) * value,
    )
    return StepMemory(
        activations=_LIBRARY_BYTES[device] + num_tokens * (kept + inside),
        sampling=num_rows * shape.vocab_size * _SAMPLING_BYTES_PER_LOGIT,
    )


def _norm_bytes(num_values: int, value: int) -> int:
    """Norms compute in float32: of lower precision they hold the widened and the scaled values beside the result."""
    return num_values * (_FLOAT_BYTES if value == _FLOAT_BYTES else 2 * _FLOAT_BYTES + value)


def _head_norm_bytes(shape: ModelShape, value: int) -> int:
    return shape.qkv_size * value + _norm_bytes((shape.num_heads + shape.num_kv_heads) * shape.head_size, value)


def _attention_values(shape: ModelShape, traits: LayerTraits) -> int:
    """Queries, keys and values, copies of the first two if any; the backend's result, and its place in the step's."""
    copies = (shape.num_heads + shape.num_kv_heads) * shape.head_size if traits.normalises_heads else 0
    return shape.qkv_size + copies + 2 * shape.num_heads * shape.head_size


def _mlp_values(shape: ModelShape, traits: LayerTraits) -> int:
    """The widened token (both projections where there are two), and its activation beside it."""
    return (3 if traits.is_gated else 2) * shape.intermediate_size
