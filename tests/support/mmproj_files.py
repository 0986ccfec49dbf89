"""GGUF files of small random multimodal models: a language model, and its encoder of images (mmproj).

Names are those of the package gguf; layouts are those that llama.cpp's converter gives them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedModel

from support.checkpoints import VOCAB_SIZE
from support.gguf_files import add, finish, write_gguf
from support.multimodal_models import IMAGE, VIDEO, VISION_END, VISION_START, tiny_multimodal_model

# By name of a family: architecture of its language model, class of such a model, and kind of projector.
KINDS = {
    "qwen2-vl": ("qwen2vl", "Qwen2ForCausalLM", "qwen2vl_merger"),
    "qwen2.5-vl": ("qwen2vl", "Qwen2ForCausalLM", "qwen2.5vl_merger"),
    "gemma3": ("gemma3", "Gemma3ForCausalLM", "gemma3"),
    "smolvlm": ("llama", "LlamaForCausalLM", "idefics3"),
    "llava": ("llama", "LlamaForCausalLM", "mlp"),
    "llava-next": ("llama", "LlamaForCausalLM", "mlp"),
    "pixtral": ("llama", "LlamaForCausalLM", "pixtral"),
    "mistral3": ("llama", "LlamaForCausalLM", "pixtral"),
}
_QWEN = {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>", VISION_START: "<|vision_start|>", VISION_END: "<|vision_end|>"}
_PIXTRAL = {IMAGE: "[IMG]", VOCAB_SIZE - 8: "[IMG_BREAK]", VISION_END: "[IMG_END]"}
_TOKENS = {
    "qwen2-vl": _QWEN,
    "qwen2.5-vl": _QWEN,
    "gemma3": {IMAGE: "<image_soft_token>", VISION_START: "<start_of_image>", VISION_END: "<end_of_image>"},
    "smolvlm": {
        IMAGE: "<image>",
        VOCAB_SIZE - 5: "<fake_token_around_image>",
        VOCAB_SIZE - 6: "<global-img>",
        VOCAB_SIZE - 7: "<row_1_col_1>",
    },
    "llava": {IMAGE: "<image>"},
    "llava-next": {IMAGE: "<image>"},
    "pixtral": _PIXTRAL,
    "mistral3": _PIXTRAL,
}
# Their converter wrote no layer behind the features.
_LLAVA = ("llava", "llava-next")
# Text in the place of an image.
PLACEHOLDERS = {
    "qwen2-vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen2.5-vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "pixtral": "[IMG]",
    "mistral3": "[IMG]",
}
# Fields that the family's `preprocessor_config.json` of the tests has.
_OF_IMAGES: dict[str, dict[str, Any]] = {
    "qwen2-vl": {"image_min_pixels": 64, "image_max_pixels": 1600},
    "qwen2.5-vl": {"image_min_pixels": 64, "image_max_pixels": 1600, "window_size": 16, "n_wa_pattern": 2},
    "llava-next": {"image_grid_pinpoints": [16, 48, 32, 16]},
    "smolvlm": {"preproc_image_size": 32},
    "pixtral": {"image_size": 32},
    "mistral3": {"image_size": 32, "spatial_merge_size": 2},
}


def words(*ids: int) -> str:
    """A text of these tokens."""
    return "".join(f"<w{token_id}>" for token_id in ids)


def write_language_model(
    model: PreTrainedModel,
    name: str,
    path: Path,
    kind: Type = Type.F32,
    named: dict[int, str] | None = None,
    **changes: Any,
) -> Path:
    """Write the language model of a family's model, which then has the file's values.

    named: texts of special tokens, by their ids. changes: see write_gguf.
    """
    family, architecture, _ = KINDS[name]
    text = model.config.get_text_config()
    fields = {field: value for field, value in text.to_dict().items() if field not in ("model_type", "architectures")}
    alone = getattr(transformers, architecture)._from_config(
        getattr(transformers, architecture).config_class(**{**fields, "tie_word_embeddings": False})
    )
    state = {
        **{f"model.{key}": value for key, value in model.model.get_decoder().state_dict().items()},
        "lm_head.weight": model.get_output_embeddings().weight.detach(),
    }
    alone.load_state_dict(state, assign=True)
    named = _TOKENS[name] if named is None else named
    first = ["t", "1", "t1", "\u010a"]
    tokens = [*first, *(named.get(token_id, f"<w{token_id}>") for token_id in range(len(first), VOCAB_SIZE))]
    given = {"qwen2vl.rope.dimension_sections": [2, 3, 3, 0]} if family == "qwen2vl" else {}
    return write_gguf(alone, family, path, kind, {**given, **changes}, tokens)


def write_encoder(
    model: PreTrainedModel, name: str, path: Path, kind: Type = Type.F32, *, old_names: bool = False, **changes: Any
) -> Path:
    """Write the encoder of a family's model. kind: type of matrices, whose values the model then has, too.

    old_names: whether the matrices of feed-forward networks have each other's names, as in old files.
    """
    writer = gguf.GGUFWriter(path, "clip")
    for key, value in {**_fields(model, name), **changes}.items():
        add(writer, key, value)
    for stored, weight in _tensors(model, name):
        if old_names and ".ffn_" in stored:
            stored = stored.replace("ffn_up", "ffn_u").replace("ffn_down", "ffn_up").replace("ffn_u.", "ffn_down.")
        values = weight.contiguous().numpy()
        is_matrix = weight.dim() == 2 and ".ffn_" in stored and weight.shape[1] % 32 == 0
        if not is_matrix or kind == Type.F32:
            writer.add_tensor(stored, values)
            continue
        blocks = gguf.quants.quantize(values, kind)
        weight.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, kind).astype(np.float32)))
        writer.add_tensor(stored, blocks, raw_dtype=kind)
    finish(writer)
    return path


def _vision_config(model: PreTrainedModel) -> Any:
    return model.config.vision_config


def _fields(model: PreTrainedModel, name: str) -> dict[str, Any]:
    vision, kind = model.config.vision_config, KINDS[name][2]
    is_qwen = name.startswith("qwen")
    width = getattr(vision, "embed_dim", None) if name == "qwen2-vl" else vision.hidden_size
    sizes = {
        "block_count": vision.depth if is_qwen else vision.num_hidden_layers - (name in _LLAVA),
        "embedding_length": width,
        "feed_forward_length": 64 if name == "qwen2-vl" else vision.intermediate_size,
        "attention.head_count": vision.num_heads if is_qwen else vision.num_attention_heads,
        "attention.layer_norm_epsilon": 1e-6 if is_qwen else float(getattr(vision, "layer_norm_eps", 1e-5)),
        "projection_dim": model.config.get_text_config().hidden_size,
        "patch_size": vision.patch_size,
        "image_size": 560 if is_qwen else vision.image_size,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.2, 0.25, 0.3],
    }
    if name == "gemma3":  # 4 tokens of 4 x 4 patches
        sizes["projector.scale_factor"] = 2
    sizes |= _OF_IMAGES.get(name, {})
    activation = {"qwen2-vl": {}, "llava": {}, "llava-next": {}, "qwen2.5-vl": {"clip.use_silu": True}}
    return {
        "clip.projector_type": kind,
        "clip.has_vision_encoder": True,
        **activation.get(name, {"clip.use_gelu": True}),
        **{f"clip.vision.{key}": value for key, value in sizes.items()},
    }


def _tensors(model: PreTrainedModel, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the file: parts of the model's own, where these need not be changed."""
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
    last = f".layers.{model.config.vision_config.num_hidden_layers - 1}." if name in _LLAVA else None
    for own, weight in model.state_dict().items():
        published = _published(own, name)
        if published is None or (last is not None and (last in own or "post_layernorm" in own)):
            continue
        if "image_newline" in own:
            yield "model.image_newline", weight
        elif ".patch_embed.proj." in own:
            yield "v.patch_embd.weight", weight[:, :, 0]
            yield "v.patch_embd.weight.1", weight[:, :, 1]
        elif ".qkv." in own:
            for letter, part in zip("qkv", weight.chunk(3), strict=True):
                yield _stored(known, published.replace("qkv", letter)), part
        elif name in ("pixtral", "mistral3") and own.split(".")[-2] in ("q_proj", "k_proj"):
            heads = model.config.vision_config.num_attention_heads
            yield _stored(known, published), weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).flatten(0, 2)
        elif own.endswith("mm_soft_emb_norm.weight"):
            yield _stored(known, published), weight + 1
        else:
            yield _stored(known, published), weight


def _stored(known: Any, published: str) -> str:
    stored = known.get_name(published, try_suffixes=(".weight", ".bias"))
    assert stored is not None, published
    # This one has no suffix, as in all such files.
    return stored.removesuffix(".weight") if "class_embd" in stored else stored


def _published(own: str, name: str) -> str | None:
    """Name of a tensor in the checkpoints that are converted; None for one that no file has."""
    if "language_model" in own or "text_model" in own or own.startswith("lm_head") or ".vision_tower.head." in own:
        return None
    own = own.removeprefix("model.")
    if name == "smolvlm":
        return f"model.{own}"
    if name in ("gemma3", *_LLAVA):
        own = own.replace("vision_tower.", "vision_tower.vision_model.")
    own = own.replace("mm_input_projection_weight", "mm_input_projection.weight")
    return own.replace("linear_1", "linear_0") if name in _LLAVA else own


def write_files(
    folder: Path, name: str, model: Type = Type.F32, encoder: Type = Type.F32, **text: Any
) -> PreTrainedModel:
    """Write both files of a small model, and return it. model, encoder: types of their matrices."""
    made = tiny_multimodal_model(name, **text)
    with torch.no_grad():
        write_language_model(made, name, folder / f"{name}-Q8_0.gguf", model)
        write_encoder(made, name, folder / f"mmproj-{name}-f16.gguf", encoder)
    return made
