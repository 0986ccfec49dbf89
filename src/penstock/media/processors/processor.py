"""Processing of media items by the model's processor of Transformers, an item at a time, cached by content."""

from __future__ import annotations

import copy
import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.checkpoints.multimodal import MultimodalCheckpoint
from penstock.contract.array_bytes import ArrayBytes
from penstock.errors import InvalidRequest, UnsupportedParameter
from penstock.media.audio import resampled
from penstock.media.item import FEATURES, NAMED, Media
from penstock.media.processors.options import ARGUMENTS, options_of, reader_of
from penstock.media.processors.reading import read_processor

# Results of a processor that belong to the text.
_OF_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"})
# Result of a processor of videos: seconds between two rows in time, for each.
_ROW_SECONDS = "second_per_grid_ts"
# Processors of which a clip is one window of their feature extractor, without what is behind it.
_ONE_WINDOW = ("Qwen2AudioProcessor",)
# Largest value of an encoder's input; pixels of 0 to 255 that are normalised as if they were of 0 to 1 are below it.
_LARGEST = 10_000


class ProcessedItem(NamedTuple):
    """An item of a modality as the processor has made it.

    key: of its content and the processor's options. placeholders: its place in a prompt, in one of these forms. text:
    what takes the placeholder's place. inputs: of the encoder, by name. row_seconds: time of a row of a video's grid.
    """

    modality: str
    key: str
    placeholders: tuple[str, ...]
    text: str
    inputs: dict[str, ArrayBytes]
    row_seconds: float | None = None

    @property
    def num_bytes(self) -> int:
        return sum(len(values.data) for values in self.inputs.values())


class MediaProcessor:
    """The processor of a model. It is read from the model's files when the first item comes; any thread may call it.

    cache_bytes: size of the processed items that are kept. num_queries: items so far. num_hits: those that were kept.
    """

    def __init__(
        self, folder: Path, checkpoint: MultimodalCheckpoint, options: Mapping[str, Any] | None, cache_bytes: int
    ) -> None:
        self._folder, self._checkpoint, self._options = folder, checkpoint, dict(options or {})
        self._lock = threading.Lock()
        self._processor: Any = None
        self._cache: OrderedDict[str, ProcessedItem] = OrderedDict()
        self._cache_bytes, self._num_bytes = cache_bytes, 0
        self.num_queries = self.num_hits = 0

    def placeholder(self, modality: str) -> str:
        """Text of a prompt in the place of an item. Raises UnsupportedParameter for a modality without one."""
        processor = self._read()
        # Gemma's begins an image; its own token is that of a row of features.
        token = getattr(processor, "boi_token", None) if modality == "image" else None
        token = token or getattr(processor, f"{modality}_token", None)
        if token is None or reader_of(processor, modality) is None:
            raise UnsupportedParameter(
                f"{type(processor).__name__} reads no {modality} here ({self._folder.name}): the part of it that does "
                "needs a package that is not installed, or the model's folder lacks its file."
            )
        return str(token)

    def markers(self, modality: str) -> tuple[str, ...]:
        """Texts that stand for an item in a prompt: its placeholder, and the token of a row of its features, if it has
        one of its own. Raises as `placeholder`.
        """
        return (self.placeholder(modality), *self._row_token(modality))

    def process(self, media: Media, options: Mapping[str, Any] | None, uuid: str | None) -> ProcessedItem:
        """Process an item.

        options: of the processor, for this request. uuid: key of the content that the caller gives in place of a hash.
        Raises InvalidRequest for an item or options that the processor does not take.
        """
        given = {**self._options, **(options or {})}
        key = _key(media, given, uuid)
        with self._lock:
            found = self._cache.get(key)
            self.num_queries += 1
            if found is not None:
                self.num_hits += 1
                self._cache.move_to_end(key)
                return found
        item = self._process(key, media, given)
        with self._lock:
            if key not in self._cache and item.num_bytes <= self._cache_bytes:
                self._cache[key] = item
                self._num_bytes += item.num_bytes
                while self._num_bytes > self._cache_bytes:
                    self._num_bytes -= self._cache.popitem(last=False)[1].num_bytes
        return item

    def reset_cache(self) -> None:
        """Forget all processed items."""
        with self._lock:
            self._cache.clear()
            self._num_bytes = 0

    def _process(self, key: str, media: Media, options: Mapping[str, Any]) -> ProcessedItem:
        modality = media.modality
        if media.is_features:
            return self._of_features(key, media)
        placeholder = self.placeholder(modality)
        options = options_of(self._read(), modality, options, media.detail)
        processor, heard = _listening(self._read())
        arguments: dict[str, Any] = {ARGUMENTS[modality]: [media.value]}
        if modality == "audio":
            arguments = _audio_arguments(processor, media)
        elif modality == "video":
            arguments |= _video_arguments(media)
        try:
            made = processor(text=[placeholder], **{**arguments, **options}, return_tensors="pt")
        except Exception as error:  # a processor's errors have no common class
            raise InvalidRequest(f"The model's processor does not take the {modality}: {error}") from error
        inputs = {name: _array(values) for name, values in made.items() if name not in _OF_TEXT}
        _check_values(modality, inputs)
        seconds = inputs.pop(_ROW_SECONDS, None)
        row_seconds = None if seconds is None else float(seconds.to_numpy()[0])
        forms = _forms(processor, placeholder, heard[-1])
        return ProcessedItem(modality, key, forms, heard[-1], inputs, row_seconds)

    def _of_features(self, key: str, media: Media) -> ProcessedItem:
        """An item given by its features: text as of a small one, with as many tokens as there are features."""
        modality, hf_config = media.modality, self._checkpoint.hf_config
        levels = len((hf_config.get("vision_config") or {}).get("deepstack_visual_indexes") or ())
        width = hf_config["text_config"]["hidden_size"] * (1 + levels)
        num_rows = len(media.value)
        if media.value.shape[1] != width:
            raise InvalidRequest(f"{modality}_embeds has {media.value.shape[1]} columns. Allowed: {width}.")
        inputs = {FEATURES: ArrayBytes.of(media.value)}
        if self._checkpoint.rope_sections is not None:
            side = int(hf_config["vision_config"].get("spatial_merge_size", 1))
            merged = side**2
            fits = media.grid is not None and not any(number % side for number in media.grid[1:])
            if not fits or int(np.prod(media.grid or 0)) != num_rows * merged:
                raise InvalidRequest(
                    f"{modality}_embeds has {num_rows} rows, and {modality}_grid_thw is {media.grid}. Allowed: a grid "
                    f"of {num_rows * merged} patches, in time, height and width, the latter two multiples of {side}."
                )
            inputs[f"{modality}_grid_thw"] = ArrayBytes.of(np.asarray([media.grid]))
        small = self._process(key, _small_item(modality), self._options)
        (token,) = self._row_token(modality)
        runs = list(re.finditer(f"(?:{re.escape(token)})+", small.text))
        if len(runs) != 1:
            raise UnsupportedParameter(
                f"{modality}_embeds are not supported for this model, whose items have their tokens in several places. "
                f"Give the {modality} itself."
            )
        text = small.text[: runs[0].start()] + token * num_rows + small.text[runs[0].end() :]
        return ProcessedItem(modality, key, small.placeholders, text, inputs)

    def _row_token(self, modality: str) -> list[str]:
        """Text of the token that takes a row of an item's features; empty where the model has none."""
        token_id = row_token_id(self._checkpoint.hf_config, modality)
        return [] if token_id is None else [str(self._read().tokenizer.convert_ids_to_tokens(token_id))]

    def _read(self) -> Any:
        with self._lock:
            if self._processor is None:
                self._processor = read_processor(self._folder, str(self._checkpoint.hf_config.get("model_type")))
            return self._processor


def row_token_id(hf_config: Mapping[str, Any], modality: str) -> int | None:
    """Id of the tokens that take an item's features; the frames of some models' videos are images."""
    kinds = (modality, "image") if modality == "video" else (modality,)
    names = [f"{kind}_token_{end}" for kind in kinds for end in ("id", "index")]
    return next((hf_config[name] for name in names if isinstance(hf_config.get(name), int)), None)


def _small_item(modality: str) -> Media:
    """An item whose text shows how the processor writes one."""
    from PIL import Image

    small = {
        "image": Media("image", Image.new("RGB", (64, 64))),
        "audio": Media("audio", np.zeros(16_000, dtype=np.float32), rate=16_000),
    }
    if modality not in small:
        raise UnsupportedParameter(f"{modality}_embeds are not supported. Allowed: {', '.join(small)}.")
    return small[modality]


class _ListeningTokenizer:
    """A tokenizer that notes the texts it gets. heard: these texts."""

    def __init__(self, tokenizer: Any, heard: list[str]) -> None:
        self._tokenizer, self._heard = tokenizer, heard

    def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        self._heard.append(text if isinstance(text, str) else text[0])
        return self._tokenizer(text, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def _listening(processor: Any) -> tuple[Any, list[str]]:
    """A copy of the processor for one call, and the list of the texts that it tokenises, placeholders replaced."""
    heard: list[str] = []
    processor = copy.copy(processor)
    processor.tokenizer = _ListeningTokenizer(processor.tokenizer, heard)
    return processor, heard


def _audio_arguments(processor: Any, media: Media) -> dict[str, Any]:
    """Arguments of a processor for a clip of audio. Raises InvalidRequest for one longer than the model takes."""
    reader = reader_of(processor, "audio")
    rate = reader.sampling_rate
    samples = resampled(media.value, media.rate or rate, rate)
    if type(processor).__name__ in _ONE_WINDOW and len(samples) > reader.n_samples:
        raise InvalidRequest(
            f"The audio has {len(samples) / rate:.1f} s. Allowed by this model: up to {reader.n_samples / rate:.0f} s. "
            "Give a shorter clip, or several."
        )
    return {"audio": [samples], "sampling_rate": rate}


def _video_arguments(media: Media) -> dict[str, Any]:
    """Arguments of a processor beside a video. Frames that are a selection already are not sampled again."""
    from transformers.video_utils import VideoMetadata

    num_frames = len(media.value)
    total = media.num_file_frames or num_frames
    metadata = VideoMetadata(
        total_num_frames=total,
        fps=media.rate,
        height=media.value.shape[1],
        width=media.value.shape[2],
        duration=None if media.rate is None else total / media.rate,
        frames_indices=list(media.frame_indices or range(num_frames)),
    )
    is_selection = total != num_frames
    return {"video_metadata": [metadata], **({"do_sample_frames": False} if is_selection else {})}


def _forms(processor: Any, placeholder: str, text: str) -> tuple[str, ...]:
    """Forms of a placeholder in prompts: with the tokens around it too, if these are in the text that replaces it."""
    around = [getattr(processor, f"vision_{end}_token", None) for end in ("start", "end")]
    if all(token is not None and token in text for token in around):
        return f"{around[0]}{placeholder}{around[1]}", placeholder
    return (placeholder,)


def _key(media: Media, options: Mapping[str, Any], uuid: str | None) -> str:
    """Key of an item: its content, or the caller's name for it, with the processor's options."""
    content = media.content_hash() if uuid is None else f"uuid {uuid}"
    form = f"{media.modality} {media.detail} {media.num_file_frames} {sorted(options.items())!r} {content}"
    digest = hashlib.blake2b(form.encode(), digest_size=16).hexdigest()
    return digest if uuid is None else NAMED + digest


def _check_values(modality: str, inputs: Mapping[str, ArrayBytes]) -> None:
    """Raise InvalidRequest for values that options of the processor have made too large for an encoder, or NaN."""
    for values in (one.to_numpy() for one in inputs.values()):
        if values.size and values.dtype.kind == "f" and not -_LARGEST <= values.min() <= values.max() <= _LARGEST:
            raise InvalidRequest(
                f"The model's processor makes values of {values.min():g} to {values.max():g} of the {modality}. "
                f"Allowed: finite numbers of up to {_LARGEST:,}. Change mm_processor_kwargs."
            )


def _array(values: Any) -> ArrayBytes:
    """An encoder's input. A list of arrays of equal shapes is one array."""
    if isinstance(values, (list, tuple)):
        values = np.stack([np.asarray(one) for one in values])
    return ArrayBytes.of(values.numpy() if hasattr(values, "numpy") else values)
