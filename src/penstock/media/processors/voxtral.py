"""Processor of Voxtral: a clip is windows of 30 s, the last of which is filled with silence.

Liu et al. 2025, https://arxiv.org/abs/2507.13264, section 2. Transformers' class needs mistral_common for audio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

# Id of the token that takes the encoder's features, and frames of a spectrogram for each of them.
_TOKEN_ID = 24
_FRAMES_PER_TOKEN = 8


class VoxtralProcessor:
    """The feature extractor of Transformers, and the tokens of a clip. fields: of processor_config.json."""

    def __init__(self, parts: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
        self.tokenizer, self.feature_extractor = parts["tokenizer"], parts["feature_extractor"]
        named = getattr(self.tokenizer, "audio_token", None) or fields.get("audio_token")
        self.audio_token = str(named or self.tokenizer.convert_ids_to_tokens(_TOKEN_ID))

    def __call__(
        self, text: Sequence[str], audio: Sequence[Any] = (), *, return_tensors: str, **options: Any
    ) -> dict[str, Any]:
        """Tokens of texts, of which each placeholder becomes the next clip's, and the windows of all clips."""
        windows = [self._windows(samples, options) for samples in audio]
        texts = iter([self.audio_token * (len(one) * one.shape[2] // _FRAMES_PER_TOKEN) for one in windows])
        expanded = []
        for one in text:
            first, *others = one.split(self.audio_token)
            expanded.append(first + "".join(next(texts) + other for other in others))
        features = {"input_features": torch.cat(windows)} if windows else {}
        return {**self.tokenizer(expanded, return_tensors=return_tensors), **features}

    def _windows(self, samples: Any, options: Mapping[str, Any]) -> torch.Tensor:
        """Log-mel spectrograms, [windows, bins, frames]."""
        reader = self.feature_extractor
        fixed = {"padding": True, "truncation": False, "pad_to_multiple_of": reader.n_samples, "return_tensors": "pt"}
        frames: torch.Tensor = reader(samples, **{"sampling_rate": reader.sampling_rate, **options}, **fixed)[
            "input_features"
        ]
        return frames.reshape(reader.feature_size, -1, reader.nb_max_frames).transpose(0, 1)
