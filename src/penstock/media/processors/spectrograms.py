"""Spectrograms of speech, by Transformers' feature extractor of Whisper.

Suffixes: N samples, C bins, P frames.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoints.json_file import read_json_object
from penstock.errors import InvalidMedia, ModelError

_FILE = "preprocessor_config.json"


class Spectrograms:
    """Log-mel spectrograms as a model's preprocessor_config.json describes them; of 30 s at 16 kHz without one.

    rate: of samples, in Hz. seconds: of the longest sound, to which shorter ones are padded.
    """

    def __init__(self, folder: Path, hf_config: Mapping[str, Any]) -> None:
        fields = read_json_object(folder / _FILE, ModelError, is_optional=True)
        self.rate = int(fields.get("sampling_rate", 16_000))
        self.seconds = float(fields.get("chunk_length", 30))
        self._fields = {"feature_size": hf_config.get("num_mel_bins", 80), **fields}

    @property
    def num_samples(self) -> int:
        """Samples of the longest sound."""
        return round(self.seconds * self.rate)

    def positions(self, num_samples: int) -> int:
        """Positions of the encoder's output that a sound of so many samples has, without the padding."""
        hop = int(self._fields.get("hop_length", 160))
        return max(1, math.ceil(num_samples / hop) // 2)

    def of(self, samples_N: NDArray[np.float32]) -> NDArray[np.float32]:
        """[C, P] of a sound at `rate`. Raises InvalidMedia for one that is too long."""
        if len(samples_N) > self.num_samples:
            raise InvalidMedia(
                f"It has {len(samples_N) / self.rate:.1f} s, and the encoder takes {self.seconds:g} s at once. Cut it, "
                "or have it transcribed: penstock transcribe, or /v1/audio/transcriptions."
            )
        features = self._extractor(samples_N, sampling_rate=self.rate, return_tensors="np")["input_features"][0]
        return np.ascontiguousarray(features, dtype=np.float32)

    @cached_property
    def _extractor(self) -> Any:
        # Importing it takes a second.
        from transformers import WhisperFeatureExtractor

        return WhisperFeatureExtractor.from_dict(self._fields)
