"""Video processors: sampling of frames, resizing, and patches, with the arithmetic and pixels of Transformers' own.

Those need torchvision, which resizes bytes by PyTorch's interpolation, as it is done here, and by PIL for Lanczos.
Suffixes: F frames, C channels, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypedDict

import numpy as np
import torch
from torch import Tensor

_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
# Numbers of PIL's filters.
_LANCZOS = 1
_MODES = {2: "bilinear", 3: "bicubic"}
# Frames per second of videos without a rate, as in Transformers.
_USUAL_RATE = 24
# Longest side of a video's frames in SmolVLM.
_MAX_SIDE = 4096
# Most pixels of resized frames: their floats have 1 GiB.
_MOST_PIXELS = 89_478_485


class VideoProcessor:
    """Frames of one size, resized and normalised: that of LLaVA-OneVision, and what the families have in common.

    Its call, and the attributes that a processor of Transformers reads, are those of Transformers' classes.

    defaults: options of the family; a folder's fields and a request's options change them.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "do_sample_frames": False,
        "num_frames": None,
        "fps": None,
        "do_resize": True,
        "resample": 3,
        "size": {"height": 384, "width": 384},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        **_CLIP,
    }

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.options = {**self.defaults, **{name: value for name, value in fields.items() if name in self.defaults}}
        # Types of the options that a family has beside those of all.
        own = {name: value for name, value in self.defaults.items() if name not in VideoProcessor.defaults}
        types = {name: dict if isinstance(value, dict) else bool | int | float | None for name, value in own.items()}
        make: Any = TypedDict
        self.valid_kwargs = make("Options", types, total=False)

    def __call__(
        self, videos: Sequence[Any], *, video_metadata: Sequence[Any], return_metadata: bool = False, **given: Any
    ) -> dict[str, Any]:
        """Inputs of the encoder. videos: uint8 [F, H, W, C] each. video_metadata: Transformers' VideoMetadata of each.

        Raises ValueError for options or frames that do not fit.
        """
        options = {**self.options, **{name: value for name, value in given.items() if value is not None}}
        metadata = list(video_metadata)
        made = []
        for frames, data in zip(videos, metadata, strict=True):
            if options["do_sample_frames"]:
                if len(frames) != data.total_num_frames:
                    raise ValueError(
                        f"do_sample_frames=True samples a whole video, and these are {len(frames)} of its "
                        f"{data.total_num_frames} frames. Set num_frames or fps by media_io_kwargs."
                    )
                data.frames_indices = self.sampled(data, options)
                frames = frames[data.frames_indices]
            made.append(self.inputs(torch.from_numpy(frames).permute(0, 3, 1, 2).contiguous(), options))
        joined = {name: torch.cat([one[name] for one in made]) for name in made[0]}
        return {**joined, "video_metadata": metadata} if return_metadata else joined

    def sampled(self, metadata: Any, options: Mapping[str, Any]) -> list[int]:
        """Numbers of the frames that are taken of a video."""
        total, num_frames = metadata.total_num_frames, _count(metadata, options)
        return [number * total // num_frames for number in range(num_frames)]

    def inputs(self, frames_FCHW: Tensor, options: Mapping[str, Any]) -> dict[str, Tensor]:
        """Inputs of the encoder for one video, by name; those of several follow one another."""
        if options["do_resize"]:
            size = options["size"]
            frames_FCHW = resized(frames_FCHW, (size["height"], size["width"]), options["resample"])
        return {"pixel_values_videos": normalised(frames_FCHW, options)[None]}


class InternVLVideos(VideoProcessor):
    """Video processor of InternVL: frames from the middle of equal parts."""

    defaults: ClassVar[Mapping[str, Any]] = {**VideoProcessor.defaults, "initial_shift": True}

    def sampled(self, metadata: Any, options: Mapping[str, Any]) -> list[int]:
        total, num_frames = metadata.total_num_frames, _count(metadata, options)
        shift = options["initial_shift"]
        shift = total / num_frames / 2 if shift is True else shift
        if not 0 <= shift < total:
            raise ValueError(f"initial_shift={shift} is not valid. Allowed: 0 to {total - 1}, the video's last frame.")
        return torch.arange(shift, total, total / num_frames).int().tolist()


class SmolVLMVideos(VideoProcessor):
    """Video processor of SmolVLM: squares, of frames without the first and the last second of a long video."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **VideoProcessor.defaults,
        "resample": _LANCZOS,
        "size": {"longest_edge": 4 * 364},
        "max_image_size": {"longest_edge": 364},
        "skip_secs": 1,
        **_HALF,
    }

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        sampling = fields.get("video_sampling")
        if isinstance(sampling, Mapping):
            size = fields.get("size", sampling["video_size"])
            self.options |= {"num_frames": sampling["max_frames"], "fps": sampling["fps"], "size": size}

    def sampled(self, metadata: Any, options: Mapping[str, Any]) -> list[int]:
        num_frames, fps, skipped = (options[name] for name in ("num_frames", "fps", "skip_secs"))
        total, rate = metadata.total_num_frames, _rate(metadata)
        if num_frames is None or fps is None:
            raise ValueError(f"num_frames={num_frames} and fps={fps} do not say how many frames to take. Set both.")
        wanted = max(min(round(fps * metadata.duration), num_frames, total), 1)
        first, last = 0, total - 1
        if skipped > 0 and metadata.duration - 2 * skipped > num_frames * fps:
            first, last = int(skipped * rate), min(int(total - skipped * rate), last)
        if first >= last:
            first, last = 0, total - 1
        return list(map(int, np.unique(np.linspace(first, last, wanted, dtype=int))))

    def inputs(self, frames_FCHW: Tensor, options: Mapping[str, Any]) -> dict[str, Tensor]:
        if options["do_resize"]:
            height, width = frames_FCHW.shape[2:]
            longest = min(options["size"]["longest_edge"], _MAX_SIDE)
            ratio = width / height
            shorter = int(longest / ratio if width >= height else longest * ratio)
            shorter = max(shorter + shorter % 2, 1)
            size = (shorter, longest) if width >= height else (longest, shorter)
            side = options["max_image_size"]["longest_edge"]
            frames_FCHW = resized(frames_FCHW, size, options["resample"])
            frames_FCHW = resized(frames_FCHW, (side, side), options["resample"])
        mask = torch.ones(1, len(frames_FCHW), *frames_FCHW.shape[2:], dtype=torch.int64)
        return {"pixel_values": normalised(frames_FCHW, options)[None], "pixel_attention_mask": mask}


class Qwen2Videos(VideoProcessor):
    """Video processor of Qwen2-VL and Qwen2.5-VL: patches over several frames, in the order of merged squares.

    Wang et al. 2024, https://arxiv.org/abs/2409.12191, section 2.1.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        **VideoProcessor.defaults,
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_frames": 4,
        "max_frames": 768,
        "min_pixels": None,
        "max_pixels": None,
        "cap_pixels_per_frame": False,
        "max_video_tokens": 128_000,
    }

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.options |= {"size": _pixels(self.options), "min_pixels": None, "max_pixels": None}
        self.merge_size: int = self.options["merge_size"]
        self.temporal_patch_size: int = self.options["temporal_patch_size"]

    def sampled(self, metadata: Any, options: Mapping[str, Any]) -> list[int]:
        total, step = metadata.total_num_frames, options["temporal_patch_size"]
        num_frames = options["num_frames"]
        if num_frames is not None:
            num_frames = round(num_frames / step) * step
        elif options["fps"] is not None:
            most = min(options["max_frames"], total) // step * step
            num_frames = min(max(total / _rate(metadata) * options["fps"], options["min_frames"]), most, total)
            num_frames = math.floor(num_frames / step) * step
        num_frames = _checked_count(total if num_frames is None else num_frames, total)
        return torch.arange(0, total, total / num_frames).int().tolist()

    def inputs(self, frames_FCHW: Tensor, options: Mapping[str, Any]) -> dict[str, Tensor]:
        if options["do_resize"]:
            num_frames, _, height, width = frames_FCHW.shape
            size = self.frame_size(height, width, num_frames, options)
            frames_FCHW = resized(frames_FCHW, size, options["resample"])
        patches, grid = patches_of(normalised(frames_FCHW, options), options)
        return {"pixel_values_videos": patches, "video_grid_thw": torch.tensor([grid])}

    def frame_size(self, height: int, width: int, num_frames: int, options: Mapping[str, Any]) -> tuple[int, int]:
        """Height and width that frames are resized to: multiples of merged patches, within the limits of pixels."""
        factor, size = options["patch_size"] * options["merge_size"], _pixels(options)
        least, most = size["shortest_edge"], size["longest_edge"]
        if options["cap_pixels_per_frame"]:
            share = int(options["max_video_tokens"] * factor**2 * 0.9) * options["temporal_patch_size"] // num_frames
            most = max(min(most, share), int(least * 1.05))
        return fitted_size(height, width, factor, (1, 1), (least, most))


class Qwen3Videos(Qwen2Videos):
    """Video processor of Qwen3-VL: its limits of pixels are for all frames together."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **Qwen2Videos.defaults,
        "do_sample_frames": True,
        "fps": 2,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
        "patch_size": 16,
        "max_video_tokens": 768,
        **_HALF,
    }

    def sampled(self, metadata: Any, options: Mapping[str, Any]) -> list[int]:
        total, num_frames = metadata.total_num_frames, options["num_frames"]
        if num_frames is None and options["fps"] is not None:
            metadata.fps = metadata.fps or _USUAL_RATE
            wanted = int(total / metadata.fps * options["fps"])
            num_frames = min(max(wanted, options["min_frames"]), options["max_frames"], total)
        if num_frames is None:
            num_frames = min(max(total, options["min_frames"]), options["max_frames"])
        # A few frames are repeated until there are as many as the model's own limit says.
        num_frames = _checked_count(num_frames, max(total, self.options["min_frames"]))
        return list(map(int, np.linspace(0, total - 1, num_frames).round()))

    def frame_size(self, height: int, width: int, num_frames: int, options: Mapping[str, Any]) -> tuple[int, int]:
        factor, step = options["patch_size"] * options["merge_size"], options["temporal_patch_size"]
        least, most = (options["size"][edge] for edge in ("shortest_edge", "longest_edge"))
        num_frames = max(num_frames, step)
        if options["cap_pixels_per_frame"]:
            of_frame = min(options["max_video_tokens"] * factor**2, most // num_frames)
            most = max(of_frame, int(least * 1.05)) * num_frames
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        return fitted_size(height, width, factor, (num_frames, round(num_frames / step) * step), (least, most))


# By the name of the processor's class of Transformers.
VIDEO_PROCESSORS: Mapping[str, type[VideoProcessor]] = {
    "InternVLProcessor": InternVLVideos,
    "LlavaOnevisionProcessor": VideoProcessor,
    "Qwen2VLProcessor": Qwen2Videos,
    "Qwen2_5_VLProcessor": Qwen2Videos,
    "Qwen3VLProcessor": Qwen3Videos,
    "SmolVLMProcessor": SmolVLMVideos,
}


def _count(metadata: Any, options: Mapping[str, Any]) -> int:
    """Number of frames to take: that of the options, or by their rate, or all."""
    total, num_frames = metadata.total_num_frames, options["num_frames"]
    if num_frames is None and options["fps"] is not None:
        num_frames = max(1, int(total / _rate(metadata) * options["fps"]))
    return _checked_count(total if num_frames is None else num_frames, total)


def _checked_count(num_frames: int, total: int) -> int:
    """The number of frames to take. Raises ValueError unless a video with so many has them."""
    if not 0 < num_frames <= total:
        raise ValueError(f"{num_frames} of its frames cannot be taken: it has {total}. Set num_frames or fps.")
    return num_frames


def resized(frames_FCHW: Tensor, size: tuple[int, int], resample: int) -> Tensor:
    """Frames of bytes in another height and width. resample: number of PIL's filter.

    Raises ValueError for more pixels than a prompt may have.
    """
    if len(frames_FCHW) * size[0] * size[1] > _MOST_PIXELS:
        raise ValueError(
            f"{len(frames_FCHW)} frames of {size[1]} x {size[0]} pixels are too many. Allowed: {_MOST_PIXELS:,} in all."
        )
    if tuple(frames_FCHW.shape[2:]) == tuple(size):
        return frames_FCHW
    if resample == _LANCZOS:
        from PIL import Image

        images = (Image.fromarray(frame) for frame in frames_FCHW.permute(0, 2, 3, 1).numpy())
        frames = [np.asarray(image.resize((size[1], size[0]), Image.Resampling.LANCZOS)) for image in images]
        return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
    if resample not in _MODES:
        raise ValueError(f"resample={resample} is not supported. Allowed: {_LANCZOS}, {', '.join(map(str, _MODES))}.")
    return torch.nn.functional.interpolate(
        frames_FCHW, size=list(size), mode=_MODES[resample], align_corners=False, antialias=True
    )


def normalised(frames_FCHW: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Frames as float32, of which the mean is subtracted before they are divided by the standard deviation."""
    frames = frames_FCHW.to(torch.float32)
    factor = options["rescale_factor"] if options["do_rescale"] else 1.0
    if not options["do_normalize"]:
        return frames * factor
    mean, std = (torch.tensor(options[name]) * (1.0 / factor) for name in ("image_mean", "image_std"))
    return (frames - mean[:, None, None]).div_(std[:, None, None])


def patches_of(frames_FCHW: Tensor, options: Mapping[str, Any]) -> tuple[Tensor, list[int]]:
    """Patches [T, C * frames * side * side] of normalised frames, and their grid: frames, rows, columns.

    The last frame is repeated until whole patches are full.
    """
    side, merge, step = (options[name] for name in ("patch_size", "merge_size", "temporal_patch_size"))
    missing = -len(frames_FCHW) % step
    frames_FCHW = torch.cat((frames_FCHW, frames_FCHW[-1:].expand(missing, -1, -1, -1)))
    num_frames, channels, height, width = frames_FCHW.shape
    grid = [num_frames // step, height // side, width // side]
    squares = grid[1] // merge, merge, side, grid[2] // merge, merge, side
    patches = frames_FCHW.reshape(grid[0], step, channels, *squares).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return patches.reshape(math.prod(grid), channels * step * side * side), grid


def fitted_size(
    height: int, width: int, factor: int, num_frames: tuple[int, int], pixels: tuple[int, int]
) -> tuple[int, int]:
    """Multiples of a factor near a size, with a number of pixels within limits and nearly the same aspect ratio.

    num_frames: that the pixels are of, and those of whole patches. pixels: least and most.
    """
    if max(height, width) > 200 * min(height, width):
        raise ValueError(
            f"frames of {width} x {height} are not supported: the longer side is over 200 times the shorter."
        )
    least, most = pixels
    rows, columns = (round(side / factor) * factor for side in (height, width))
    if num_frames[1] * rows * columns > most:
        scale = math.sqrt(num_frames[0] * height * width / most)
        rows, columns = (max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))
    elif num_frames[1] * rows * columns < least:
        scale = math.sqrt(least / (num_frames[0] * height * width))
        rows, columns = (math.ceil(side * scale / factor) * factor for side in (height, width))
    return rows, columns


def _pixels(options: Mapping[str, Any]) -> dict[str, int]:
    """Least and most pixels of an item, under either name."""
    size = dict(options["size"])
    for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if options[name] is not None:
            size[edge] = options[name]
    return size


def _rate(metadata: Any) -> float:
    if metadata.fps is None:
        raise ValueError('fps is not known. Give the frames with their rate: (frames, {"fps": ...}).')
    return float(metadata.fps)
