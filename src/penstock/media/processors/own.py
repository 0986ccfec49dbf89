"""Processors in the place of those of Transformers that need other packages: torchvision, or mistral_common.

Each has the parts and the call of Transformers' class, and takes the fields of processor_config.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

# Id of Voxtral's token that takes the encoder's features, and frames of a spectrogram for each of them.
_TOKEN_ID = 24
_FRAMES_PER_TOKEN = 8


class PixtralProcessor:
    """Processor of Pixtral and Mistral 3: an image is rows of tokens, with a token after each row.

    Agrawal et al. 2024, https://arxiv.org/abs/2410.07073, section 2.2.
    """

    parts = ("image_processor", "tokenizer")

    def __init__(self, image_processor: Any, tokenizer: Any, fields: Mapping[str, Any]) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self._square = int(fields.get("patch_size", 16)) * int(fields.get("spatial_merge_size", 1))
        self.image_token = str(fields.get("image_token", "[IMG]"))
        self._break = str(fields.get("image_break_token", "[IMG_BREAK]"))
        self._end = str(fields.get("image_end_token", "[IMG_END]"))

    def __call__(self, text: Sequence[str], images: Sequence[Any] = (), *, return_tensors: str, **options: Any) -> Any:
        """Tokens of texts with their images, and the encoder's inputs."""
        options = {"patch_size": self._square, **options}
        made = self.image_processor(list(images), return_tensors=return_tensors, **options) if images else {}
        texts = _expanded(text, self.image_token, (self._tokens(*size) for size in made.get("image_sizes", ())))
        return {**self.tokenizer(texts, return_tensors=return_tensors), **made}

    def _tokens(self, height: Any, width: Any) -> str:
        """Tokens of an image of this size in pixels."""
        row = self.image_token * (int(width) // self._square) + self._break
        return (row * (int(height) // self._square)).removesuffix(self._break) + self._end


class VoxtralProcessor:
    """Processor of Voxtral: a clip is windows of 30 s, the last of which is filled with silence.

    Liu et al. 2025, https://arxiv.org/abs/2507.13264, section 2.
    """

    parts = ("feature_extractor", "tokenizer")

    def __init__(self, feature_extractor: Any, tokenizer: Any, fields: Mapping[str, Any]) -> None:
        self.feature_extractor, self.tokenizer = feature_extractor, tokenizer
        named = getattr(tokenizer, "audio_token", None) or fields.get("audio_token")
        self.audio_token = str(named or tokenizer.convert_ids_to_tokens(_TOKEN_ID))

    def __call__(self, text: Sequence[str], audio: Sequence[Any] = (), *, return_tensors: str, **options: Any) -> Any:
        """Tokens of texts with their clips, and the windows of all clips."""
        windows = [self._windows(samples, options) for samples in audio]
        clips = (self.audio_token * (len(one) * one.shape[2] // _FRAMES_PER_TOKEN) for one in windows)
        features = {"input_features": torch.cat(windows)} if windows else {}
        texts = _expanded(text, self.audio_token, clips)
        return {**self.tokenizer(texts, return_tensors=return_tensors), **features}

    def _windows(self, samples: Any, options: Mapping[str, Any]) -> torch.Tensor:
        """Log-mel spectrograms, [windows, bins, frames]."""
        reader = self.feature_extractor
        fixed = {"padding": True, "truncation": False, "pad_to_multiple_of": reader.n_samples, "return_tensors": "pt"}
        made = reader(samples, **{"sampling_rate": reader.sampling_rate, **options}, **fixed)
        frames: torch.Tensor = made["input_features"]
        return frames.reshape(reader.feature_size, -1, reader.nb_max_frames).transpose(0, 1)


def _expanded(texts: Iterable[str], placeholder: str, items: Iterable[str]) -> list[str]:
    """Texts with the next item's tokens in the place of each placeholder."""
    waiting = iter(items)
    return [re.sub(re.escape(placeholder), lambda _: next(waiting), text) for text in texts]
