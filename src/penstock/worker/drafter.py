"""Draft models and heads: configuration, checks against the target model, and loading."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec
from torch import Tensor, nn

from penstock.checkpoints.context_length import stretched_context
from penstock.checkpoints.json_file import typed_field
from penstock.checkpoints.multimodal import without_media
from penstock.checkpoints.resolve import SHIPPED_HEADS
from penstock.config import EngineConfig, LoadConfig, ModelConfig
from penstock.config.load import SHARDED_STATE
from penstock.config.speculative import HEAD_METHODS, MODEL_METHODS
from penstock.contract import KVCacheSpec, RecurrentStateSpec
from penstock.device import Device, DtypeChoice
from penstock.errors import ConfigError, ModelError, UnsupportedFeature
from penstock.loader.loader import load_model, load_without_memory, peek_weights
from penstock.models.attention_layers import kv_cache_specs, prefix_layers
from penstock.models.causal_lm import CausalLM
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderForCausalLM
from penstock.models.draft_head import STORED_NAMES, DraftHead, StoredNames
from penstock.models.eagle3 import aux_layers_of
from penstock.models.registry import runs_through_transformers
from penstock.parallel import ONE_RANK, ParallelState, layers_of_stage

# Prefix of the drafter's layer names.
PREFIX = "draft."
_EAGLE_HEADS = {"eagle": "EagleLlamaForCausalLM", "eagle3": "Eagle3LlamaForCausalLM"}
# MTP head classes by architecture of the target.
_MTP_HEADS = {
    "DeepseekV3ForCausalLM": "DeepSeekMTP",
    "Glm4MoeLiteForCausalLM": "DeepSeekMTP",
    "MiMoForCausalLM": "MiMoMTP",
    "Qwen3NextForCausalLM": "Qwen3NextMTP",
    "Qwen3_5ForCausalLM": "Qwen3NextMTP",
    "Qwen3_5MoeForCausalLM": "Qwen3NextMTP",
}


def load_drafter(
    config: EngineConfig, target: nn.Module, parallel: ParallelState, device: Device, dtype: DtypeChoice
) -> CausalLM | None:
    """Load the drafter in the target's dtype; None for a method without a model, and on all stages but the last.

    Raises ConfigError, ModelError or UnsupportedFeature for a drafter that does not fit the target, and what loading
    raises.
    """
    model_config = _drafter_config(config)
    if model_config is None or not _is_last_stage(parallel):
        return None
    drafter = load_model(
        model_config,
        _load_config(config),
        _without_stages(parallel),
        device.torch_device,
        dtype.torch_dtype,
        dtype.weights_torch_dtype,
    )
    return _prepared(drafter, target)


def load_drafter_without_memory(
    config: EngineConfig,
    target: nn.Module,
    parallel: ParallelState,
    kind: str,
    dtype: DtypeChoice,
    tensors: Iterable[tuple[str, Tensor]] | None,
) -> tuple[CausalLM | None, int]:
    """Load the drafter on the meta device for this kind of device; return it and its number of parameters.

    tensors: meta tensors of the target's checkpoint, if its files are not local.
    """
    model_config = _drafter_config(config)
    if model_config is None or not _is_last_stage(parallel):
        return None, 0
    drafter, num_parameters = load_without_memory(
        model_config,
        _load_config(config),
        _without_stages(parallel),
        kind,
        dtype.torch_dtype,
        dtype.weights_torch_dtype,
        tensors if model_config.folder == config.model.folder else None,
    )
    return _prepared(drafter, target), num_parameters


def place_for_drafter(config: EngineConfig, parallel: ParallelState) -> ParallelState:
    """Return the parallel state with `embeds_at_end` set if a draft head needs the target's embedding."""
    if parallel.pipeline.size == 1 or config.speculative.method not in HEAD_METHODS:
        return parallel
    drafter = _drafter_config(config)
    assert drafter is not None, "heads are models"
    has_own = StoredNames(ConfigFields(drafter)).has("embed_tokens.weight")
    return replace(parallel, embeds_at_end=not has_own)


def aux_layers_of_head(config: EngineConfig, target: nn.Module, parallel: ParallelState) -> tuple[int, ...]:
    """Return the layers whose auxiliary hidden states an EAGLE-3 head on the last stage needs from this stage."""
    # Other targets are refused by the last stage.
    if config.speculative.method != "eagle3" or not isinstance(target, DecoderForCausalLM) or _is_last_stage(parallel):
        return ()
    head = _drafter_config(config)
    assert head is not None, "heads are models"
    return aux_layers_of(ConfigFields(head), target.config.num_layers)


def layers_of_target(target: object, parallel: ParallelState) -> range:
    """Return this stage's decoder layers; empty for models without auxiliary hidden states."""
    if not isinstance(target, DecoderForCausalLM):
        return range(0)
    return layers_of_stage(target.config.num_layers, parallel)


def attach_drafter(drafter: CausalLM | None, target: nn.Module) -> None:
    """Attach a draft head to its target, whose embedding and output head it may share."""
    if isinstance(drafter, DraftHead):
        drafter.attach(target)


def drafted_specs(
    config: EngineConfig, target: nn.Module, drafter: CausalLM | None, dtype: str
) -> dict[str, KVCacheSpec]:
    """Return the KV cache specs of target and drafter. dtype: of the KV cache.

    Raises UnsupportedFeature for options of recurrent states with a model that has none.
    """
    cache = config.cache
    models = [target] if drafter is None else [target, drafter]
    specs = {name: spec for model in models for name, spec in kv_cache_specs(model, cache.block_size, dtype).items()}
    states = {name: spec for name, spec in specs.items() if isinstance(spec, RecurrentStateSpec)}
    if not states:
        cache.check_has_states()
    return specs | {
        name: msgspec.structs.replace(
            spec,
            block_size=cache.mamba_block_size or cache.block_size,
            snapshots=cache.snapshots,
            max_drafts=config.speculative.num_speculative_tokens,
        )
        for name, spec in states.items()
    }


def _prepared(drafter: CausalLM, target: nn.Module) -> CausalLM:
    prefix_layers(drafter, PREFIX)
    attach_drafter(drafter, target)
    return drafter


def _drafter_config(config: EngineConfig) -> ModelConfig | None:
    method, target = config.speculative.method, config.model
    if method not in MODEL_METHODS:
        return None
    length = target.planned_context
    if method == "draft_model":
        drafter = _named(config, model_impl="auto")
        if runs_through_transformers(drafter) and config.parallel.tensor_parallel_size > 1:
            raise UnsupportedFeature(
                f"The draft model {drafter.model} ({drafter.architecture}) runs through Transformers, so its layers "
                f"are not split over workers (tensor_parallel_size={config.parallel.tensor_parallel_size}). Use "
                "tensor_parallel_size=1, or a draft model of a native family."
            )
        return _standalone(drafter, target, length)
    if method == "mtp":
        return _mtp(config, length)
    return _head(_named(config), _EAGLE_HEADS[method], length, _stored_names(_named(config), config))


def _is_last_stage(parallel: ParallelState) -> bool:
    return parallel.pipeline.rank == parallel.pipeline.size - 1


def _without_stages(parallel: ParallelState) -> ParallelState:
    """Return the parallel state of a drafter, which is not split into stages."""
    return replace(parallel, pipeline=ONE_RANK, pipeline_layers=None)


def _named(config: EngineConfig, model_impl: str = "penstock") -> ModelConfig:
    """Return the configuration of `speculative_config`'s model, or of the head shipped with the model."""
    name = config.speculative.model
    if name is None and config.speculative.method == "eagle3":
        name = SHIPPED_HEADS.get(config.model.model)
    if name is None:
        raise ConfigError(
            f"speculative_config has the method {config.speculative.method!r} and no model. Give the drafter's folder "
            "or hub id as its model."
        )
    return ModelConfig.load(
        name, model_impl=model_impl, dtype=config.model.dtype, cpu_arithmetic=config.model.cpu_arithmetic
    )


def _standalone(drafter: ModelConfig, target: ModelConfig, length: int) -> ModelConfig:
    if drafter.vocab_size != target.vocab_size:
        raise ModelError(
            f"The draft model {drafter.model} has vocab_size={drafter.vocab_size}, but {target.model} has "
            f"{target.vocab_size}. Use a draft model with the same tokens."
        )
    if drafter.longest_context < length:
        raise ConfigError(
            f"The draft model {drafter.model} was made for {drafter.longest_context} positions "
            f"({drafter.context_source}), but this engine serves {length}. Start with "
            f"max_model_len={drafter.longest_context}, or use another draft model."
        )
    return replace(drafter, max_model_len=length)


def _mtp(config: EngineConfig, length: int) -> ModelConfig:
    target = config.model
    architecture = _MTP_HEADS.get(target.architecture)
    if architecture is None:
        raise UnsupportedFeature(
            f"The method 'mtp' takes a model whose checkpoint has layers for it, which {target.architecture} has not. "
            f"Supported: {', '.join(_MTP_HEADS)}."
        )
    source = target if config.speculative.model is None else _named(config)
    return _head(replace(source, quantization=None, model_impl="penstock"), architecture, length, None)


def _head(source: ModelConfig, architecture: str, length: int, stored_names: list[str] | None) -> ModelConfig:
    """Return the configuration of a head: its class, and positions extended to `length`.

    The library `speculators` has the layer's fields in an object of their own.
    """
    path = source.folder / "config.json"
    layer = typed_field(source.hf_config, "transformer_layer_config", (dict,), path, ModelError)
    written = {**(layer or {}), **without_media(source.hf_config)}
    positions: int = typed_field(written, "max_position_embeddings", (int,), path, ModelError) or 0
    fields: dict[str, Any] = {
        **written,
        "architectures": [architecture],
        "max_position_embeddings": positions if stretched_context(written, positions) >= length else length,
        STORED_NAMES: stored_names,
    }
    return replace(source, hf_config=fields, max_model_len=length)


def _stored_names(source: ModelConfig, config: EngineConfig) -> list[str] | None:
    load_config = _load_config(config)
    if load_config.load_format == "dummy":
        return None
    return [name for name, _ in peek_weights(source.folder, load_config, ParallelState())]


def _load_config(config: EngineConfig) -> LoadConfig:
    """Return the load options of the drafter, which sharded states do not include."""
    load = config.load
    return replace(load, load_format="auto") if load.load_format == SHARDED_STATE else load
