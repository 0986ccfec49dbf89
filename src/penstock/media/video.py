"""Videos of prompts: frames in RGB, evenly taken from a file, or given as images."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.errors import InvalidMedia
from penstock.media.audio import CONTAINERS
from penstock.media.images import decode_image, image_of
from penstock.media.item import VIDEO, Frames, Media, package
from penstock.media.options import ImageOptions, MediaOptions


def decode_video(content: bytes, options: MediaOptions) -> Media:
    """Frames of a file's content, which are counted before any is decoded. Raises InvalidMedia."""
    library = package("av", "Videos", "video")
    try:
        with _opened(library, content) as file:
            stream = file.streams.video[0]
            width, height = stream.codec_context.width, stream.codec_context.height
            rate = None if not stream.average_rate else float(stream.average_rate)
            num_frames = 0
            for packet in file.demux(stream):
                num_frames += packet.size > 0
                _check_length(num_frames, rate, options)
        indices = _taken(num_frames, rate, options)
        _check_pixels((width, height), len(indices), options)
        with _opened(library, content) as file:
            frames = _frames(file, indices, (width, height))
    except library.FFmpegError as error:
        raise InvalidMedia(f"It is no video that can be read: {error.strerror}.") from None
    if not len(frames):
        raise InvalidMedia("It has no frames that can be decoded.")
    return Media(VIDEO, frames, rate, frame_indices=tuple(indices[: len(frames)]), num_file_frames=num_frames)


def video_of(given: Any, metadata: Mapping[str, Any], options: MediaOptions) -> Media:
    """Frames of an array [F, H, W, 3], or of a list of images: of PIL, arrays, or contents of files.

    metadata: may have "fps", "frames_indices" and "total_num_frames" of the file that they are of.
    """
    if not len(given):
        raise InvalidMedia("It has no frames. Allowed: at least one.")
    images = [_image(frame, options.image) for frame in given]
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


def _image(given: Any, options: ImageOptions) -> Any:
    return decode_image(given, options) if isinstance(given, bytes) else image_of(given, options)


def _opened(library: Any, content: bytes) -> Any:
    file = library.open(io.BytesIO(content), options={"format_whitelist": CONTAINERS})
    if not file.streams.video:
        file.close()
        raise InvalidMedia("It has no video.")
    return file


def _frames(file: Any, indices: Sequence[int], size: tuple[int, int]) -> Frames:
    """Frames of these numbers, which rise; a frame that a phone marks as turned is turned upright."""
    wanted, taken = set(indices), []
    for number, frame in enumerate(file.decode(video=0)):
        if (frame.width, frame.height) != size:
            raise InvalidMedia("It changes its size. Allowed: videos of one size.")
        if number in wanted:
            turns = round(getattr(frame, "rotation", 0) / 90)
            taken.append(np.rot90(frame.to_ndarray(format="rgb24"), turns))
            if len(taken) == len(indices):
                break
    return np.stack(taken) if taken else np.zeros((0, *size[::-1], 3), np.uint8)


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
