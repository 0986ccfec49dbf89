"""Decoded images, audio and video."""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.config.multimodal import MODALITIES
from penstock.errors import UnsupportedParameter

Samples: TypeAlias = NDArray[np.float32]
# Input of an item whose features are given.
FEATURES = "features"
# Beginning of the key of an item that a caller has named, whatever its content.
NAMED = "named "
IMAGE, AUDIO, VIDEO = MODALITIES


@dataclass(frozen=True, slots=True, eq=False)
class Media:
    """A decoded image, sound or video.

    value: an RGB image of PIL; samples [N] of one channel, float32, within -1 to 1 as a rule; frames [F, H, W, 3] of a
        video, uint8.
    rate: samples per second, or frames per second of the video's file; None where the caller gave none.
    frame_indices: numbers of the frames in the video's file, which has num_file_frames.
    detail: size that the request asks of an image: "low", "high" or "auto".
    is_features: value is what an encoder would make of the item, [L, D], floats. grid: of its patches in time, height
        and width, for models that have such.
    file_hash: digest of the file that it was decoded from; None for one that came decoded.
    """

    modality: str
    value: Any
    rate: float | None = None
    frame_indices: tuple[int, ...] = ()
    num_file_frames: int = 0
    detail: str = "auto"
    is_features: bool = False
    grid: tuple[int, ...] | None = None
    file_hash: str | None = None

    @property
    def is_picture(self) -> bool:
        """Whether it is an image of PIL."""
        return self.modality == IMAGE and not self.is_features

    @property
    def num_bytes(self) -> int:
        """Bytes of the content."""
        size: int = 3 * self.value.width * self.value.height if self.is_picture else self.value.nbytes
        return size

    def content_hash(self) -> str:
        """Digest of the content, in hexadecimal: equal for equal files from any place, and for equal decoded content.

        A file is its own content, since an engine decodes all alike; it is smaller than what is decoded from it.
        """
        if self.file_hash is not None:
            return hashlib.blake2b(repr((self.modality, self.detail, self.file_hash)).encode()).hexdigest()
        is_image = self.is_picture
        form: tuple[Any, ...] = (self.value.size if is_image else self.value.shape, self.rate, self.frame_indices)
        form = (*form, self.grid, self.value.dtype.name) if self.is_features else form
        digest = hashlib.blake2b(repr((self.modality, form)).encode(), digest_size=32)
        digest.update(self.value.tobytes() if is_image else np.ascontiguousarray(self.value).data)
        return digest.hexdigest()


def package(name: str, what: str, extra: str) -> ModuleType:
    """Module of an optional package. Raises UnsupportedParameter, naming the extra, where it is not installed."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise UnsupportedParameter(
            f"{what} need the package {name.partition('.')[0]}. Install the extra: pip install 'penstock[{extra}]'."
        ) from error
