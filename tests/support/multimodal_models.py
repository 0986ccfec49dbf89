"""Small random multimodal models of Transformers, with the published layout of their configurations."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from penstock.config import EngineConfig
from penstock.contract import Parts, part_of
from penstock.features.multimodal.inputs.request_media import LoadedPrompt, request_media
from penstock.features.multimodal.messages import MediaItem, MediaPart
from penstock.media.loader import MediaLoader
from penstock.text.tokenizer import load_tokenizer
from support.checkpoints import VOCAB_SIZE, save_checkpoint
from support.transformers_models import TINY, randomise

_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}
_TEXT = {**TINY, "head_dim": 16}
# Ids of special tokens at the end of the vocabulary.
IMAGE, VIDEO, VISION_START, VISION_END = VOCAB_SIZE - 1, VOCAB_SIZE - 2, VOCAB_SIZE - 3, VOCAB_SIZE - 4
AUDIO_ID = VOCAB_SIZE - 9
_QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_PARTIAL_SECTIONS = {**_SECTIONS, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
_DELTA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_QWEN_VISION = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}

# By name: model type, text configuration, vision configuration, and other fields.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2-vl": (
        "qwen2_vl",
        {"rope_parameters": _SECTIONS},
        {**_QWEN_VISION, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        _QWEN_IDS,
    ),
    "qwen2.5-vl": (
        "qwen2_5_vl",
        {"rope_parameters": _SECTIONS},
        {
            **_QWEN_VISION,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "window_size": 16,
            "tokens_per_second": 1,
            "fullatt_block_indexes": [1],
        },
        _QWEN_IDS,
    ),
    "qwen3-vl": (
        "qwen3_vl",
        {"rope_parameters": {**_SECTIONS, "mrope_interleaved": True}},
        {
            **_QWEN_VISION,
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        _QWEN_IDS,
    ),
    "qwen3.5": (
        "qwen3_5",
        {
            **_DELTA,
            "rope_parameters": {**_PARTIAL_SECTIONS, "mrope_interleaved": True},
        },
        {
            **_QWEN_VISION,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
        },
        _QWEN_IDS,
    ),
    "gemma3": (
        "gemma3",
        {"num_hidden_layers": 6, "sliding_window": 8, "query_pre_attn_scalar": 16},
        _VISION,
        {"mm_tokens_per_image": 4, "image_token_index": IMAGE},
    ),
    "llava": (
        "llava",
        {"model_type": "llama"},
        {**_VISION, "model_type": "clip_vision_model"},
        {"image_token_index": IMAGE},
    ),
    "llava-next": (
        "llava_next",
        {"model_type": "llama"},
        {**_VISION, "model_type": "clip_vision_model"},
        {"image_token_index": IMAGE, "image_grid_pinpoints": [[16, 48], [32, 16]]},
    ),
    "llava-onevision": (
        "llava_onevision",
        {"model_type": "qwen2"},
        {**_VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
        {
            "image_token_index": IMAGE,
            "video_token_index": VIDEO,
            "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16]],
            "vision_aspect_ratio": "anyres_max_9",
        },
    ),
    "smolvlm": ("smolvlm", {"model_type": "llama"}, _VISION, {"image_token_id": IMAGE, "scale_factor": 2}),
    "mistral3": (
        "mistral3",
        {"model_type": "mistral", "sliding_window": None},
        {**_VISION, "model_type": "pixtral", "head_dim": 16},
        {"image_token_index": IMAGE, "spatial_merge_size": 2},
    ),
    "pixtral": (
        "llava",
        {"model_type": "llama"},
        {**_VISION, "model_type": "pixtral", "head_dim": 16},
        {"image_token_index": IMAGE, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "internvl": (
        "internvl",
        {"model_type": "qwen2"},
        {**_VISION, "patch_size": [4, 4], "image_size": [16, 16]},
        {"image_token_id": IMAGE},
    ),
    "llama4": (
        "llama4",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 2,
            "intermediate_size_mlp": 64,
            "attention_chunk_size": 8,
        },
        {**_VISION, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        {"image_token_index": IMAGE},
    ),
}

# Classes of the families with audio.
AUDIO = {
    "qwen2-audio": "Qwen2AudioForConditionalGeneration",
    "voxtral": "VoxtralForConditionalGeneration",
    "audioflamingo3": "AudioFlamingo3ForConditionalGeneration",
    "glmasr": "GlmAsrForConditionalGeneration",
}
# Windows of 2 s: 100 positions.
_WHISPER = {
    "d_model": 32,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "encoder_layers": 2,
    "num_mel_bins": 16,
    "max_source_positions": 100,
}
_WHISPER_RENAMED = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_mel_bins": 16,
    "max_source_positions": 100,
    "max_position_embeddings": 100,
}
FAMILIES |= {
    "qwen2-audio": ("qwen2_audio", {"model_type": "qwen2"}, _WHISPER, {"audio_token_index": AUDIO_ID}),
    "voxtral": ("voxtral", {"model_type": "llama"}, _WHISPER, {"audio_token_id": AUDIO_ID}),
    "audioflamingo3": ("audioflamingo3", {"model_type": "qwen2"}, _WHISPER_RENAMED, {"audio_token_id": AUDIO_ID}),
    "glmasr": ("glmasr", {"model_type": "llama"}, _WHISPER_RENAMED, {"audio_token_id": AUDIO_ID}),
}


def tiny_multimodal_model(name: str, *, seed: int = 0, **text: Any) -> PreTrainedModel:
    """A small model with random weights. text: fields of the language model's configuration."""
    model_type, of_text, vision, other = FAMILIES[name]
    fields = {**_TEXT, **of_text, **text}
    parts = {"audio_config" if name in AUDIO else "vision_config": dict(vision)}
    config = transformers.AutoConfig.for_model(
        model_type, text_config=fields, **parts, tie_word_embeddings=False, **other
    )
    if name in AUDIO:
        return randomise(getattr(transformers, AUDIO[name])(config), seed)
    mapping = transformers.AutoModelForImageTextToText._model_mapping
    return randomise(mapping[type(config)]._from_config(config), seed)


# Special tokens by their ids.
SPECIAL_TOKENS = {
    IMAGE: "<image>",
    VIDEO: "<video>",
    VISION_START: "<vision_start>",
    VISION_END: "<vision_end>",
    VOCAB_SIZE - 5: "<fake_token_around_image>",
    VOCAB_SIZE - 6: "<global-img>",
    VOCAB_SIZE - 7: "<row_1_col_1>",
    VOCAB_SIZE - 8: "[IMG_BREAK]",
    AUDIO_ID: "<audio>",
}
_NAMED_TOKENS = {
    "image_token": "<image>",
    "video_token": "<video>",
    "audio_token": "<audio>",
    "vision_start_token": "<vision_start>",
    "vision_end_token": "<vision_end>",
    "boi_token": "<vision_start>",
    "eoi_token": "<vision_end>",
    "start_image_token": "<vision_start>",
    "end_image_token": "<vision_end>",
    "context_image_token": "<image>",
}
_QWEN_IMAGES = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
_SQUARE = {"height": 16, "width": 16}
# By name: files of the processor.
PROCESSORS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen2-vl": {
        "preprocessor_config": {
            **_QWEN_IMAGES,
            "image_processor_type": "Qwen2VLImageProcessor",
            "min_pixels": 64,
            "max_pixels": 1600,
        }
    },
    "qwen3-vl": {
        "preprocessor_config": {
            **_QWEN_IMAGES,
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"shortest_edge": 64, "longest_edge": 1600},
        }
    },
    "gemma3": {
        "preprocessor_config": {"image_processor_type": "Gemma3ImageProcessor", "size": _SQUARE},
        "processor_config": {"image_seq_length": 4},
    },
    "llava": {
        "preprocessor_config": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 16},
            "crop_size": _SQUARE,
        },
        "processor_config": {
            "patch_size": 4,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    },
    "llava-next": {
        "preprocessor_config": {
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 16},
            "crop_size": _SQUARE,
            "image_grid_pinpoints": [[16, 48], [32, 16]],
        },
        "processor_config": {
            "patch_size": 4,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    },
    "llava-onevision": {
        "preprocessor_config": {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": _SQUARE,
            "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16]],
        },
        "video_preprocessor_config": {"size": _SQUARE},
        "processor_config": {
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_9",
        },
    },
    "smolvlm": {
        "preprocessor_config": {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 32},
            "max_image_size": {"longest_edge": 16},
            "do_image_splitting": True,
        },
        "processor_config": {"image_seq_len": 4},
    },
    "internvl": {
        "preprocessor_config": {"image_processor_type": "GotOcr2ImageProcessor", "size": _SQUARE, "max_patches": 4},
        "processor_config": {"image_seq_length": 4},
    },
}
PROCESSORS["mistral3"] = {
    "preprocessor_config": {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 32}},
    "processor_config": {
        "patch_size": 4,
        "spatial_merge_size": 2,
        "image_token": "<image>",
        "image_end_token": "<vision_end>",
    },
}
_SPECTROGRAMS = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "chunk_length": 2}
PROCESSORS |= {
    name: {"preprocessor_config": _SPECTROGRAMS, "processor_config": {"audio_token": "<audio>"}} for name in AUDIO
}
PROCESSORS["qwen2.5-vl"] = PROCESSORS["qwen2-vl"]
MODEL_TYPES = {name: name.replace("-", "_").replace(".", "_") for name in PROCESSORS}
# Text in the place of an image.
PLACEHOLDERS = dict.fromkeys(("qwen2-vl", "qwen2.5-vl", "qwen3-vl"), "<vision_start> <image> <vision_end>")
PLACEHOLDERS["gemma3"] = "<vision_start>"


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of smooth random colours."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (3, 3, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def film(num_frames: int, width: int, height: int, seed: int = 0) -> np.ndarray:
    """A video of smooth random colours, uint8 [F, H, W, 3]."""
    return np.stack([np.asarray(picture(width, height, seed + number)) for number in range(num_frames)])


def tone(seconds: float, pitch: float = 440.0) -> np.ndarray:
    """A tone that grows louder, float32 [N] at 16 kHz."""
    times = np.arange(int(16000 * seconds)) / 16000
    return (np.sin(2 * np.pi * pitch * times) * times / seconds).astype(np.float32)


def words(*ids: int) -> str:
    """A text of these tokens."""
    return " ".join(f"w{token_id}" for token_id in ids)


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Write a tokenizer of one token per word, with the special tokens of media."""
    vocabulary = {SPECIAL_TOKENS.get(token_id, f"w{token_id}"): token_id for token_id in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="w0",
        # Some processors pad, though a single text needs none.
        pad_token="<global-img>",
        additional_special_tokens=list(SPECIAL_TOKENS.values()),
        extra_special_tokens=_NAMED_TOKENS,
    )
    made.save_pretrained(folder)
    return made


def save_multimodal(folder: Path, name: str, **text: Any) -> PreTrainedModel:
    """Write a small model with its tokenizer and processor."""
    model = tiny_multimodal_model(name, **text)
    save_checkpoint(model, folder)
    save_tokenizer(folder)
    write_processor(folder, name)
    return model


def write_processor(folder: Path, name: str) -> None:
    """Write the files of a family's processor."""
    for file, content in PROCESSORS[name].items():
        (folder / f"{file}.json").write_text(json.dumps(content))


def saved_tensor(value: Any, **options: Any) -> str:
    """Base64 of what `torch.save` writes."""
    file = io.BytesIO()
    torch.save(value, file, **options)
    return base64.b64encode(file.getvalue()).decode()


@dataclass
class MediaPrompt:
    """A prompt as engines get it. items: its images."""

    token_ids: list[int]
    parts: Parts | None = None

    @property
    def items(self) -> list[MediaItem]:
        part = part_of(self.parts, MediaPart)
        return [] if part is None else part.items


def expanded(
    folder: Path, prompts: Sequence[tuple[str, Sequence[Image.Image]]], uuids: Sequence[str | None] = ()
) -> list[MediaPrompt]:
    """Texts with their images as the input processor makes them. uuids: names of each prompt's images."""
    tokenizer = load_tokenizer(folder)
    media = request_media(EngineConfig.create(str(folder), fast_paths="auto"), tokenizer)
    assert media is not None
    loader = MediaLoader()
    made = []
    for text, images in prompts:
        loaded = [loader.load("image", image, "image") for image in images]
        if not images:
            made.append(MediaPrompt(tokenizer.encode(text)))
            continue
        items = list(zip_longest(loaded, uuids))
        token_ids, part = media.expand(LoadedPrompt(items, {}, text, None), tokenizer.encode)
        made.append(MediaPrompt(token_ids, Parts.of([part])))
    return made
