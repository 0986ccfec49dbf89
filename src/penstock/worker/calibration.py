"""A model whose weights are rounded for texts: it is loaded as it is, reads them, and is rounded layer by layer."""

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
from penstock.layers.quantization.method import Quantizer, int4_method
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
# Tokens that are read at once; longer texts are read in parts.
_MAX_TOKENS = 2048
_BLOCK_SIZE = 16
# Rows of logits at a time.
_HEAD_ROWS = 64
_GRAM_VALUE_BYTES = 4
# The share of free memory for what is known of layers' inputs. The texts are read again for layers beyond it.
_SHARE_OF_FREE = 4


def load_for_device(
    model_config: ModelConfig, load_config: LoadConfig, parallel: ParallelState, device: Device, dtype: DtypeChoice
) -> CausalLM:
    """The model with its weights as `model_config` asks for; rounded for texts if there are any.

    Raises what `load_model` does, ConfigError for texts that cannot be read, and ModelError for what they lead to.
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
    model = load(replace(model_config, quantization=None, quantization_calibration="none"))
    with torch.no_grad():
        _round(model, texts, path, model_config, device, dtype, _max_gram_bytes(device, parallel))
    return model


def _max_gram_bytes(device: Device, parallel: ParallelState) -> int:
    """The same for all ranks, which read together."""
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
    layers = [module for module in model.modules() if isinstance(module, LinearLayer)]
    logger.info("Quantized weights: rounding to int4 for the %s tokens of %s", f"{sum(map(len, texts)):,}", path)
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
        "Quantized weights: read %s, which took %.1f s",
        "once" if num_times == 1 else f"{num_times} times, for {format_bytes(max_gram_bytes)} of layers' inputs each",
        time.monotonic() - begin,
    )


def _round_once_for(gram_II: Tensor) -> Quantizer:
    """For weights that come later, and whose inputs are not known, `quantize_int4`. Keeps what it needs only once."""
    grams = [gram_II]
    return lambda weight_OI: gptq_quantize(weight_OI, grams.pop()) if grams else quantize_int4(weight_OI)


def _change_method(layer: LinearLayer, method: LinearMethod) -> None:
    layer.method.restore_weights(layer)
    layer.method = method
    method.process_weights_after_loading(layer)


def _parts(layers: Sequence[LinearLayer], max_bytes: int) -> Iterator[list[LinearLayer]]:
    """Layers whose inputs can be observed together, in the order of the model."""
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
    """Run all texts through the model, each from its own beginning.

    reaches_heads: through the output projection, too.
    """
    max_tokens = min(_MAX_TOKENS, config.longest_context - 1)
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
