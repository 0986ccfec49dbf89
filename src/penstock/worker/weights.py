"""Weights of one rank: its share of the model, the drafter beside it, and the speculator that runs that."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from penstock.attention import CacheLayer, LayerAttention
from penstock.checkpoints.quantized_checkpoint import read_quantized_checkpoint
from penstock.config import EngineConfig, LoadConfig, ModelConfig
from penstock.config.load import SHARDED_STATE, SHARDED_STATE_PATTERN
from penstock.contract import KVCacheSpec
from penstock.contract.feature import keeps_layer_inputs
from penstock.device import Device, DtypeChoice
from penstock.errors import OutOfMemory, UnsupportedFeature
from penstock.layers.linear import describe_narrow_products, weights_size_bytes
from penstock.layers.norm import has_shifted_weights
from penstock.layers.tensors_of import tensors_of
from penstock.loader.gguf.tensors import find_gguf
from penstock.loader.live_memory import LiveMemory
from penstock.loader.loader import build_model, load_model, load_without_memory
from penstock.loader.packed_state import PackedState, is_quantized_model
from penstock.loader.sharded_state import copy_model_files, save_sharded_state
from penstock.loader.tensorized import write_tensorized
from penstock.loader.weight_source import WeightSource
from penstock.loader.weight_update import WeightUpdate
from penstock.models.attention_layers import cache_layers, choose_state_dtypes
from penstock.models.causal_lm import CausalLM
from penstock.models.interface import LanguageModel
from penstock.models.registry import runs_through_transformers
from penstock.observability.units import format_bytes
from penstock.parallel import ParallelState
from penstock.runner.speculative.create import create_speculator
from penstock.worker.calibration import calibration_texts, load_for_device
from penstock.worker.drafter import attach_drafter, aux_layers_of_head, drafted_specs, load_drafter
from penstock.worker.kv_cache_dtype import attends_in_bfloat16, choose_kv_cache_dtype
from penstock.worker.reload import check_replacement, constants_of, is_quantized
from penstock.worker.weight_cache import WeightCache

logger = logging.getLogger(__name__)


class Weights:
    """Model, drafter and speculator of a rank. model: replaced by a reload that is not in place.

    have_moved: whether recorded programs know weights of other memory, or have copies of older ones. is_being_replaced:
    whether weights are being replaced in place.
    """

    have_moved = False
    is_being_replaced = False
    # Addresses of the file of the weight cache in which weights stay.
    _mapped = range(0)

    def __init__(self, config: EngineConfig, parallel: ParallelState, device: Device, dtype: DtypeChoice) -> None:
        self._parallel = parallel
        self._device = device
        self._dtype = dtype
        self._config = config
        with device.loading_weights():
            self.model: nn.Module = self._load_cached(config.model, config.load)
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
        if self._mapped:
            logger.warning(
                "Weights: %s of %s stay in a file of weight_cache_dir=%s, mapped. Every step reads from the disk what "
                "the system has dropped of them, so that steps may take as long as reading all of them",
                format_bytes(self.mapped_bytes),
                format_bytes(self.size_bytes),
                config.load.weight_cache_dir,
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

    @property
    def mapped_bytes(self) -> int:
        """Bytes of weights that stay in a file, mapped."""
        return sum(one.num_bytes for one in tensors_of(self.model) if self.is_mapped(one.tensor))

    def is_mapped(self, tensor: Tensor) -> bool:
        """Whether a tensor of the model stays in a file."""
        return bool(self._mapped) and not tensor.is_mkldnn and tensor.data_ptr() in self._mapped

    def _load_cached(self, model: ModelConfig, load: LoadConfig) -> CausalLM:
        """Load a model by the weight cache."""
        keeps_inputs = keeps_layer_inputs(self._config)

        def load_all() -> CausalLM:
            return load_for_device(model, load, self._parallel, self._device, self._dtype, keeps_inputs=keeps_inputs)

        fraction = self._config.cache.memory_fraction
        cache = WeightCache(model, load, self._parallel, self._device, self._dtype, fraction)
        loaded = cache.load(load_all, keeps_inputs=keeps_inputs)
        self._mapped = cache.mapped
        return loaded

    def begin_update(
        self, current: EngineConfig, is_checkpoint_format: bool, is_atomic: bool | None
    ) -> tuple[WeightUpdate, bool]:
        """Begin an update of the weights by tensors; return it, and whether it is in place.

        is_checkpoint_format: tensors have the names of a checkpoint, else those of `save_sharded_state`. is_atomic:
        the old weights stay until the new ones are complete, which takes their memory once more; None only where
        loading in place cannot be.
        Raises OutOfMemory without memory for it, UnsupportedFeature for weights that come from files alone, or stay
        in one.
        """
        if self._mapped:
            raise UnsupportedFeature(
                f"{format_bytes(self.mapped_bytes)} of weights stay in a file of weight_cache_dir, and tensors of a "
                "caller would need memory. Call reload_weights with a folder of the new weights, or start the engine "
                "with cpu_offload_gb=0 and more memory."
            )
        load_format = "auto" if is_checkpoint_format else SHARDED_STATE
        load_config = replace(current.load, load_format=load_format, use_tqdm_on_load=False)
        if is_checkpoint_format and find_gguf(current.model.folder, load_config) is not None:
            raise UnsupportedFeature(
                f"{current.model.model} is a GGUF file, whose blocks have scales that a trainer does not send. Start "
                "the engine with a checkpoint of floats, or call reload_weights with a GGUF file."
            )
        # Tensors of `save_sharded_state` come instead of files, which there are none of.
        why = self._why_not_in_place(current.model, replace(load_config, load_format="auto"))
        is_in_place = not is_atomic and why is None
        if not is_in_place:
            self._check_free_memory(current.model, why)
        if is_in_place:
            memory = LiveMemory(self.causal_lm)

            def load(source: WeightSource) -> CausalLM:
                with self._device.loading_weights():
                    loaded = self._load(current.model, load_config, source, memory)
                self._note_loaded(memory)
                return loaded
        else:

            def load(source: WeightSource) -> CausalLM:
                with self._device.loading_weights():
                    return load_for_device(
                        current.model,
                        load_config,
                        self._parallel,
                        self._device,
                        self._dtype,
                        keeps_inputs=keeps_layer_inputs(self._config),
                        source=source,
                    )

        return WeightUpdate(load, self.causal_lm), is_in_place

    @property
    def causal_lm(self) -> CausalLM:
        """The model. Raises UnsupportedFeature for a class of a plugin that loads weights in another way."""
        if not isinstance(self.model, CausalLM):
            raise UnsupportedFeature(f"{type(self.model).__name__} takes no weights while it runs. Start a new engine.")
        return self.model

    def reload(
        self, current: EngineConfig, new: EngineConfig, max_model_len: int | None, is_atomic: bool | None
    ) -> CausalLM | None:
        """Load the weights of another configuration: in place, or as a model to replace the current one, which is
        returned.

        max_model_len: context length of the engine, if it runs. is_atomic: as in `begin_update`. What does not fit is
        found before a weight is replaced. Raises what `check_replacement` and loading raise.
        """
        check_replacement(current.model, new.model, self._parallel, max_model_len)
        if new.model.eos_token_ids != current.model.eos_token_ids:
            logger.warning(
                "%s ends texts with the tokens %s, but this engine goes on ending them with %s, as it was started",
                new.model.model,
                sorted(new.model.eos_token_ids),
                sorted(current.model.eos_token_ids),
            )
        has_constants = constants_of(new.model) != constants_of(current.model)
        why = "its config.json has other fields" if has_constants else self._why_not_in_place(new.model, new.load)
        with self._device.loading_weights():
            try:
                if self._mapped:
                    return self._load_cached(new.model, new.load)
                if is_atomic or why is not None:
                    self._check_free_memory(new.model, why)
                    return load_for_device(
                        new.model,
                        new.load,
                        self._parallel,
                        self._device,
                        self._dtype,
                        keeps_inputs=keeps_layer_inputs(current),
                    )
                memory = LiveMemory(self.causal_lm)
                dtypes = self._dtype.torch_dtype, self._dtype.weights_torch_dtype
                unloaded, _ = load_without_memory(new.model, new.load, self._parallel, self._device.kind, *dtypes)
                memory.check(unloaded)
                self.is_being_replaced = True
                self._load(new.model, new.load, None, memory)
                self.is_being_replaced = False
                self._note_loaded(memory)
                return None
            finally:
                gc.collect()

    def replace(self, model: CausalLM) -> None:
        """Put a model in the place of the current one."""
        choose_state_dtypes(model, *self._config.cache.state_dtypes)
        attach_drafter(self.drafter, model)
        self.model = model

    def _note_loaded(self, memory: LiveMemory) -> None:
        self.have_moved |= memory.moved or (self._device.kind == "cpu" and has_shifted_weights(self.model))

    def _load(self, model: ModelConfig, load: LoadConfig, source: WeightSource | None, memory: LiveMemory) -> CausalLM:
        """Load weights into the live model's memory."""
        device, dtype = self._device.torch_device, self._dtype
        dtypes = dtype.torch_dtype, dtype.weights_torch_dtype
        return load_model(model, load, self._parallel, device, *dtypes, source=source, memory=memory)

    def _why_not_in_place(self, model: ModelConfig, load: LoadConfig) -> str | None:
        """Why weights need memory of their own while they are loaded, as a clause; None if they do not."""
        if not isinstance(self.model, CausalLM) or runs_through_transformers(model):
            return "the layers are those of Transformers"
        keeps_inputs = keeps_layer_inputs(self._config)
        texts = calibration_texts(model, load, self._parallel, self._device, self._dtype, keeps_inputs=keeps_inputs)
        if texts is not None:
            return "quantization_calibration needs the float model first"
        return None

    def _check_free_memory(self, model: ModelConfig, why: str | None) -> None:
        """Raise OutOfMemory unless the model fits into memory once more. why: it has to, as a clause."""
        size_bytes = weights_size_bytes(self.model)
        if why is not None and is_quantized(model):
            num_values = sum(parameter.numel() for parameter in build_model(model, self._parallel).parameters())
            size_bytes += num_values * self._dtype.weights_torch_dtype.itemsize
        free = self._device.memory_snapshot().free
        if size_bytes > free:
            reason = "" if why is None else f", since {why}"
            raise OutOfMemory(
                f"The old weights stay until the new ones are complete{reason}, which takes {format_bytes(size_bytes)} "
                f"more, but only {format_bytes(free)} are free. "
                + ("Leave atomic out" if why is None else "Create a new engine instead")
                + ", or give the KV cache less."
            )

    def save(
        self, path: str, pattern: str | None, max_size: int | None, current: ModelConfig, save_id: str
    ) -> list[str]:
        """See `Worker.save_sharded_state`. current: of the model, whose files rank 0 copies."""
        folder = Path(path).expanduser()
        packed = None
        is_packed = is_quantized_model(self.model) or bool(self._mapped)
        if is_packed or read_quantized_checkpoint(current.hf_config, current.model) is not None:
            packed = self._packed_state(current)
        with torch.no_grad():
            written = save_sharded_state(
                self.model, folder, self._parallel, pattern or SHARDED_STATE_PATTERN, max_size, packed, save_id
            )
        if self._parallel.rank == 0:
            _copy_configuration(current, folder)
        return [str(file) for file in written]

    def save_tensorized(self, uri: str, current: ModelConfig, save_id: str) -> str:
        """See `Worker.save_tensorized_model`."""
        with torch.no_grad():
            return write_tensorized(self._packed_state(current), uri, self._parallel, save_id)

    def _packed_state(self, current: ModelConfig) -> PackedState:
        return PackedState.of(self.causal_lm, current, self._device.kind, (self._dtype.name, self._dtype.weights))


def _copy_configuration(model: ModelConfig, folder: Path) -> None:
    """Copy configuration and tokenizer files, as they are used."""
    is_changed = model.hf_config_path is not None or model.hf_overrides is not None
    if is_changed or not (model.folder / "config.json").is_file():  # of a GGUF file
        (folder / "config.json").write_text(json.dumps(model.hf_config), encoding="utf-8")
    copy_model_files(model.folder, folder)
