"""Videos of prompts: frames in RGB, evenly taken from a file, or given as images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.contract.param_checks import shown
from penstock.errors import InvalidMedia
from penstock.media.containers import opened
from penstock.media.images import read_image
from penstock.media.item import VIDEO, Media
from penstock.media.options import MediaOptions

Frame: TypeAlias = NDArray[np.uint8]


def read_video(given: Any, options: MediaOptions) -> Media:
    """Video of a file's content, of frames, or of (frames, metadata).

    Frames: an array [F, H, W, 3], or a list of what `read_image` takes. metadata: may have "fps", "frames_indices" and
    "total_num_frames" of the file that they are of. Raises InvalidMedia.
    """
    if isinstance(given, bytes):
        return _decoded(given, options)
    has_metadata = isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)
    frames, metadata = given if has_metadata else (given, {})
    if isinstance(frames, Mapping) or not hasattr(frames, "__len__"):
        raise InvalidMedia(
            f"It is {shown(given)}. Allowed: a list of images, an array [F, H, W, 3], (frames, metadata), bytes, a "
            "path or a URL."
        )
    return _of_frames(frames, metadata, options)


def _decoded(content: bytes, options: MediaOptions) -> Media:
    """Frames of a file's content, which are counted before any is decoded."""
    with opened(content, VIDEO) as file:
        stream = file.streams.video[0]
        size = stream.codec_context.width, stream.codec_context.height
        rate = None if not stream.average_rate else float(stream.average_rate)
        num_frames = 0
        for packet in file.demux(stream):
            num_frames += packet.size > 0
            _check_length(num_frames, rate, options)
    indices = _taken(num_frames, rate, options)
    _check_pixels(size, len(indices), options)
    with opened(content, VIDEO) as file:
        frames = _frames(file, indices, size)
    if not frames:
        raise InvalidMedia("It has no frames that can be decoded.")
    return Media(VIDEO, np.stack(frames), rate, frame_indices=tuple(indices[: len(frames)]), num_file_frames=num_frames)


def _of_frames(given: Any, metadata: Mapping[str, Any], options: MediaOptions) -> Media:
    if not len(given):
        raise InvalidMedia("It has no frames. Allowed: at least one.")
    images = [read_image(frame, options.image) for frame in given]
    sizes = sorted({image.size for image in images})
    if len(sizes) > 1:
        raise InvalidMedia(f"It has frames of {sizes[0]} and of {sizes[1]} pixels. Allowed: frames of one size.")
    _check_pixels(sizes[0], len(images), options)
    rate, indices = metadata.get("fps"), metadata.get("frames_indices")
    numbers = tuple(map(int, range(len(images)) if indices is None else indices))
    if len(numbers) != len(images) or not (rate is None or (isinstance(rate, (int, float)) and rate > 0)):
        raise InvalidMedia(
            f"It has {len(images)} frames, and metadata with {len(numbers)} frames_indices and fps={rate!r}. Allowed: "
            "a number per frame, and a rate above 0."
        )
    total = int(metadata.get("total_num_frames") or max(numbers) + 1)
    rate = None if rate is None else float(rate)
    return Media(VIDEO, np.stack([np.asarray(image) for image in images]), rate, numbers, total)


def _frames(file: Any, indices: Sequence[int], size: tuple[int, int]) -> list[Frame]:
    """Frames of these numbers, which rise; a frame that a phone marks as turned is turned upright."""
    wanted, taken = set(indices), list[Frame]()
    for number, frame in enumerate(file.decode(video=0)):
        if (frame.width, frame.height) != size:
            raise InvalidMedia("It changes its size. Allowed: videos of one size.")
        if number in wanted:
            turns = round(getattr(frame, "rotation", 0) / 90)
            taken.append(np.rot90(frame.to_ndarray(format="rgb24"), turns))
            if len(taken) == len(indices):
                break
    return taken


def _taken(num_frames: int, rate: float | None, options: MediaOptions) -> list[int]:
    """Numbers of the frames that are taken, evenly from the first to the last one."""
    count, video = num_frames, options.video
    if video.num_frames > 0:
        count = min(count, video.num_frames)
    if video.fps > 0 and rate:
        count = min(count, max(1, int(num_frames / rate * video.fps)))
    return [int(number) for number in np.linspace(0, num_frames - 1, count)] if count else []


def _check_length(num_frames: int, rate: float | None, options: MediaOptions) -> None:
    video = options.video
    if num_frames > video.max_file_frames or (rate and num_frames > video.max_seconds * rate):
        raise InvalidMedia(
            f"It is longer than {video.max_seconds:,.0f} s or {video.max_file_frames:,} frames, which is the limit of "
            "videos."
        )


def _check_pixels(size: tuple[int, int], num_frames: int, options: MediaOptions) -> None:
    width, height = size
    options.image.check(width, height)
    if width * height * num_frames > options.video.max_pixels:
        raise InvalidMedia(
            f"It has {num_frames} frames of {width:,} x {height:,} pixels. Allowed: {options.video.max_pixels:,} "
            "pixels in all. Take fewer frames, by num_frames of media_io_kwargs."
        )
