"""Choice of the quantisation at load."""

from __future__ import annotations

import logging

import torch

from penstock.checkpoints.quantized_checkpoint import MXFP4, read_quantized_checkpoint
from penstock.config import LoadConfig, ModelConfig
from penstock.config.load import SHARDED_STATE
from penstock.config.model import NO_QUANTIZATION
from penstock.device.capability import choices_of, gpu_capability
from penstock.errors import UnsupportedFeature
from penstock.kernels.quantized import TorchQuantizedProducts
from penstock.kernels.triton import has_triton
from penstock.layers.quantization.method import PRODUCTS, WIDER_LAYERS, choose_method
from penstock.loader.gguf.products import GgufProducts
from penstock.loader.gguf.tensors import find_gguf
from penstock.loader.quantized.assembly import OptionRounding, Rounding
from penstock.loader.quantized.dequantized import DequantizedTensors
from penstock.loader.quantized.float8_products import Float8Tensors
from penstock.loader.quantized.mxfp4_products import Mxfp4Products
from penstock.loader.quantized.stream import QuantizedTensors
from penstock.models.registry import runs_through_transformers

logger = logging.getLogger(__name__)


def choose_rounding(model_config: ModelConfig, load_config: LoadConfig, kind: str) -> Rounding | None:
    """Choose the quantisation for a kind of device; None for float weights.

    Raises UnsupportedFeature for a checkpoint or a load format that cannot have quantised weights.
    """
    checkpoint = read_quantized_checkpoint(model_config.hf_config, model_config.model)
    option = model_config.quantization
    computes_blocks = kind == "cpu" and not isinstance(PRODUCTS, TorchQuantizedProducts)
    if checkpoint is not None and load_config.load_format == "dummy":  # random weights with as many bits
        option, checkpoint = None if checkpoint.is_float else f"int{checkpoint.bits}", None
    if checkpoint is not None:
        if load_config.load_format == SHARDED_STATE:
            raise UnsupportedFeature(
                f"The files of load_format={SHARDED_STATE!r} have no quantized weights, but config.json has "
                f"quant_method={checkpoint.method!r}. Load the checkpoint itself, and save its state anew."
            )
        if not checkpoint.is_float:
            return QuantizedTensors(checkpoint)
        on_gpu = kind == "cuda" and has_triton() and not runs_through_transformers(model_config)
        if checkpoint.method == MXFP4 and option is None and (computes_blocks or on_gpu):
            return Mxfp4Products(checkpoint)
        if option is None and on_gpu and checkpoint.method != MXFP4 and choices_of(gpu_capability()).has_float8:
            return Float8Tensors(checkpoint)
        return DequantizedTensors(checkpoint, None if option in (None, NO_QUANTIZATION) else _rounding(option, kind))
    if option == NO_QUANTIZATION:
        return None
    if option is None:
        if not computes_blocks or runs_through_transformers(model_config):
            return None
        found = find_gguf(model_config.folder, load_config)
        return None if found is None or not found.quantized_names else GgufProducts(found)
    return _rounding(option, kind)


def _rounding(option: str, kind: str) -> OptionRounding:
    wider = f", {WIDER_LAYERS}" if option == "int4" and kind == "cpu" else ""
    return OptionRounding(choose_method(option), f"rounded to {option} while loading{wider}")


def log_rounding(rounding: Rounding, device: torch.device) -> None:
    """Log the quantisation, with a warning without the C++ kernels."""
    logger.info("Quantized weights: %s", rounding.description)
    if device.type == "cpu" and isinstance(PRODUCTS, TorchQuantizedProducts):
        logger.warning("Without the C++ kernels, products with quantized weights are much slower than with float32.")
