"""Sweep over the models of images and text of Transformers: each made tiny, with random weights, and compared.

A model type either gives the greedy tokens and log-probabilities of Transformers in float32 for texts with an image, or
is refused with a reason. What a processor would make of an image is made here, so it says nothing of processors.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from penstock.config import EngineConfig
from penstock.contract import Parts
from penstock.contract.array_bytes import ArrayBytes
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import PenstockError
from penstock.features.multimodal.messages import MediaItem, MediaPart, Run
from penstock.models.multimodal.registry import has_native_encoder, why_no_media
from penstock.models.registry import refuse_unsuitable
from support.checkpoints import VOCAB_SIZE, save_checkpoint
from support.engines import Result, add, assert_within_rounding, finish, greedy, in_float64, make_core
from support.model_sweep import REFUSED, THROUGH_TRANSFORMERS, Outcome, reason_of
from support.transformers_models import TINY, randomise, small_fields

NATIVE, TEXT_ALONE = "native encoder", "text alone"
_NUM_TOKENS = 4
_IMAGE = VOCAB_SIZE - 1
_MOST_PARAMETERS = 5_000_000
# Sizes of a vision tower, where its configuration has these fields.
_SMALL_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "depth": 2,
    "num_attention_heads": 2,
    "num_heads": 2,
    "num_key_value_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
# Fields of the whole configuration, or of its parts, that only these types call for.
_QWEN_VISION = {"out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [1], "num_position_embeddings": 64}
_ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
_PINPOINTS = {"image_grid_pinpoints": [[16, 32], [32, 16]]}
_SMALL_OF_TYPE: dict[str, dict[str, dict[str, Any]]] = {
    "aria": {"": {"projector_patch_to_query_dict": {16: 4}}},
    # Transformers' class of the whole model leaves this factor of Cohere's logits out.
    "aya_vision": {"text_config": {"logit_scale": 1.0}},
    "cohere2_vision": {"text_config": {"logit_scale": 1.0}, "": {"alignment_intermediate_size": 64}},
    "exaone4_5": {"vision_config": _QWEN_VISION},
    "idefics2": {
        "perceiver_config": {
            "resampler_n_latents": 4,
            "resampler_depth": 1,
            "resampler_n_heads": 2,
            "resampler_head_dim": 16,
            "hidden_size": 64,
        }
    },
    "janus": {
        "vq_config": {
            "embed_dim": 8,
            "num_embeddings": 16,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "projection_dim": 64,
        },
        "vision_config": {"projection_dim": 64, "hidden_size": 32, "mlp_ratio": 2},
    },
    "lighton_ocr": {"vision_config": {"head_dim": 16}},
    "llama4": {
        "text_config": {
            "num_hidden_layers": 4,
            "num_local_experts": 2,
            "intermediate_size_mlp": 64,
            "attention_chunk_size": 8,
        },
        "vision_config": {
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "intermediate_size": 128,
        },
    },
    "llava_next": {"": _PINPOINTS},
    "llava_next_video": {"": _PINPOINTS},
    "qwen3_5": {"vision_config": _QWEN_VISION, "text_config": {"num_hidden_layers": 4, "rope_parameters": _ROPE}},
    "qwen3_5_moe": {
        "vision_config": _QWEN_VISION,
        "text_config": {"num_hidden_layers": 4, "rope_parameters": _ROPE},
    },
    "vipllava": {"": {"vision_feature_layers": [-2, -1]}},
}
_OPTIONS = {
    "block_size": 4,
    "dtype": "float32",
    "kv_cache_dtype": "float32",
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 64 << 20,
}


def outcome_of(model_type: str, folder: Path) -> Outcome:
    """Run a tiny model of this type, or say why it is refused. Raises AssertionError for a wrong answer."""
    class_name = class_names()[model_type]
    config = CONFIG_MAPPING[model_type]()
    content = {"vocab_size": VOCAB_SIZE, **config.to_dict(), "architectures": [class_name]}
    (folder / "config.json").write_text(json.dumps(content, default=str))
    try:
        model = EngineConfig.create(str(folder), device="cpu").model
        refuse_unsuitable(model)
    except PenstockError as error:
        return Outcome(REFUSED, reason_of(error, folder))
    reason = why_no_media(class_name)
    if reason is not None:
        return Outcome(TEXT_ALONE, reason)
    is_native = has_native_encoder(class_name)
    if not is_native or model_type in _GRIDS:  # others are compared by the tests of their encoders
        compare(model_type, folder)
    return Outcome(NATIVE if is_native else THROUGH_TRANSFORMERS)


def class_names() -> dict[str, str]:
    """Classes of models of images and text by their model type."""
    return dict(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def tiny_config(model_type: str) -> PretrainedConfig:
    """A tiny configuration with the sub-configurations that its class has by default."""
    config_class, given = CONFIG_MAPPING[model_type], _SMALL_OF_TYPE.get(model_type, {})
    default = config_class()
    parts: dict[str, Any] = {}
    for name in config_class.sub_configs:
        part = getattr(default, name, None)
        if part is None:
            continue
        is_text = part is default.get_text_config() or name == "text_config"
        known = {key for key in _SMALL_VISION if hasattr(part, key)}
        small = {**TINY, **small_fields("", type(part))} if is_text else {key: _SMALL_VISION[key] for key in known}
        parts[name] = {"model_type": part.model_type, **small, **given.get(name, {})}
    tokens = {name: _IMAGE for name in ("image_token_id", "image_token_index") if hasattr(default, name)}
    config = config_class(**{**parts, **tokens, "tie_word_embeddings": False, **given.get("", {})})
    config._attn_implementation = "eager"
    return config


def tiny_model(model_type: str, config: PretrainedConfig) -> PreTrainedModel:
    model_class = getattr(transformers, class_names()[model_type])
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in model_class(config).parameters())
    assert num_parameters < _MOST_PARAMETERS, f"{num_parameters:,} parameters: fields that make it tiny are missing"
    return randomise(model_class(config))


def image_inputs(model_type: str, config: PretrainedConfig) -> dict[str, Tensor]:
    """What a processor makes of an image."""
    generator = torch.Generator().manual_seed(0)
    side = getattr(config.vision_config, "image_size", 16)
    side = side if isinstance(side, int) else side[0]
    shape = _SHAPES.get(model_type, (1, 3, side, side))
    inputs = {"pixel_values": torch.randn(shape, generator=generator)}
    return inputs | {name: torch.tensor(values) for name, values in _GRIDS.get(model_type, {}).items()}


_PATCHES = (16, 3 * 2 * 4 * 4)
_SHAPES: dict[str, tuple[int, ...]] = {
    "exaone4_5": _PATCHES,
    "idefics2": (1, 1, 3, 16, 16),
    "lfm2_vl": (1, 16, 3 * 4 * 4),
    "llava_next": (1, 3, 3, 16, 16),
    "llava_next_video": (1, 3, 3, 16, 16),
    "qwen3_5": _PATCHES,
    "qwen3_5_moe": _PATCHES,
    "video_llama_3": (16, 3 * 4 * 4),
}
_GRID = {"image_grid_thw": [[1, 4, 4]]}
# Grids of features, of models with positions in time, height and width.
_MERGED = {"qwen3_5": (1, 2, 2), "qwen3_5_moe": (1, 2, 2)}
_GRIDS: dict[str, dict[str, Any]] = {
    "exaone4_5": _GRID,
    "lfm2_vl": {"spatial_shapes": [[4, 4]], "pixel_attention_mask": [[1] * 16]},
    "lighton_ocr": {"image_sizes": [[16, 16]]},
    "llava_next": {"image_sizes": [[16, 32]]},
    "llava_next_video": {"image_sizes": [[16, 32]]},
    "qwen3_5": _GRID,
    "qwen3_5_moe": _GRID,
    "video_llama_3": {**_GRID, "image_merge_sizes": [2]},
}


def features_of(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> int:
    """Number of an image's features."""
    size = model.config.get_text_config().hidden_size
    with torch.no_grad():
        inner = getattr(model, "model", model)
        method = getattr(inner, "get_image_features", None) or model.get_image_features
        output = method(**inputs)
    features = getattr(output, "pooler_output", output)
    if features is None:
        return output.last_hidden_state.numel() // output.last_hidden_state.shape[-1]
    features = features if isinstance(features, list | tuple) else [features]
    return sum(one.numel() for one in features) // size


def compare(model_type: str, folder: Path) -> None:
    """Run a tiny model of this type, which is saved to the folder. Raises AssertionError for a wrong answer."""
    config = tiny_config(model_type)
    oracle = tiny_model(model_type, config)
    save_checkpoint(oracle, folder)
    inputs = image_inputs(model_type, config)
    count = features_of(oracle, inputs)
    token_ids = [5, 6, *[_IMAGE] * count, 7, 8, 9]
    item = MediaItem(
        modality="image",
        runs=(Run(start=2, length=count, grid=_MERGED.get(model_type)),),
        key="image",
        inputs={name: ArrayBytes.of(values.numpy()) for name, values in inputs.items()},
    )
    core = make_core(folder, **_OPTIONS)
    try:
        results = _answers(core, token_ids, Parts.of([MediaPart(items=[item])]))
    finally:
        core.close()
    assert results.error is None, results.error
    tokens = results.tokens
    if _IMAGE in tokens:  # as which Transformers would take it
        tokens = tokens[: tokens.index(_IMAGE) + 1]
    expected = _expected(oracle, token_ids, tokens, inputs)
    errors = [float(row.max() - row[token]) for row, token in zip(expected, tokens, strict=True)]
    for row, logprobs in zip(expected, results.logprobs, strict=False):
        errors += [abs(float(row[token]) - value) for token, value in logprobs.items()]
    assert_within_rounding(errors, lambda: _rounding_of(oracle, expected, token_ids, tokens, inputs))


def _rounding_of(
    oracle: PreTrainedModel, narrow: Tensor, token_ids: list[int], tokens: list[int], inputs: Mapping[str, Tensor]
) -> float:
    wide_inputs = {name: values.double() if values.is_floating_point() else values for name, values in inputs.items()}
    return float((narrow - _expected(in_float64(oracle), token_ids, tokens, wide_inputs)).abs().max())


def _expected(oracle: PreTrainedModel, token_ids: list[int], tokens: list[int], inputs: Mapping[str, Tensor]) -> Tensor:
    """Log-probabilities before each of these tokens: float64 [tokens, vocabulary]."""
    rows = []
    with torch.no_grad():
        for index in range(len(tokens)):
            ids = torch.tensor([[*token_ids, *tokens[:index]]])
            types = (ids == _IMAGE).to(torch.int64)
            rows.append(torch.log_softmax(_logits(oracle, ids, types, inputs)[0, -1].double(), -1))
    return torch.stack(rows)


def _logits(model: PreTrainedModel, ids: Tensor, types: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    if model.config.model_type == "llama4":  # whose own forward pass fails in some versions of Transformers
        features = model.multi_modal_projector(model.get_image_features(**inputs).last_hidden_state.flatten(0, -2))
        rows = model.get_input_embeddings()(ids)
        rows = rows.masked_scatter((ids == _IMAGE)[..., None], features)
        return model.language_model(inputs_embeds=rows, use_cache=False).logits
    names = inspect.signature(model.forward).parameters
    given = {name: types for name in ("token_type_ids", "mm_token_type_ids") if name in names}
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), **given, **inputs, use_cache=False).logits


def _answers(core: EngineCore, token_ids: list[int], parts: Parts) -> Result:
    results: dict[str, Result] = {}
    add(core, "r", token_ids, greedy(_NUM_TOKENS, logprobs=3), parts=parts)
    finish(core, results)
    return results["r"]
