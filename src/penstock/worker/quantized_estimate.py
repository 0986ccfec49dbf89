"""What quantised weights will take, from a checkpoint's headers. Needs no torch. All sizes are bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.config.quantized_checkpoint import QuantizedCheckpoint
from penstock.config.rounded_products import outputs_at_once, rows_at_once
from penstock.device.dtypes import has_native_kernels
from penstock.loader.headers import TensorHeader
from penstock.models.shape import ModelShape

# As layers.quantization rounds weights at loading.
_INT4_GROUP_SIZE = 128
_SCALE_BYTES = 4
_ZERO_POINT_BYTES = 1
_WIDENED_BYTES = 8
_FLOAT_BYTES = 4
_PER_WORD = 8
_EMBEDDINGS = re.compile(
    r"(.*\.)?(embed_tokens|wte|wpe|embed_positions|embed_in|word_embeddings|tok_embeddings)(\.weight)?"
)
_HEADS = re.compile(r"(.*\.)?(lm_head|embed_out|output_projection)\.weight|decoder\.weight")
_NO_LAYERS = re.compile(r"(.*\.)?norms?(\.weight)?")
# Tensors of quantised layers in checkpoints: packed integers, their scales, packed zero points, and what is not kept.
_PACKED = (".qweight", ".weight_packed")
_SCALES = (".scales", ".weight_scale", "._weight_scale")
_ZEROS = (".qzeros", ".weight_zero_point", "._weight_zero_point")
_NOT_KEPT = (".g_idx", ".weight_g_idx", ".weight_shape")


@dataclass(frozen=True, slots=True)
class QuantizedPart:
    """num_bytes: of all that is kept as integers, with scales and zero points. num_parameters: weights among it.

    others: the headers of what stays in floating point. has_head: the output projection is kept as integers; where an
    embedding needs the same weight in floating point, that is among the others.
    """

    num_bytes: int
    num_parameters: int
    others: Mapping[str, TensorHeader]
    has_head: bool = False


@dataclass(frozen=True, slots=True)
class PlainProducts:
    """Products with quantised weights in plain torch, where there are no C++ kernels.

    group_size: inputs that share a scale; None for all of an output.
    """

    group_size: int | None

    def working_bytes(self, num_tokens: int, num_inputs: int, num_outputs: int, value: int) -> int:
        """What one takes beside its input and its result, of which a value takes `value` bytes.

        Beside the integers of all rows, some rows are there in float64 while they are rounded; then, in float64, those
        of a group, the weights of some outputs and the sums that they give, which are narrowed to float32. Of a
        narrower dtype, input and result are there in float32, the result in nothing else yet.
        """
        width = min(self.group_size or num_inputs, num_inputs)
        outputs = min(outputs_at_once(width), num_outputs)
        rounding = min(num_tokens, rows_at_once(num_inputs)) * num_inputs * (_WIDENED_BYTES + 1)
        multiplying = (num_tokens + outputs) * width * _WIDENED_BYTES
        multiplying += num_tokens * outputs * (_WIDENED_BYTES + _FLOAT_BYTES)
        as_float = 0
        if value < _FLOAT_BYTES:
            as_float = num_tokens * (num_inputs * _FLOAT_BYTES + num_outputs * (_FLOAT_BYTES - value))
        return as_float + num_tokens * num_inputs + max(rounding, multiplying)


def plain_products(quantization: str | None, checkpoint: QuantizedCheckpoint | None) -> PlainProducts | None:
    """None where the C++ kernels multiply, or no weight is quantised."""
    if has_native_kernels() or (quantization is None and checkpoint is None):
        return None
    if checkpoint is not None:
        return PlainProducts(checkpoint.group_size)
    return PlainProducts(_INT4_GROUP_SIZE if quantization == "int4" else None)


def layer_bytes(bits: int, num_outputs: int, num_inputs: int, group_size: int | None = None) -> int:
    """One linear layer. group_size: inputs that share a scale; None for all of an output."""
    if bits == 8:
        return num_outputs * (num_inputs + _SCALE_BYTES)
    num_groups = -(-num_inputs // (group_size or num_inputs))
    values = num_inputs * _kept_bits(bits) // 8
    return num_outputs * (values + num_groups * (_SCALE_BYTES + _ZERO_POINT_BYTES))


def _kept_bits(bits: int) -> int:
    """Plain torch keeps a byte for each weight."""
    return bits if has_native_kernels() else 8


def rounded_layer_bytes(quantization: str, num_outputs: int, num_inputs: int, *, is_tied: bool) -> int:
    """One linear layer that is rounded at loading. is_tied: an embedding reads rows; then 4 bits have 4 more for it."""
    if quantization == "int8":
        return layer_bytes(8, num_outputs, num_inputs)
    return layer_bytes(4, num_outputs, num_inputs, _INT4_GROUP_SIZE) * (2 if is_tied else 1)


def quantized_part(
    headers: Mapping[str, TensorHeader],
    shape: ModelShape,
    quantization: str | None,
    checkpoint: QuantizedCheckpoint | None,
    stays_in_float: Callable[[str], bool] = lambda _name: False,
) -> QuantizedPart:
    """What of a checkpoint is kept as integers: by the option, or because they are integers already.

    stays_in_float: whether the matrix of that name is needed as it is, by what is no linear layer.
    """
    if checkpoint is not None and any(name.endswith(_SCALES) for name in headers):
        return _already_quantized(headers, checkpoint)
    if checkpoint is not None:  # random weights in their place
        quantization = f"int{checkpoint.bits}"
    if quantization is None:
        return QuantizedPart(0, 0, headers)
    num_bytes = num_parameters = 0
    others, has_head = {}, False
    for name, header in headers.items():
        if shape.ties_embeddings and _HEADS.fullmatch(name):
            continue
        is_tied = _is_tied_embedding(name, header, shape)
        is_head = is_tied or bool(_HEADS.fullmatch(name))
        is_layer = len(header.shape) > 1 and not _EMBEDDINGS.fullmatch(name) and not _NO_LAYERS.fullmatch(name)
        is_rounded = is_head or (is_layer and not stays_in_float(name))
        if is_rounded:
            num_inputs = header.shape[-1]
            num_outputs = header.num_elements // num_inputs
            reads_rows = is_tied and not stays_in_float(name)
            num_bytes += rounded_layer_bytes(quantization, num_outputs, num_inputs, is_tied=reads_rows)
            has_head = has_head or is_head
        if is_rounded and not stays_in_float(name):
            num_parameters += header.num_elements
        else:
            others[name] = header
    return QuantizedPart(num_bytes, num_parameters, others, has_head)


def _is_tied_embedding(name: str, header: TensorHeader, shape: ModelShape) -> bool:
    is_vocabulary = bool(header.shape) and header.shape[0] == shape.vocab_size
    return shape.ties_embeddings and is_vocabulary and bool(_EMBEDDINGS.fullmatch(name))


def _already_quantized(headers: Mapping[str, TensorHeader], checkpoint: QuantizedCheckpoint) -> QuantizedPart:
    num_bytes = num_parameters = 0
    others = {}
    for name, header in headers.items():
        if name.endswith(_PACKED):
            num_bytes += header.num_elements * _PER_WORD * _kept_bits(checkpoint.bits) // 8
            num_parameters += header.num_elements * _PER_WORD
        elif name.endswith((".weight", "._weight_qdata")) and header.dtype == "I8":
            num_bytes += header.num_elements * _kept_bits(checkpoint.bits) // 8
            num_parameters += header.num_elements
        elif name.endswith(_SCALES):
            # Zero points are kept even where a checkpoint's groups are symmetric and it has none.
            num_bytes += header.num_elements * (_SCALE_BYTES + (_ZERO_POINT_BYTES if checkpoint.bits == 4 else 0))
        elif not name.endswith((*_ZEROS, *_NOT_KEPT)):
            others[name] = header
    return QuantizedPart(num_bytes, num_parameters, others)
