"""Processing of media items by the model's processor of Transformers, an item at a time, cached by content."""

from __future__ import annotations

import copy
import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.checkpoints.multimodal import MultimodalCheckpoint
from penstock.contract.array_bytes import ArrayBytes
from penstock.errors import InvalidRequest, ModelError, UnsupportedFeature
from penstock.features.multimodal.inputs.audio import resampled
from penstock.features.multimodal.inputs.media import Media
from penstock.features.multimodal.inputs.processors.pixtral import PixtralProcessor

logger = logging.getLogger(__name__)
# Results of a processor that belong to the text.
_OF_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"})
# Arguments of a processor by modality, and its parts that read them.
_ARGUMENTS = {"image": "images", "audio": "audio", "video": "videos"}
_READERS = {
    "image": ("image_processor",),
    "audio": ("feature_extractor", "audio_processor"),
    "video": ("video_processor",),
}


class _OwnProcessor(NamedTuple):
    """A processor that is not Transformers'. parts: those of a model's folder that it is made of."""

    make: Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
    parts: tuple[str, ...]


# By the name of the class of Transformers that it takes the place of.
_OWN = {"PixtralProcessor": _OwnProcessor(PixtralProcessor, ("image_processor", "tokenizer"))}


class ProcessedItem(NamedTuple):
    """What the processor makes of an item.

    key: of its content and the processor's options. text: what takes the place of its placeholder in the prompt.
    inputs: of the encoder, by name.
    """

    key: str
    text: str
    inputs: dict[str, ArrayBytes]

    @property
    def num_bytes(self) -> int:
        return sum(len(values.data) for values in self.inputs.values())


class MediaProcessor:
    """The processor of a model. It is read from the model's files when the first item comes; any thread may call it.

    cache_bytes: size of the processed items that are kept.
    """

    def __init__(
        self, folder: Path, checkpoint: MultimodalCheckpoint, options: Mapping[str, Any] | None, cache_bytes: int
    ) -> None:
        self._folder, self._checkpoint, self._options = folder, checkpoint, dict(options or {})
        self._lock = threading.Lock()
        self._processor: Any = None
        self._cache: OrderedDict[str, ProcessedItem] = OrderedDict()
        self._cache_bytes, self._num_bytes = cache_bytes, 0

    def placeholder(self, modality: str) -> str:
        """Text of a prompt in the place of an item. Raises UnsupportedFeature for a modality without one."""
        processor = self._read()
        # Gemma's begins an image; its own token is that of a row of features.
        token = getattr(processor, "boi_token", None) if modality == "image" else None
        token = token or getattr(processor, f"{modality}_token", None)
        if token is None or all(getattr(processor, name, None) is None for name in _READERS[modality]):
            raise UnsupportedFeature(
                f"{type(processor).__name__} reads no {modality} here ({self._folder.name}): the part of it that does "
                "needs a package that is not installed, or the model's folder lacks its file."
            )
        return str(token)

    def process(self, media: Media, options: Mapping[str, Any] | None, uuid: str | None) -> ProcessedItem:
        """Process an item.

        options: of the processor, for this request. uuid: key of the content that the caller gives in place of a hash.
        Raises InvalidRequest for an item or options that the processor does not take.
        """
        given = {**self._options, **(options or {})}
        key = _key(media, given, uuid)
        with self._lock:
            found = self._cache.get(key)
            if found is not None:
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
        placeholder = self.placeholder(modality)
        processor, heard = _listening(self._read())
        arguments: dict[str, Any] = {_ARGUMENTS[modality]: [media.value]}
        if modality == "audio":
            wanted = next(part for name in _READERS[modality] if (part := getattr(processor, name, None)) is not None)
            rate = wanted.sampling_rate
            arguments = {"audio": [resampled(media.value, media.rate or rate, rate)], "sampling_rate": rate}
        try:
            made = processor(text=[placeholder], **arguments, return_tensors="pt", **options)
        except Exception as error:  # a processor's errors have no common class
            raise InvalidRequest(f"The model's processor does not take the {modality}: {error}") from error
        inputs = {name: _array(values) for name, values in made.items() if name not in _OF_TEXT}
        return ProcessedItem(key, heard[-1], inputs)

    def _read(self) -> Any:
        with self._lock:
            if self._processor is None:
                self._processor = read_processor(self._folder, str(self._checkpoint.hf_config.get("model_type")))
            return self._processor


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


def read_processor(folder: Path, model_type: str) -> Any:
    """Read the processor of a model's folder.

    A part whose package is not installed, such as that of videos without torchvision, is None. Raises ModelError for a
    folder whose files are missing or damaged.
    """
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name = PROCESSOR_MAPPING_NAMES.get(model_type)
    own = _OWN.get(str(name))
    processor_class = None if name is None else getattr(transformers, name, None)
    if processor_class is None:
        raise ModelError(f"Transformers {transformers.__version__} has no processor for model_type={model_type!r}.")
    try:
        if own is not None:
            fields, _ = transformers.ProcessorMixin.get_processor_dict(folder, local_files_only=True)
            return own.make({part: _read_part(folder, part) for part in own.parts}, fields)
        made: Any = type(processor_class.__name__, (processor_class,), {"check_argument_for_proper_class": _unchecked})
        fields, _ = made.get_processor_dict(folder, local_files_only=True)
        return made.from_args_and_dict([_read_part(folder, part) for part in made.get_attributes()], fields)
    except Exception as error:  # damaged files raise anything
        raise ModelError(
            f"The processor of {folder.name} ({name}) cannot be read: {error} It needs "
            "preprocessor_config.json or processor_config.json, and the tokenizer's files."
        ) from error


def _unchecked(_: Any, __: str, argument: Any) -> type[Any]:
    """Class of a part: one that is missing here has none to be checked against."""
    return type(argument)


def _read_part(folder: Path, name: str) -> Any:
    import transformers

    readers = {
        "tokenizer": transformers.AutoTokenizer,
        "image_processor": transformers.AutoImageProcessor,
        "feature_extractor": transformers.AutoFeatureExtractor,
        "audio_processor": transformers.AutoFeatureExtractor,
    }
    if name == "video_processor":
        from transformers.utils import is_torchvision_available

        if not is_torchvision_available():
            return None
        readers[name] = transformers.AutoVideoProcessor
    return readers[name].from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _key(media: Media, options: Mapping[str, Any], uuid: str | None) -> str:
    """Key of an item: its content, or the caller's name for it, with the processor's options."""
    content = media.content_hash() if uuid is None else f"uuid {uuid}"
    form = f"{media.modality} {media.detail} {sorted(options.items())!r} {content}"
    return hashlib.blake2b(form.encode(), digest_size=16).hexdigest()


def _array(values: Any) -> ArrayBytes:
    """An encoder's input. A list of arrays of equal shapes is one array."""
    if isinstance(values, (list, tuple)):
        values = np.stack([np.asarray(one) for one in values])
    return ArrayBytes.of(values.numpy() if hasattr(values, "numpy") else values)
