"""Configuration and processor of a multimodal model from two GGUF files: a language model, and its encoder of images.

llama.cpp calls the second an mmproj file. It has no fields for what all published models of a kind share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.checkpoints.gguf.fields import Metadata
from penstock.errors import ModelError, UnsupportedFeature, UnsupportedModel

# Architecture of the files with an encoder of images or audio, of all families.
ENCODERS = "clip"
_TOKENS = "tokenizer.ggml.tokens"
# Fields of the language model's `config.json` that are those of the whole.
_SHARED = ("dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
# Sides of the squares of patches that are one token.
_QWEN_MERGE, _GEMMA3_POOL, _IDEFICS3_SCALE = 2, 4, 2
# Qwen-VL: limits of an image's pixels, and the sides of a window of Qwen2.5-VL.
_MIN_PIXELS, _MAX_PIXELS, _WINDOW = 56 * 56, 28 * 28 * 16384, 112


@dataclass(frozen=True, slots=True)
class WholeModel:
    """Files of a model folder that describe a language model with its encoder.

    config: of `config.json`. processor: content of the processor's files by name. tokens: names that the processor has
    for tokens, and their texts.
    """

    config: dict[str, Any]
    processor: dict[str, dict[str, Any]]
    tokens: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Files:
    """Metadata of the encoder and of the language model."""

    encoder: Metadata
    model: Metadata


@dataclass(frozen=True, slots=True)
class _Part:
    """Fields that one kind of projector adds.

    config: beside `vision_config`. images, whole: of the image processor, and of the processor. text: changes of
    `text_config`.
    """

    architecture: str
    model_type: str
    vision: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    images: dict[str, Any] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)
    text: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of projector.

    models: architectures of the language models that it is made for; empty for all. tokens: texts of the tokens that it
    needs, by their names in the processor. ids: fields of `config.json` with the id of such a token.
    """

    read: Callable[[_Files], _Part]
    models: tuple[str, ...]
    tokens: Mapping[str, str]
    ids: Mapping[str, str]


def whole_model(encoder: Metadata, model: Metadata, text: Mapping[str, Any]) -> WholeModel:
    """Files of the model of both. text: `config.json` of the language model.

    Raises UnsupportedModel for a kind of projector that does not run, or that is not made for this language model;
    UnsupportedFeature and ModelError for fields as `hf_config_of` does.
    """
    kind = _KINDS[kind_of(encoder)]
    _check_fit(encoder, model, text, kind)
    part = kind.read(_Files(encoder, model))
    tokens = _tokens_of(encoder, model, kind)
    known = model.list_of(_TOKENS, str) or []
    config = {
        **{name: text[name] for name in _SHARED if name in text},
        "architectures": [part.architecture],
        "model_type": part.model_type,
        "text_config": {**{name: value for name, value in text.items() if name != "architectures"}, **part.text},
        "vision_config": part.vision,
        **part.config,
        **{name: known.index(tokens[token]) for name, token in kind.ids.items()},
    }
    given = {"image_mean": encoder.list_of(".vision.image_mean", float)}
    given["image_std"] = encoder.list_of(".vision.image_std", float)
    images = {**{name: value for name, value in given.items() if value is not None}, **part.images}
    return WholeModel(config, {"preprocessor_config.json": images, "processor_config.json": part.whole}, tokens)


def kind_of(encoder: Metadata) -> str:
    """Kind of a file's projector. Raises UnsupportedModel for one that does not run."""
    if encoder.architecture != ENCODERS:
        raise UnsupportedModel(
            f"{encoder.name} has general.architecture={encoder.architecture!r}. It must be {ENCODERS!r}, which files "
            "with an encoder of images have (mmproj files)."
        )
    kind = encoder.get("clip.projector_type", str) or encoder.get("clip.vision.projector_type", str) or "mlp"
    if kind not in _KINDS:
        raise UnsupportedModel(
            f"{encoder.name} has clip.projector_type={kind!r}, which does not run here. Supported: "
            f"{', '.join(sorted(_KINDS))}. Take the model's safetensors, if docs/models.md lists it."
        )
    return str(kind)


def heads_of(encoder: Metadata) -> int:
    """Attention heads of the encoder."""
    return encoder.size(".vision.attention.head_count")


def tiles_of(encoder: Metadata) -> list[list[int]]:
    """Sizes of images in tiles, height and width, of LLaVA-NeXT; none of LLaVA 1.5."""
    sides = encoder.list_of(".vision.image_grid_pinpoints", int) or []
    return [sides[index : index + 2] for index in range(0, len(sides), 2)]


def has_old_names(encoder: Metadata) -> bool:
    """Whether the two matrices of feed-forward networks have each other's names, as in files of 2023 to 2025."""
    down = encoder.tensors.get("v.blk.0.ffn_down.weight")
    return down is not None and len(down.shape) == 2 and down.shape[0] != down.shape[1] == _width(encoder)


def _width(encoder: Metadata) -> int:
    return encoder.size(".vision.embedding_length")


def _check_fit(encoder: Metadata, model: Metadata, text: Mapping[str, Any], kind: _Kind) -> None:
    if kind.models and model.architecture not in kind.models:
        raise UnsupportedModel(
            f"{encoder.name} (clip.projector_type={kind_of(encoder)!r}) is made for language models of the "
            f"architecture {' or '.join(kind.models)}, and {model.name} is of {model.architecture!r}."
        )
    last = _projection(encoder)
    if last is not None and last != text.get("hidden_size"):
        raise UnsupportedModel(
            f"{encoder.name} makes features of {last} values, and {model.name} takes {text.get('hidden_size')} "
            "(embedding_length). They are of different models."
        )


def _projection(encoder: Metadata) -> int | None:
    """Size of the features; None for a file without a known last matrix."""
    if "mm.input_projection.weight" in encoder.tensors:  # stored with its inputs first
        return encoder.tensors["mm.input_projection.weight"].shape[-1]
    for name in ("mm.2.weight", "mm.model.fc.weight"):
        if name in encoder.tensors:
            return encoder.num_rows(name)
    return None


def _tokens_of(encoder: Metadata, model: Metadata, kind: _Kind) -> dict[str, str]:
    """Texts of the tokens that the processor needs. Raises UnsupportedModel for a language model without one."""
    known = model.list_of(_TOKENS, str) or []
    unknown: int | None = model.get("tokenizer.ggml.unknown_token_id", int)
    texts = {}
    for name, text in kind.tokens.items():
        # LLaVA's files for llama.cpp have no token of images: an item's rows take any token's places.
        is_plain = kind is _KINDS["mlp"] and unknown is not None and 0 <= unknown < len(known)
        texts[name] = known[unknown] if text not in known and is_plain and unknown is not None else text
        if texts[name] not in known:
            raise UnsupportedModel(
                f"{model.name} has no token {text}, in whose places the features of {encoder.name} go. Take another "
                "conversion of the model."
            )
    return texts


def _vision(encoder: Metadata, activation: str) -> dict[str, Any]:
    """Sizes of a tower. activation: where the file says GELU."""
    up = "v.blk.0.ffn_down.weight" if has_old_names(encoder) else "v.blk.0.ffn_up.weight"
    is_gelu, is_silu = (encoder.get(f".use_{name}", bool, False) for name in ("gelu", "silu"))
    return {
        "hidden_size": _width(encoder),
        "intermediate_size": encoder.num_rows(up),
        "num_hidden_layers": encoder.size(".vision.block_count"),
        "num_attention_heads": heads_of(encoder),
        "patch_size": encoder.size(".vision.patch_size"),
        "image_size": encoder.size(".vision.image_size"),
        "layer_norm_eps": encoder.required(".vision.attention.layer_norm_epsilon", float),
        "hidden_act": activation if is_gelu else "silu" if is_silu else "quick_gelu",
    }


def _qwen(files: _Files, architecture: str, model_type: str, **vision: Any) -> _Part:
    encoder, model = files.encoder, files.model
    tower = _vision(encoder, "gelu")
    merge = encoder.size(".vision.spatial_merge_size", _QWEN_MERGE)
    sections = model.list_of(".rope.dimension_sections", int)
    if sections is None or len(sections) < 3:
        raise ModelError(f"{model.name} has no rope.dimension_sections of three sizes. Convert the model again.")
    patches = {"patch_size": tower["patch_size"], "temporal_patch_size": 2}
    return _Part(
        architecture,
        model_type,
        {
            **patches,
            "spatial_merge_size": merge,
            "depth": tower["num_hidden_layers"],
            "num_heads": tower["num_attention_heads"],
            "hidden_act": tower["hidden_act"],
            **vision,
        },
        images={
            **patches,
            "image_processor_type": "Qwen2VLImageProcessor",
            "merge_size": merge,
            "min_pixels": encoder.size(".vision.image_min_pixels", _MIN_PIXELS),
            "max_pixels": encoder.size(".vision.image_max_pixels", _MAX_PIXELS),
        },
        text={
            "model_type": f"{model_type}_text",
            "rope_scaling": None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": model.get(".rope.freq_base", float, 10000.0),
                "mrope_section": sections[:3],
            },
        },
    )


def _qwen2(files: _Files) -> _Part:
    encoder, model = files.encoder, files.model
    tower = _vision(encoder, "gelu")
    sizes = {
        "embed_dim": tower["hidden_size"],
        "mlp_ratio": tower["intermediate_size"] // tower["hidden_size"],
        "hidden_size": model.size(".embedding_length"),
    }
    return _qwen(files, "Qwen2VLForConditionalGeneration", "qwen2_vl", **sizes)


def _qwen25(files: _Files) -> _Part:
    encoder, model = files.encoder, files.model
    tower = _vision(encoder, "gelu")
    pattern, depth = encoder.size(".vision.n_wa_pattern"), tower["num_hidden_layers"]
    sizes = {
        "hidden_size": tower["hidden_size"],
        "intermediate_size": tower["intermediate_size"],
        "out_hidden_size": model.size(".embedding_length"),
        "window_size": encoder.size(".vision.window_size", _WINDOW),
        "fullatt_block_indexes": list(range(pattern - 1, depth, pattern)),
        "tokens_per_second": 2,
    }
    return _qwen(files, "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", **sizes)


def _square(size: int) -> dict[str, int]:
    return {"height": size, "width": size}


def _gemma3(files: _Files) -> _Part:
    encoder = files.encoder
    vision = _vision(encoder, "gelu_pytorch_tanh")
    pool = encoder.size(".vision.projector.scale_factor", _GEMMA3_POOL)
    num_tokens = (vision["image_size"] // vision["patch_size"] // pool) ** 2
    return _Part(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        {**vision, "model_type": "siglip_vision_model", "vision_use_head": False},
        {"mm_tokens_per_image": num_tokens},
        {"image_processor_type": "Gemma3ImageProcessor", "size": _square(vision["image_size"])},
        {"image_seq_length": num_tokens},
    )


def _idefics3(files: _Files) -> _Part:
    encoder = files.encoder
    vision = _vision(encoder, "gelu_pytorch_tanh")
    scale, size = encoder.size(".vision.projector.scale_factor", _IDEFICS3_SCALE), vision["image_size"]
    return _Part(
        "SmolVLMForConditionalGeneration",
        "smolvlm",
        {**vision, "model_type": "smolvlm_vision"},
        {"scale_factor": scale},
        {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": encoder.size(".vision.preproc_image_size", 4 * size)},
            "max_image_size": {"longest_edge": size},
            "do_image_splitting": True,
        },
        {"image_seq_len": (size // vision["patch_size"] // scale) ** 2},
    )


def _llava(files: _Files) -> _Part:
    encoder = files.encoder
    vision = _vision(encoder, "gelu")
    if "v.class_embd" not in encoder.tensors:
        raise encoder.unsupported("a tower without v.class_embd", "clip.projector_type='mlp' with a tower of CLIP")
    size = vision["image_size"]
    layers = encoder.list_of(".vision.feature_layer", int) or vision["num_hidden_layers"]
    tiles = {"image_grid_pinpoints": tiles_of(encoder)} if tiles_of(encoder) else {}
    return _Part(
        f"Llava{'Next' * bool(tiles)}ForConditionalGeneration",
        "llava_next" if tiles else "llava",
        {**vision, "model_type": "clip_vision_model"},
        {"vision_feature_layer": layers, "vision_feature_select_strategy": "default", **tiles},
        {
            "image_processor_type": "LlavaNextImageProcessor" if tiles else "CLIPImageProcessor",
            "size": {"shortest_edge": size},
            "crop_size": _square(size),
            **tiles,
        },
        {
            "patch_size": vision["patch_size"],
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    )


def _pixtral(files: _Files) -> _Part:
    encoder = files.encoder
    vision = {**_vision(encoder, "gelu"), "model_type": "pixtral"}
    vision["rope_theta"] = encoder.get(".rope.freq_base", float, 10000.0)
    merge = encoder.size(".vision.spatial_merge_size", 1)
    merges = "mm.patch_merger.weight" in encoder.tensors
    return _Part(
        "Mistral3ForConditionalGeneration" if merges else "LlavaForConditionalGeneration",
        "mistral3" if merges else "llava",
        vision,
        {
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "multimodal_projector_bias": "mm.1.bias" in encoder.tensors,
            **({"spatial_merge_size": merge} if merges else {}),
        },
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": vision["image_size"]}},
        {
            "processor_class": "PixtralProcessor",
            "patch_size": vision["patch_size"],
            "spatial_merge_size": merge,
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        },
    )


_QWEN_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
_QWEN_IDS = {f"{name}_id": name for name in _QWEN_TOKENS}
_GEMMA3_TOKENS = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
}
_SMOLVLM_TOKENS = {"image_token": "<image>", "global_image_token": "<global-img>"}
_PIXTRAL_TOKENS = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
_IMAGE_ID, _IMAGE_INDEX = {"image_token_id": "image_token"}, {"image_token_index": "image_token"}
_KINDS: Mapping[str, _Kind] = {
    "gemma3": _Kind(_gemma3, ("gemma3",), _GEMMA3_TOKENS, {f"{name}_index": name for name in _GEMMA3_TOKENS}),
    "idefics3": _Kind(_idefics3, ("llama",), _SMOLVLM_TOKENS, _IMAGE_ID),
    "mlp": _Kind(_llava, (), {"image_token": "<image>"}, _IMAGE_INDEX),
    "pixtral": _Kind(_pixtral, ("llama",), _PIXTRAL_TOKENS, _IMAGE_INDEX),
    "qwen2.5vl_merger": _Kind(_qwen25, ("qwen2vl",), _QWEN_TOKENS, _QWEN_IDS),
    "qwen2vl_merger": _Kind(_qwen2, ("qwen2vl",), _QWEN_TOKENS, _QWEN_IDS),
}
# Errors of `whole_model`.
DOES_NOT_FIT = (UnsupportedModel, UnsupportedFeature, ModelError)
