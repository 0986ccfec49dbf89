"""Options of requests for a model's processor (`mm_processor_kwargs`), and those that a `detail` of images means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from penstock.config.checks import did_you_mean
from penstock.contract.param_checks import shown
from penstock.errors import InvalidRequest

# Argument of a processor by modality, before "_kwargs" the name of the group of its options; and parts that read it.
ARGUMENTS = {"image": "images", "audio": "audio", "video": "videos"}
_PARTS = {
    "image": ("image_processor",),
    "audio": ("feature_extractor", "audio_processor"),
    "video": ("video_processor",),
}
# Options that the engine sets, or that change the form of what a processor returns.
_FIXED = frozenset(
    {
        "data_format",
        "device",
        "disable_grouping",
        "input_data_format",
        "load_audio_backend",
        "max_length",
        "pad_to_multiple_of",
        "padding",
        "raw_speech",
        "return_attention_mask",
        "return_metadata",
        "return_tensors",
        "sampling_rate",
        "truncation",
        "video_metadata",
    }
)
# Limits of an image's pixels, and their names in its size.
_PIXELS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
# Options that give the patches the form that the encoder's weights take, and sides of an image's tiles, where there are
# such, which its positions have.
_OF_WEIGHTS = ("patch_size", "merge_size", "temporal_patch_size", "max_image_size")
_SIDES_OF_TILES = ("size", "crop_size")
_HAVE_TILES = ("crop_to_patches", "do_pan_and_scan", "image_grid_pinpoints")
# Most pixels that an image may be enlarged to: their floats have 1 GiB.
_MOST_PIXELS = 89_478_485
# So the longest edge of an image, and the shortest one where the other may be 200 times as long.
_LONGEST_EDGE, _SHORTEST_EDGE = math.isqrt(_MOST_PIXELS), math.isqrt(_MOST_PIXELS // 200)
# Numbers of tiles, and the most that a request may ask for.
_NUM_TILES, _MOST_TILES = ("min_patches", "max_patches", "pan_and_scan_max_num_crops", "max_image_tiles"), 256
# Options of pixels' values.
_OF_VALUES = ("image_mean", "image_std", "rescale_factor")
# Options that make several tiles of an image beside the one of the whole.
_TILES = ("do_image_splitting", "crop_to_patches", "do_pan_and_scan")


def reader_of(processor: Any, modality: str) -> Any:
    """Part of a processor that reads a modality; None where it has none."""
    parts = (getattr(processor, name, None) for name in _PARTS[modality])
    return next((part for part in parts if part is not None), None)


def options_of(processor: Any, modality: str, given: Mapping[str, Any], detail: str) -> dict[str, Any]:
    """Options for an item of a modality: those of its group, such as images_kwargs, and those without a group.

    detail: of an image; "low" is the whole image, without tiles of it. Raises InvalidRequest for an option that no part
    of the processor reads.
    """
    readers = {f"{argument}_kwargs": reader_of(processor, one) for one, argument in ARGUMENTS.items()}
    groups = {group: _names(reader, group) for group, reader in readers.items() if reader is not None}
    names = set().union(*groups.values())
    for name, value in given.items():
        if name in groups and isinstance(value, Mapping):
            _check(f"{name} of mm_processor_kwargs", value, groups[name])
        elif name not in groups:
            _check("mm_processor_kwargs", [name], names)
        else:
            raise InvalidRequest(f"{name}={shown(value)} of mm_processor_kwargs is not valid. Allowed: a dictionary.")
    free = {name: value for name, value in given.items() if name not in groups}
    taken = {**free, **given.get(f"{ARGUMENTS[modality]}_kwargs", {})}
    for name, value in taken.items():
        if not _is_finite(value):
            raise InvalidRequest(f"{name}={shown(value)} of mm_processor_kwargs is not valid. Allowed: finite numbers.")
    reader = reader_of(processor, modality)
    has_tiles = modality == "image" and any(hasattr(reader, name) for name in _HAVE_TILES)
    for name in (*_OF_WEIGHTS, *(_SIDES_OF_TILES if has_tiles else ())):
        own = _own(reader, name)
        if own is not None and taken.get(name, own) != own:
            raise InvalidRequest(
                f"{name}={shown(taken[name])} of mm_processor_kwargs does not fit the encoder's weights. Allowed: "
                f"{shown(own)}."
            )
    if modality != "image":
        return taken
    tiles = {name: False for name in _TILES if hasattr(reader, name)} if detail == "low" else {}
    return {**tiles, **_with_size(reader, taken)}


def _is_finite(value: Any) -> bool:
    """Whether all numbers in an option are finite."""
    if isinstance(value, Mapping):
        return _is_finite(list(value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _with_size(reader: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Options with the limits of pixels of an image as its size, which is all that newer processors read."""
    given = options.get("size") or _own(reader, "size")
    known = given if isinstance(given, Mapping) else {}
    size = {edge: value for edge, value in known.items() if value is not None}
    _refuse_enlarging(reader, options)
    limits = {edge: options[name] for name, edge in _PIXELS.items() if isinstance(options.get(name), int)}
    if not limits or size.keys() != set(_PIXELS.values()):
        return options
    return {**{name: value for name, value in options.items() if name not in _PIXELS}, "size": {**size, **limits}}


def _refuse_enlarging(reader: Any, options: Mapping[str, Any]) -> None:
    """Refuse sizes and numbers of tiles that would enlarge an image beyond the limit, before it is read."""
    # Such a processor's size has numbers of pixels, of which the larger one only makes images smaller.
    counts_pixels = set(_PIXELS) <= set(getattr(getattr(reader, "valid_kwargs", None), "__annotations__", {}))
    for name, option in options.items():
        for edge, value in _numbers(option) if name not in _OF_VALUES else ():
            is_count = counts_pixels and name in ("size", "min_pixels")
            if name == "max_pixels" or (is_count and edge == "longest_edge"):
                continue
            most: float = _MOST_TILES
            if name not in _NUM_TILES:
                most = _MOST_PIXELS if is_count else _SHORTEST_EDGE if edge == "shortest_edge" else _LONGEST_EDGE
            most = max([most, *(own for _, own in _numbers(_own(reader, name)))])
            if value > most:
                raise InvalidRequest(
                    f"{name}={shown(option)} of mm_processor_kwargs enlarges an image beyond the limit. Allowed: up to "
                    f"{most:,}."
                )


def _own(reader: Any, name: str) -> Any:
    """An option of the model's processor itself; of a size, the edges that are set."""
    own: Any = getattr(reader, name, None)
    if not hasattr(own, "shortest_edge"):
        return own
    return {edge: value for edge, value in dict(own).items() if value is not None}


def _numbers(option: Any, edge: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of an option, each with the name of its edge, if it has one. A size of one number is the shortest."""
    if isinstance(option, (int, float)):
        yield edge or "shortest_edge", option
    elif isinstance(option, (list, tuple)):
        for one in option:
            yield from _numbers(one, "side")
    elif isinstance(option, Mapping):
        for name, value in option.items():
            yield from _numbers(value, str(name))


def _names(part: Any, group: str) -> set[str]:
    from transformers.processing_utils import ProcessingKwargs

    usual = getattr(ProcessingKwargs.__annotations__[group], "__annotations__", {})
    own = getattr(getattr(part, "valid_kwargs", None), "__annotations__", {})
    return {*usual, *own} - _FIXED


def _check(where: str, given: Iterable[str], names: set[str]) -> None:
    for name in given:
        if name not in names:
            raise InvalidRequest(
                f"{where} has {name!r}, which the model's processor does not take.{did_you_mean(name, names)} "
                f"Allowed: {', '.join(sorted(names))}."
            )
