"""GPTQ calibration: run calibration data through the float model, then quantise it layer by layer."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from penstock.config import LoadConfig, ModelConfig
from penstock.device import Device, DtypeChoice
from penstock.errors import ConfigError
from penstock.layers.embedding import LMHead
from penstock.layers.linear import LinearLayer, LinearMethod
from penstock.layers.quantization.gptq import accumulate_grams, gptq_quantize
from penstock.layers.quantization.method import WIDER_LAYERS, Quantizer, int4_method
from penstock.layers.quantization.quantize import quantize_int4
from penstock.loader.calibration_text import read_calibration_text
from penstock.loader.loader import load_model
from penstock.models.attention_layers import cache_layers, kv_cache_specs
from penstock.models.causal_lm import CausalLM
from penstock.observability.units import format_bytes
from penstock.parallel import ParallelState
from penstock.runner.dummy_runs import run_prompt
from penstock.runner.model_runner import ModelRunner, RunnerLimits
from penstock.worker.profile import throwaway_kv_cache

logger = logging.getLogger(__name__)
# Tokens per step; longer texts are split.
_MAX_TOKENS = 2048
_BLOCK_SIZE = 16
# Logits rows at a time.
_HEAD_ROWS = 64
_GRAM_VALUE_BYTES = 4
# Share of free memory for Gram matrices of layer inputs. The data runs again for layers beyond it.
_SHARE_OF_FREE = 4


def load_for_device(
    model_config: ModelConfig, load_config: LoadConfig, parallel: ParallelState, device: Device, dtype: DtypeChoice
) -> CausalLM:
    """Load the model, with GPTQ calibration if `model_config` has calibration data.

    Raises what `load_model` raises, ConfigError for unreadable calibration data, and ModelError for non-finite inputs.
    """

    def load(config: ModelConfig) -> CausalLM:
        return load_model(
            config, load_config, parallel, device.torch_device, dtype.torch_dtype, dtype.weights_torch_dtype
        )

    path = model_config.calibration_file
    if path is None:
        return load(model_config)
    texts = read_calibration_text(path, model_config.tokenizer_folder)
    largest = max(max(text) for text in texts)
    if largest >= model_config.vocab_size:
        raise ConfigError(
            f"quantization_calibration={str(path)!r} has the token {largest} with the tokenizer in "
            f"{model_config.tokenizer_folder}, but the model has {model_config.vocab_size} tokens."
        )
    model = load(replace(model_config, quantization=None, quantization_calibration="none", cpu_arithmetic="float32"))
    with torch.no_grad():
        _round(model, texts, path, model_config, device, dtype, _max_gram_bytes(device, parallel))
    return model


def _max_gram_bytes(device: Device, parallel: ParallelState) -> int:
    """Return the memory for Gram matrices, equal on all ranks, which run the same steps."""
    free = device.memory_snapshot().free // (_SHARE_OF_FREE * parallel.tensor.size)
    return min(parallel.tensor.gather_values(free))


def _round(
    model: CausalLM,
    texts: Sequence[list[int]],
    path: Path,
    config: ModelConfig,
    device: Device,
    dtype: DtypeChoice,
    max_gram_bytes: int,
) -> None:
    begin = time.monotonic()
    layers = [module for module in model.modules() if isinstance(module, LinearLayer) and not module.keeps_precision]
    wider = f", {WIDER_LAYERS}" if device.kind == "cpu" else ""
    num_tokens = f"{sum(map(len, texts)):,}"
    logger.info("Quantized weights: int4 with GPTQ calibration on %s tokens of %s%s", num_tokens, path, wider)
    num_times = 0
    for part in _parts(layers, max_gram_bytes):
        num_times += 1
        heads = [layer for layer in part if isinstance(layer, LMHead) or layer.output_size == config.vocab_size]
        with accumulate_grams(part, only_inputs_of=heads) as grams:
            _read(model, texts, config, device, dtype, reaches_heads=bool(heads))
        for layer in part:
            _change_method(layer, int4_method(layer, _round_once_for(grams.pop(0))))
    model.requires_grad_(False)
    logger.info(
        "Quantized weights: calibrated in %s, %.1f s",
        "one pass" if num_times == 1 else f"{num_times} passes of {format_bytes(max_gram_bytes)} of Gram matrices",
        time.monotonic() - begin,
    )


def _round_once_for(gram_II: Tensor) -> Quantizer:
    """Return GPTQ for the first weight, and plain int4 for later (reloaded) ones; frees the Gram matrix after use."""
    grams = [gram_II]
    return lambda weight_OI: gptq_quantize(weight_OI, grams.pop()) if grams else quantize_int4(weight_OI)


def _change_method(layer: LinearLayer, method: LinearMethod) -> None:
    layer.method.restore_weights(layer)
    layer.method = method
    method.process_weights_after_loading(layer)


def _parts(layers: Sequence[LinearLayer], max_bytes: int) -> Iterator[list[LinearLayer]]:
    """Yield groups of layers whose Gram matrices fit into memory together, in model order."""
    part: list[LinearLayer] = []
    num_bytes = 0
    for layer in layers:
        gram_bytes = layer.input_size**2 * _GRAM_VALUE_BYTES
        if part and num_bytes + gram_bytes > max_bytes:
            yield part
            part, num_bytes = [], 0
        part.append(layer)
        num_bytes += gram_bytes
    if part:
        yield part


def _read(
    model: CausalLM,
    texts: Sequence[list[int]],
    config: ModelConfig,
    device: Device,
    dtype: DtypeChoice,
    *,
    reaches_heads: bool,
) -> None:
    """Run all texts through the model, each from position 0.

    reaches_heads: whether to run the output projection too.
    """
    # The model has rotary factors for no more positions than the engine serves.
    longest = config.max_model_len if isinstance(config.max_model_len, int) else config.longest_context
    max_tokens = min(_MAX_TOKENS, longest - 1)
    runner = ModelRunner(
        device,
        model,
        cache_layers(model),
        throwaway_kv_cache(kv_cache_specs(model, _BLOCK_SIZE, dtype.name), max_tokens),
        RunnerLimits(
            max_num_reqs=1, max_num_tokens=max_tokens, max_model_len=max_tokens + 1, vocab_size=config.vocab_size
        ),
        fast_paths=False,
    )
    for text in texts:
        for begin in range(0, len(text), max_tokens):
            hidden_TD = run_prompt(runner, text[begin : begin + max_tokens])
            if reaches_heads:
                for rows_LD in (*hidden_TD[:-1].split(_HEAD_ROWS), hidden_TD[-1:]):
                    model.compute_logits(rows_LD)
