"""Options and limits of the decoding of media (`media_io_kwargs`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from penstock.config.checks import did_you_mean
from penstock.contract.param_checks import shown
from penstock.errors import ConfigError, InvalidMedia

# Options of which -1 is no limit.
_UNLIMITED = ("num_frames", "fps")


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
            defaults = {field.name: field.default for field in fields(kinds[modality])}
            for name, value in given.items():
                if name not in defaults:
                    hint = did_you_mean(name, defaults)
                    raise ConfigError(
                        f"media_io_kwargs of {modality} has {name!r}.{hint} Allowed: {', '.join(defaults)}."
                    )
                allowed = _why_not(name, value, defaults[name])
                if allowed is not None:
                    raise ConfigError(
                        f"media_io_kwargs[{modality!r}][{name!r}]={shown(value)} is not valid. Allowed: {allowed}."
                    )
            read[modality] = kinds[modality](**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
        return cls(**read)


def _why_not(name: str, value: Any, default: Any) -> str | None:
    """Description of the allowed values of an option; None for a value that is allowed."""
    if isinstance(default, tuple):
        is_colour = isinstance(value, (list, tuple)) and len(value) == 3 and all(one in range(256) for one in value)
        return None if is_colour else "three numbers of 0 to 255"
    is_number = isinstance(value, (int, type(default))) and not isinstance(value, bool)
    is_valid = is_number and (value > 0 or (value == -1 and name in _UNLIMITED))
    return None if is_valid else "a number above 0"
