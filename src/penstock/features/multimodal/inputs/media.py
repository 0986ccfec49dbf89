"""Decoded images, audio and video, and the options and limits of their decoding."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.config.checks import did_you_mean
from penstock.contract.param_checks import shown
from penstock.errors import ConfigError, InvalidMedia, UnsupportedParameter

Samples: TypeAlias = NDArray[np.float32]
Frames: TypeAlias = NDArray[np.uint8]
# Fields of a prompt with media.
DATA, OPTIONS, UUIDS = MEDIA_KEYS = ("multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids")
# Options of which -1 is no limit.
_UNLIMITED = ("num_frames", "fps")
IMAGE, AUDIO, VIDEO = MODALITIES = ("image", "audio", "video")


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
    """

    modality: str
    value: Any
    rate: float | None = None
    frame_indices: tuple[int, ...] = ()
    num_file_frames: int = 0
    detail: str = "auto"
    is_features: bool = False
    grid: tuple[int, ...] | None = None

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
        """Digest of the decoded content, in hexadecimal; equal for equal content of any source."""
        is_image = self.is_picture
        form: tuple[Any, ...] = (self.value.size if is_image else self.value.shape, self.rate, self.frame_indices)
        form = (*form, self.grid, self.value.dtype.name) if self.is_features else form
        digest = hashlib.blake2b(repr((self.modality, form)).encode(), digest_size=32)
        digest.update(self.value.tobytes() if is_image else np.ascontiguousarray(self.value).data)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """rgba_background_color: behind transparent pixels. max_pixels: of an image.
    max_aspect_ratio: of the longer to the shorter side.
    """

    rgba_background_color: tuple[int, int, int] = (255, 255, 255)
    max_pixels: int = 89_478_485
    max_aspect_ratio: int = 200

    def check(self, width: int, height: int) -> None:
        """Raise InvalidMedia for a size beyond the limits."""
        if width < 1 or height < 1 or width * height > self.max_pixels:
            raise InvalidMedia(f"It has {width:,} x {height:,} pixels. Allowed: up to {self.max_pixels:,} in all.")
        if max(width, height) > self.max_aspect_ratio * min(width, height):
            raise InvalidMedia(
                f"It has {width:,} x {height:,} pixels. Allowed: a longer side of up to {self.max_aspect_ratio} times "
                "the shorter one."
            )


@dataclass(frozen=True, slots=True)
class AudioOptions:
    """max_seconds: of a sound."""

    max_seconds: float = 3600.0


@dataclass(frozen=True, slots=True)
class VideoOptions:
    """num_frames: most frames of a file that are taken, evenly over its length; -1 takes all.
    fps: frames per second that are taken, up to num_frames; -1 does not limit them.
    max_seconds, max_file_frames: of a file. max_pixels: of all frames that are taken.
    """

    num_frames: int = 32
    fps: float = -1
    max_seconds: float = 600.0
    max_file_frames: int = 36_000
    max_pixels: int = 1 << 28


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """Options of decoding, by modality."""

    image: ImageOptions = ImageOptions()
    audio: AudioOptions = AudioOptions()
    video: VideoOptions = VideoOptions()

    @classmethod
    def read(cls, media_io_kwargs: Mapping[str, Mapping[str, Any]] | None) -> Self:
        """Options of `media_io_kwargs`. Raises ConfigError for an unknown name and for a value of another type."""
        kinds = {"image": ImageOptions, "audio": AudioOptions, "video": VideoOptions}
        read: dict[str, Any] = {}
        for modality, given in (media_io_kwargs or {}).items():
            if modality not in kinds or not isinstance(given, Mapping):
                raise ConfigError(
                    f"media_io_kwargs has {modality!r}: {shown(given)}. Allowed: a dictionary for {', '.join(kinds)}."
                )
            allowed = {field.name: field.default for field in fields(kinds[modality])}
            for name, value in given.items():
                if name not in allowed:
                    hint = did_you_mean(name, allowed)
                    raise ConfigError(
                        f"media_io_kwargs of {modality} has {name!r}.{hint} Allowed: {', '.join(allowed)}."
                    )
                _check_like(name, f"media_io_kwargs[{modality!r}][{name!r}]", value, allowed[name])
            read[modality] = kinds[modality](**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
        return cls(**read)


def package(name: str, what: str, extra: str) -> ModuleType:
    """Module of an optional package. Raises UnsupportedParameter, naming the extra, where it is not installed."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise UnsupportedParameter(
            f"{what} need the package {name.partition('.')[0]}. Install the extra: pip install 'penstock[{extra}]'."
        ) from error


def _check_like(option: str, name: str, value: Any, default: Any) -> None:
    if isinstance(default, tuple):
        is_valid = isinstance(value, (list, tuple)) and len(value) == 3 and all(c in range(256) for c in value)
        allowed = "three numbers of 0 to 255"
    else:
        is_number = isinstance(value, (int, type(default))) and not isinstance(value, bool)
        is_valid = is_number and (value > 0 or (value == -1 and option in _UNLIMITED))
        allowed = "a number above 0"
    if not is_valid:
        raise ConfigError(f"{name}={shown(value)} is not valid. Allowed: {allowed}.")
