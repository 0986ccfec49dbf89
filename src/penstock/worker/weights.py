"""Weights of one rank: its share of the model, the drafter beside it, and the speculator that runs that."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from penstock.attention import CacheLayer, LayerAttention
from penstock.config import EngineConfig, ModelConfig
from penstock.config.load import SHARDED_STATE_PATTERN
from penstock.contract import KVCacheSpec
from penstock.contract.feature import keeps_layer_inputs
from penstock.device import Device, DtypeChoice
from penstock.layers.linear import describe_narrow_products, weights_size_bytes
from penstock.loader.sharded_state import copy_model_files, save_sharded_state
from penstock.models.attention_layers import cache_layers, choose_state_dtypes
from penstock.models.causal_lm import CausalLM
from penstock.models.interface import LanguageModel
from penstock.observability.units import format_bytes
from penstock.parallel import ParallelState
from penstock.runner.speculative.create import create_speculator
from penstock.worker.calibration import load_for_device
from penstock.worker.drafter import attach_drafter, aux_layers_of_head, drafted_specs, load_drafter
from penstock.worker.kv_cache_dtype import attends_in_bfloat16, choose_kv_cache_dtype
from penstock.worker.reload import load_replacement

logger = logging.getLogger(__name__)


class Weights:
    """Model, drafter and speculator of a rank. model: replaced by a reload."""

    def __init__(self, config: EngineConfig, parallel: ParallelState, device: Device, dtype: DtypeChoice) -> None:
        self._parallel = parallel
        self._device = device
        self._dtype = dtype
        self._config = config
        with device.loading_weights():
            self.model: nn.Module = load_for_device(
                config.model, config.load, parallel, device, dtype, keeps_inputs=keeps_layer_inputs(config)
            )
            self.drafter: CausalLM | None = load_drafter(config, self.model, parallel, device, dtype)
        choose_state_dtypes(self.model, *config.cache.state_dtypes)
        self._kv_cache_dtype = choose_kv_cache_dtype(
            config.cache.kv_cache_dtype, dtype.name, self.model, config.device.attention_backend
        )
        self.speculator = create_speculator(
            config.speculative,
            device,
            config.model.vocab_size,
            self.drafter,
            aux_layers_of_head(config, self.model, parallel),
        )
        logger.info(
            "Model: %s, %s of weights, computed in %s",
            config.model.architecture,
            format_bytes(self.size_bytes),
            self.describe_arithmetic(),
        )
        self._log_cache_scales()
        if config.model.pooling is not None:
            logger.info("Pooling: %s", config.model.pooling.describe())

    @property
    def language_model(self) -> LanguageModel:
        return self.model  # type: ignore[return-value]

    @property
    def layers(self) -> Mapping[str, CacheLayer]:
        """Layers that are bound to a backend, of model and drafter."""
        return {**cache_layers(self.model), **self.speculator.cache_layers()}

    @property
    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """KV cache specs of those with pages, by name."""
        return drafted_specs(self._config, self.model, self.drafter, self._kv_cache_dtype)

    def describe_arithmetic(self) -> str:
        """Describe the dtype of the computation, and the arithmetic of products and attention, for the log."""
        reasons = self._dtype.reason, describe_narrow_products(self.model), self._describe_attention()
        return f"{self._dtype.name} ({'; '.join(filter(None, reasons))})"

    def _log_cache_scales(self) -> None:
        """Log which layers have scales of an FP8 KV cache, where the cache or the checkpoint is of that kind."""
        attention = (layer for layer in self.layers.values() if isinstance(layer, LayerAttention))
        layers = [layer for layer in attention if layer.is_causal]
        num_scaled = sum(layer.cache_scales is not None for layer in layers)
        if self._kv_cache_dtype == "fp8" and layers:
            logger.info(
                "FP8 KV cache: %d of %d layers have scales in the checkpoint; others have scale 1, and saturate at 448",
                num_scaled,
                len(layers),
            )
        elif num_scaled:
            logger.info(
                "The checkpoint's scales of an FP8 KV cache are not used with kv_cache_dtype=%r", self._kv_cache_dtype
            )

    def _describe_attention(self) -> str | None:
        """Describe attention in bfloat16 arithmetic for the log; None for others."""
        is_narrow = self._kv_cache_dtype == "bfloat16" and attends_in_bfloat16(self.model)
        return "attention in it too, over the bfloat16 KV cache" if is_narrow else None

    @property
    def size_bytes(self) -> int:
        return sum(weights_size_bytes(model) for model in (self.model, self.drafter) if model is not None)

    def reload(self, current: EngineConfig, new: EngineConfig, max_model_len: int | None) -> None:
        """Load the model of another configuration, then replace the current one, which stays on failure.

        max_model_len: context length of the engine, if it runs. Raises what `load_replacement` raises.
        """
        with self._device.loading_weights():
            try:
                replacement = load_replacement(
                    current.model,
                    new.model,
                    new.load,
                    self._parallel,
                    self._device,
                    self._dtype,
                    max_model_len=max_model_len,
                    size_bytes=weights_size_bytes(self.model),
                    keeps_inputs=keeps_layer_inputs(current),
                )
            finally:
                gc.collect()
        if new.model.eos_token_ids != current.model.eos_token_ids:
            logger.warning(
                "%s ends texts with the tokens %s, but this engine goes on ending them with %s, as it was started",
                new.model.model,
                sorted(new.model.eos_token_ids),
                sorted(current.model.eos_token_ids),
            )
        choose_state_dtypes(replacement, *new.cache.state_dtypes)
        attach_drafter(self.drafter, replacement)
        self.model = replacement

    def save(self, path: str, pattern: str | None, max_size: int | None, source: ModelConfig | None) -> list[str]:
        """See `Worker.save_sharded_state`. source: model whose configuration and tokenizer files are copied."""
        folder = Path(path).expanduser()
        with torch.no_grad():
            written = save_sharded_state(self.model, folder, self._parallel, pattern or SHARDED_STATE_PATTERN, max_size)
        if source is not None:
            if source.hf_config_path is not None or source.hf_overrides is not None:
                (folder / "config.json").write_text(json.dumps(source.hf_config), encoding="utf-8")
            copy_model_files(source.folder, folder)
        return [str(file) for file in written]
