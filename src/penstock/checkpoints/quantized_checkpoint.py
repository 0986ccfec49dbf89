"""Quantisation settings of a quantised checkpoint, from `config.json`.

Formats, as their own tools write them: compressed-tensors (https://github.com/vllm-project/compressed-tensors), GPTQ
(https://github.com/ModelCloud/GPTQModel), AWQ (https://github.com/casper-hansen/AutoAWQ), torchao
(https://github.com/pytorch/ao), FP8 as Transformers and AutoFP8 write it, and MXFP4 of gpt-oss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ModelError, UnsupportedFeature

GPTQ = "gptq"
AWQ = "awq"
COMPRESSED_TENSORS = "compressed-tensors"
TORCHAO = "torchao"
FP8 = "fp8"
MXFP4 = "mxfp4"
QUANTIZED_CHECKPOINTS = (COMPRESSED_TENSORS, GPTQ, AWQ, TORCHAO, FP8, MXFP4)
INT_QUANTIZED = "int-quantized"
FLOAT_QUANTIZED = "float-quantized"
PACK_QUANTIZED = "pack-quantized"
GPTQ_V2 = "gptq_v2"
# torchao's configurations whose weights are plain 8-bit integers, and those that hold 4 bits in such.
_TORCHAO_INT8 = ("Int8DynamicActivationInt8WeightConfig", "Int8WeightOnlyConfig")
_TORCHAO_INTX = ("Int8DynamicActivationIntxWeightConfig", "IntxWeightOnlyConfig")
# Group sizes that the kernels take are multiples of this.
_GROUP_MULTIPLE = 32


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """method: quantisation method. layout: packing of the integers, where a method has several.

    bits: 8 or 4. group_size: inputs that share a scale; None for one scale per output channel. is_symmetric: without
    zero points. is_reordered: with activation order (desc_act): a tensor gives the group of each input.
    is_float: FP8 or MXFP4 weights, which are dequantised. block_size: of FP8 weights, output and input features that
    share a scale; None for one scale per tensor or per output channel.
    """

    method: str
    layout: str
    bits: int
    group_size: int | None
    is_symmetric: bool = False
    is_reordered: bool = False
    is_float: bool = False
    block_size: tuple[int, int] | None = None


def read_quantized_checkpoint(hf_config: Mapping[str, Any], model: str) -> QuantizedCheckpoint | None:
    """Read the quantisation settings; None for a checkpoint in floating point.

    Raises UnsupportedFeature, naming the field, for settings that cannot be loaded, and ModelError for invalid ones.
    """
    content = hf_config.get("quantization_config")
    if content is None:
        return None
    if not isinstance(content, Mapping):
        raise ModelError(f"config.json of {model} has quantization_config={content!r}. It must be an object.")
    method = content.get("quant_method")
    if method not in QUANTIZED_CHECKPOINTS:
        raise UnsupportedFeature(
            f"{model} is quantized (quantization_config: quant_method={method!r}), which is not supported. Supported: "
            f"{', '.join(QUANTIZED_CHECKPOINTS)}; or a checkpoint in float32, bfloat16 or float16 with "
            "quantization='int8' or 'int4'."
        )
    readers: dict[str, Callable[[_Fields], QuantizedCheckpoint | None]] = {
        COMPRESSED_TENSORS: _read_compressed_tensors,
        GPTQ: _read_gptq,
        AWQ: _read_awq,
        TORCHAO: _read_torchao,
        FP8: _read_fp8,
        MXFP4: _read_mxfp4,
    }
    return readers[method](_Fields(content, model))


def quantization_of_checkpoint(hf_config: Mapping[str, Any]) -> str | None:
    """Quantisation method of a checkpoint; None for a checkpoint in floating point."""
    content = hf_config.get("quantization_config")
    return str(content.get("quant_method")) if isinstance(content, Mapping) else None


def refuse_quantized_checkpoint(hf_config: Mapping[str, Any], model: str) -> None:
    """Raise UnsupportedFeature for a quantised checkpoint: models that run through Transformers take none."""
    content = hf_config.get("quantization_config")
    if content is None:
        return
    method = content.get("quant_method") if isinstance(content, Mapping) else content
    raise UnsupportedFeature(
        f"{model} is quantized (quantization_config: quant_method={method!r}), which is not supported for models that "
        "run through Transformers. Take a checkpoint in float32, bfloat16 or float16, with quantization='int8' or "
        "'int4'."
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    """Object within quantization_config. path: its place, for messages."""

    content: Mapping[str, Any]
    model: str
    path: str = ""

    def get(self, name: str, default: Any = None) -> Any:
        value = self.content.get(name)
        return default if value is None else value

    def section(self, name: str) -> _Fields | None:
        value = self.content.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ModelError(
                f"config.json of {self.model} has quantization_config.{self.path}{name}={value!r}. "
                "It must be an object."
            )
        return _Fields(value, self.model, f"{self.path}{name}.")

    def require(self, name: str, *allowed: Any, default: Any = None) -> Any:
        """Return the field's value, which must be one of `allowed`."""
        value = self.get(name, default)
        if not any(value == one and type(value) is type(one) for one in allowed):
            raise self.unsupported(name, value, " or ".join(str(one) for one in allowed))
        return value

    def group_size(self) -> int | None:
        value = self.get("group_size", -1)
        if value == -1:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value % _GROUP_MULTIPLE:
            raise self.unsupported("group_size", value, f"-1, or a multiple of {_GROUP_MULTIPLE}")
        return value

    def block_size(self, name: str) -> tuple[int, int] | None:
        value = self.get(name)
        if value is None:
            return None
        is_pair = isinstance(value, (list, tuple)) and len(value) == 2
        if not is_pair or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in value):
            raise self.unsupported(name, value, "two integers of at least 1, such as [128, 128]")
        return value[0], value[1]

    def unsupported(self, name: str, value: Any, allowed: str) -> UnsupportedFeature:
        return UnsupportedFeature(
            f"config.json of {self.model} has quantization_config.{self.path}{name}={value!r}, which is not supported. "
            f"Supported: {allowed}."
        )


def _read_gptq(fields: _Fields) -> QuantizedCheckpoint:
    fields.require("bits", 4)
    dynamic = fields.get("dynamic", {})
    # Layers that are named with "-:" are left in floating point, which their tensors show.
    if not isinstance(dynamic, Mapping) or any(not str(layers).startswith("-:") for layers in dynamic):
        raise fields.unsupported("dynamic", dynamic, "one format for all layers that are quantized")
    layout = fields.require("checkpoint_format", GPTQ, GPTQ_V2, default=GPTQ)
    is_reordered = fields.require("desc_act", True, False, default=False)
    return QuantizedCheckpoint(GPTQ, layout, 4, fields.group_size(), is_reordered=is_reordered)


def _read_awq(fields: _Fields) -> QuantizedCheckpoint:
    fields.require("bits", 4)
    version = fields.get("version", "gemm")
    if str(version).lower() != "gemm":
        raise fields.unsupported("version", version, "gemm")
    fields.require("zero_point", True, default=True)
    return QuantizedCheckpoint(AWQ, "gemm", 4, fields.group_size())


def _read_torchao(fields: _Fields) -> QuantizedCheckpoint:
    """Settings of torchao. The group size is read from the tensors."""
    types = fields.section("quant_type")
    default = None if types is None else types.section("default")
    if types is None or default is None or set(types.content) != {"default"}:
        raise fields.unsupported("quant_type", fields.get("quant_type"), "one configuration for all layers")
    kind = default.require("_type", *_TORCHAO_INT8, *_TORCHAO_INTX)
    if kind in _TORCHAO_INT8:
        return QuantizedCheckpoint(TORCHAO, kind, 8, None, is_symmetric=True)
    data = default.section("_data")
    dtype = None if data is None else data.section("weight_dtype")
    if dtype is None:
        raise default.unsupported("_data.weight_dtype", None, "int4")
    dtype.require("_data", "int4")
    return QuantizedCheckpoint(TORCHAO, kind, 4, None)


def _read_fp8(fields: _Fields) -> QuantizedCheckpoint:
    fields.require("fmt", "e4m3", "float8_e4m3fn", default="e4m3")
    fields.require("activation_scheme", "dynamic", "static", default="dynamic")
    block_size = fields.block_size("weight_block_size")
    return QuantizedCheckpoint(FP8, FP8, 8, None, is_symmetric=True, is_float=True, block_size=block_size)


def _read_mxfp4(_: _Fields) -> QuantizedCheckpoint:
    """Settings of MXFP4. The tensors show which layers have it."""
    return QuantizedCheckpoint(MXFP4, MXFP4, 4, _GROUP_MULTIPLE, is_symmetric=True, is_float=True)


def _read_compressed_tensors(fields: _Fields) -> QuantizedCheckpoint | None:
    sparsity = fields.section("sparsity_config")
    if sparsity is not None:
        sparsity.require("format", "dense", default="dense")
    has_cache = _check_cache_scheme(fields.section("kv_cache_scheme"))
    if fields.get("transform_config"):
        raise fields.unsupported("transform_config", fields.get("transform_config"), "none")
    groups = fields.section("config_groups")
    if has_cache and (groups is None or not groups.content):
        return None  # float weights
    if groups is None or len(groups.content) != 1:
        names = None if groups is None else sorted(groups.content)
        raise fields.unsupported("config_groups", names, "one group of layers")
    (name,) = groups.content
    group = groups.section(name)
    weights = None if group is None else group.section("weights")
    if group is None or weights is None:
        raise groups.unsupported(name, groups.content[name], "a group with weights")
    layout = fields.require("format", INT_QUANTIZED, PACK_QUANTIZED, FLOAT_QUANTIZED)
    weights.require("type", "float" if layout == FLOAT_QUANTIZED else "int")
    weights.require("dynamic", False, default=False)
    activations = group.section("input_activations")
    if group.get("output_activations") is not None:
        raise group.unsupported("output_activations", group.get("output_activations"), "none")
    if layout == FLOAT_QUANTIZED:
        weights.require("num_bits", 8)
        weights.require("symmetric", True, default=True)
        strategy = weights.require("strategy", "tensor", "channel", "block")
        block_size = weights.block_size("block_structure") if strategy == "block" else None
        if strategy == "block" and block_size is None:
            raise weights.unsupported("block_structure", None, "two integers, such as [128, 128]")
        return QuantizedCheckpoint(COMPRESSED_TENSORS, layout, 8, None, True, is_float=True, block_size=block_size)
    if layout == INT_QUANTIZED:
        weights.require("num_bits", 8)
        weights.require("symmetric", True, default=True)
        weights.require("strategy", "channel", "tensor")
        if activations is None:
            raise group.unsupported("input_activations", None, "8-bit integers, dynamic, per token")
        activations.require("num_bits", 8)
        activations.require("type", "int")
        activations.require("dynamic", True)
        activations.require("symmetric", True, default=True)
        activations.require("strategy", "token")
        return QuantizedCheckpoint(COMPRESSED_TENSORS, layout, 8, None, is_symmetric=True)
    if activations is not None:
        raise group.unsupported("input_activations", dict(activations.content), "none")
    weights.require("num_bits", 4)
    strategy = weights.require("strategy", "group", "channel")
    group_size = weights.group_size() if strategy == "group" else None
    # "weight" and "static" orders leave the inputs where they are.
    order = weights.get("actorder")
    if order not in (None, False, True, "group", "weight", "static", "dynamic"):
        raise weights.unsupported("actorder", order, "group, dynamic, weight, static")
    is_symmetric = weights.require("symmetric", True, False, default=True)
    is_reordered = order in (True, "group", "dynamic")
    return QuantizedCheckpoint(COMPRESSED_TENSORS, layout, 4, group_size, is_symmetric, is_reordered)


def _check_cache_scheme(scheme: _Fields | None) -> bool:
    """Whether there are scales of an FP8 KV cache, one for keys and one for values of a layer."""
    if scheme is None:
        return False
    scheme.require("num_bits", 8)
    scheme.require("type", "float")
    scheme.require("strategy", "tensor", default="tensor")
    scheme.require("dynamic", False, default=False)
    scheme.require("symmetric", True, default=True)
    return True
