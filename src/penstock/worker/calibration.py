"""Calibration: run calibration data through the float model, smooth its inputs, and quantise it layer by layer."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from penstock.attention import NO_CONTEXT
from penstock.config import LoadConfig, ModelConfig
from penstock.config.model import NO_CALIBRATION, NO_QUANTIZATION
from penstock.device import Device, DtypeChoice
from penstock.layers.embedding import LMHead
from penstock.layers.linear import LinearLayer, LinearMethod
from penstock.layers.quantization.gptq import gptq_quantize
from penstock.layers.quantization.method import WIDER_LAYERS, Quantizer, choose_method, int4_method
from penstock.layers.quantization.observe import accumulate_grams, record_peaks
from penstock.layers.quantization.quantize import quantize_int4
from penstock.layers.quantization.smoothing import smooth, smoothable
from penstock.loader.loader import load_model
from penstock.loader.sharded_state import find_packed_state
from penstock.loader.weight_source import WeightSource
from penstock.models.attention_layers import cache_layers, choose_attention_arithmetic, kv_cache_specs
from penstock.models.causal_lm import CausalLM
from penstock.observability.progress_bar import progress_bar
from penstock.observability.units import format_bytes
from penstock.parallel import ParallelState
from penstock.runner.dummy_runs import run_prompt
from penstock.runner.model_runner import ModelRunner, RunnerLimits
from penstock.worker.calibration_texts import MAX_SMOOTHING_TOKENS, CalibrationTexts, find_calibration_texts
from penstock.worker.profile import throwaway_kv_cache

logger = logging.getLogger(__name__)
_Item = TypeVar("_Item")
# Tokens per step; longer texts are split.
_MAX_TOKENS = 2048
_BLOCK_SIZE = 16
# Logits rows at a time.
_HEAD_ROWS = 64
_GRAM_VALUE_BYTES = 4
# Rows of inputs below which peaks say too little: those of a single row made an expert's products six times as wrong as
# no smoothing.
_MIN_SMOOTHING_ROWS = 16
# Interval of the lines that say how far the calibration is.
_PROGRESS_S = 10.0
# Share of free memory for Gram matrices of layer inputs. The data runs again for layers beyond it.
_SHARE_OF_FREE = 4


def load_for_device(
    model_config: ModelConfig,
    load_config: LoadConfig,
    parallel: ParallelState,
    device: Device,
    dtype: DtypeChoice,
    *,
    keeps_inputs: bool = False,
    source: WeightSource | None = None,
) -> CausalLM:
    """Load the model, and quantise it with calibration if `find_calibration_texts` has data.

    keeps_inputs: whether features compute with the inputs of layers, which must stay as they are then. source: weights
    in place of the files'.
    Raises what `load_model` raises, ConfigError for unreadable calibration data, and ModelError for non-finite inputs.
    """

    def load(config: ModelConfig) -> CausalLM:
        dtypes = dtype.torch_dtype, dtype.weights_torch_dtype
        return load_model(config, load_config, parallel, device.torch_device, *dtypes, source=source)

    texts = calibration_texts(model_config, load_config, parallel, device, dtype, keeps_inputs=keeps_inputs)
    if texts is None:
        return load(model_config)
    floats = replace(model_config, quantization=NO_QUANTIZATION, quantization_calibration=NO_CALIBRATION)
    # Gram matrices are of exact inputs; ranges may be of rounded ones, which come sooner.
    model = load(replace(floats, cpu_arithmetic="float32") if texts.feeds_gptq else floats)
    begin = time.monotonic()
    logger.info("Quantized weights: calibrating %s, which takes a while", model_config.quantization)
    calibration = _Calibration(model, texts, model_config, device, dtype, shows_bar=load_config.use_tqdm_on_load)
    with torch.no_grad():
        num_smoothed = 0 if keeps_inputs else calibration.smooth(parallel)
        passes = calibration.quantize(_max_gram_bytes(device, parallel))
    choose_attention_arithmetic(model)
    model.requires_grad_(False)
    logger.info(
        "Quantized weights: %s calibrated on %s tokens of %s in %.1f s: %s, inputs of %d layers smoothed%s",
        model_config.quantization,
        f"{texts.num_tokens:,}",
        texts.source,
        time.monotonic() - begin,
        passes,
        num_smoothed,
        f", {WIDER_LAYERS}" if device.kind == "cpu" and model_config.quantization == "int4" else "",
    )
    return model


def calibration_texts(
    model_config: ModelConfig,
    load_config: LoadConfig,
    parallel: ParallelState,
    device: Device,
    dtype: DtypeChoice,
    *,
    keeps_inputs: bool,
) -> CalibrationTexts | None:
    """Return the texts with which `load_for_device` calibrates, for which it needs the float model; None without."""
    if find_packed_state(model_config.folder, load_config, parallel) is not None:
        return None
    texts = find_calibration_texts(model_config, load_config, parallel, device, dtype)
    return None if texts is None or (keeps_inputs and not texts.feeds_gptq) else texts


def _max_gram_bytes(device: Device, parallel: ParallelState) -> int:
    """Return the memory for Gram matrices, equal on all ranks, which run the same steps."""
    free = device.memory_snapshot().free // (_SHARE_OF_FREE * parallel.tensor.size)
    return min(parallel.tensor.gather_values(free))


class _Calibration:
    """Quantisation of a float model with calibration data."""

    def __init__(
        self,
        model: CausalLM,
        texts: CalibrationTexts,
        config: ModelConfig,
        device: Device,
        dtype: DtypeChoice,
        *,
        shows_bar: bool,
    ) -> None:
        self._model, self._texts, self._config, self._device, self._dtype = model, texts, config, device, dtype
        self._shows_bar = shows_bar
        modules = [module for module in model.modules() if isinstance(module, LinearLayer)]
        self._layers = [layer for layer in modules if not layer.keeps_precision]

    def smooth(self, parallel: ParallelState) -> int:
        """Smooth the inputs of the layers that can be, and had enough of them; return their number."""
        layers = smoothable(self._layers)
        if not layers:
            return 0
        with record_peaks(layers) as peaks:
            self._read(self._texts.first(MAX_SMOOTHING_TOKENS), reaches_heads=False)
        known = [
            (layer, peak) for layer, peak in zip(layers, peaks, strict=True) if peak.num_rows >= _MIN_SMOOTHING_ROWS
        ]
        for layer, peak in known:
            smooth(layer, peak.values, parallel.tensor)
        return len(known)

    def quantize(self, max_gram_bytes: int) -> str:
        """Quantise all layers, by GPTQ if the data feeds it; return how, for logs.

        max_gram_bytes: memory for Gram matrices.
        """
        assert self._config.quantization is not None, "a quantization to calibrate"
        if not self._texts.feeds_gptq:
            choose = choose_method(self._config.quantization)
            for layer in _told(self._layers, "layers rounded", shows_bar=self._shows_bar):
                _change_method(layer, choose(layer))
            return "rounded to nearest"
        num_times = num_nearest = 0
        for part in _parts(self._layers, max_gram_bytes):
            num_times += 1
            heads = [
                layer for layer in part if isinstance(layer, LMHead) or layer.output_size == self._config.vocab_size
            ]
            with accumulate_grams(part, only_inputs_of=heads) as grams:
                self._read(self._texts.token_ids, reaches_heads=bool(heads))
            for layer in _told(part, "layers rounded", shows_bar=self._shows_bar):
                gram = grams.pop(0)
                # With fewer rows than features the Gram matrix is singular: GPTQ moves errors to directions without
                # inputs, which is worse than rounding to nearest.
                is_known = gram.num_rows >= layer.input_size
                num_nearest += not is_known
                quantizer = _round_once_for(gram.values) if is_known else quantize_int4
                _change_method(layer, int4_method(layer, quantizer))
        nearest = f" ({num_nearest} layers with fewer rows than features to nearest)" if num_nearest else ""
        if num_times == 1:
            return f"GPTQ in one pass{nearest}"
        return f"GPTQ in {num_times} passes of {format_bytes(max_gram_bytes)} of Gram matrices{nearest}"

    def _read(self, texts: Sequence[list[int]], *, reaches_heads: bool) -> None:
        """Run texts through the model. reaches_heads: whether to run the output projection too."""
        _read(
            self._model,
            texts,
            self._config,
            self._device,
            self._dtype,
            reaches_heads=reaches_heads,
            shows_bar=self._shows_bar,
        )


def _told(items: Sequence[_Item], what: str, *, shows_bar: bool) -> Iterator[_Item]:
    """The items, with a progress bar in a terminal; elsewhere a line says how many are done, each `_PROGRESS_S`."""
    last = time.monotonic()
    bar = progress_bar(len(items), f"Quantizing, {what}", is_wanted=shows_bar, iterable=items, delay=2, leave=False)
    for number, item in enumerate(bar):
        if bar.disable and time.monotonic() >= last + _PROGRESS_S:
            last = time.monotonic()
            logger.info("Quantized weights: %d of %d %s", number, len(items), what)
        yield item


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
    shows_bar: bool,
) -> None:
    """Run all texts through the model, each from position 0.

    reaches_heads: whether to run the output projection too. shows_bar: a progress bar in a terminal.
    """
    # The model has rotary factors for no more positions than the engine serves.
    max_tokens = min(_MAX_TOKENS, config.planned_context - 1)
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
    for text in _told(texts, "calibration texts read", shows_bar=shows_bar):
        for begin in range(0, len(text), max_tokens):
            hidden_TD = run_prompt(runner, text[begin : begin + max_tokens])
            if reaches_heads:
                for rows_LD in (*hidden_TD[:-1].split(_HEAD_ROWS), hidden_TD[-1:]):
                    model.compute_logits(rows_LD, NO_CONTEXT)
