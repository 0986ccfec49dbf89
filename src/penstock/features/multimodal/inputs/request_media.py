"""Media of prompts: from loaded items to expanded tokens and the part of the request with the items."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from penstock.config import EngineConfig, ModelConfig
from penstock.config.multimodal import MultimodalConfig
from penstock.contract.array_bytes import ArrayBytes
from penstock.errors import InvalidRequest, UnsupportedParameter
from penstock.features.multimodal.inputs.placeholders import Placeholders
from penstock.features.multimodal.messages import MediaItem, MediaPart, Run
from penstock.media.content_parts import Markers
from penstock.media.item import IMAGE, Media
from penstock.media.processors.processor import MediaProcessor, ProcessedItem
from penstock.media.processors.reading import read_image_processor, read_processor
from penstock.observability.units import format_bytes
from penstock.text.tokenizer import Tokenizer

_GIB = 1 << 30
# What the processor makes of the media of one prompt: it is sent to the workers, and kept until the request ends.
_MAX_BYTES = 1 << 30
# Results of a processor that say which tokens are padding.
_OF_TEXT = frozenset({"attention_mask", "token_type_ids", "mm_token_type_ids"})


class LoadedPrompt(NamedTuple):
    """A prompt with loaded media.

    items: each with the name that the caller gave it in place of its content. options: of the model's processor.
    """

    items: list[tuple[Media, str | None]]
    options: Mapping[str, Any]
    text: str | None
    token_ids: list[int] | None


class RequestMedia:
    """Reader of the media of one engine's prompts. Any thread may call it. limits: items of a prompt, by modality."""

    def __init__(self, model: ModelConfig, config: MultimodalConfig, tokenizer: Tokenizer) -> None:
        checkpoint = model.multimodal
        assert checkpoint is not None, "only multimodal models have media"
        self.limits = model.media_limits
        cache_bytes = int(config.mm_processor_cache_gb * _GIB)
        self._processor = MediaProcessor(model.tokenizer_folder, checkpoint, model.mm_processor_kwargs, cache_bytes)
        self._placeholders = Placeholders(checkpoint, lambda text: tokenizer.encode(text, add_special_tokens=False))

    @property
    def markers(self) -> Markers:
        """Texts that stand for an item in a prompt, by modality; the processor is read when the first is called."""
        return {modality: partial(self._processor.markers, modality) for modality in self.limits}

    @property
    def cache_counts(self) -> tuple[int, int]:
        """Numbers of items that were looked up among processed ones so far, and found."""
        return self._processor.num_queries, self._processor.num_hits

    def reset_cache(self) -> None:
        """Forget all processed items."""
        self._processor.reset_cache()

    def expand(self, prompt: LoadedPrompt, encode: Callable[[str], list[int]]) -> tuple[list[int], MediaPart]:
        """Tokens of a prompt, placeholders replaced, and its items as a part. encode: tokenises the prompt's text.

        Raises InvalidRequest for media or placeholders that do not fit.
        """
        placed: list[ProcessedItem] = []
        num_bytes = 0
        for number, (media, uuid) in enumerate(prompt.items, 1):
            processed = self._processor.process(media, prompt.options, uuid)
            num_bytes += processed.num_bytes
            if num_bytes > _MAX_BYTES:
                raise InvalidRequest(
                    f"The prompt's media have more than {format_bytes(_MAX_BYTES)} once the model's processor has read "
                    f"them, with item {number} of {len(prompt.items)} ({media.modality}). Give fewer of them, or "
                    "smaller ones."
                )
            placed.append(processed)
        if prompt.token_ids is not None:
            token_ids, placed = self._placeholders.expand_ids(prompt.token_ids, placed)
        elif prompt.text is not None:
            text, placed = self._placeholders.expand_text(prompt.text, placed)
            token_ids = encode(text)
        else:
            raise InvalidRequest("The prompt has media, but neither text nor tokens. Give prompt.")
        return token_ids, self._placeholders.part(token_ids, placed)


class ImagesAlone:
    """Reader of the images of one engine's prompts, each of which has one token: of models that embed an image or a
    text. Any thread may call it.
    """

    def __init__(self, model: ModelConfig) -> None:
        self.limits = {IMAGE: 1}
        # Templates are of texts.
        self.markers: Markers = {IMAGE: lambda: ("",)}
        self._folder = model.tokenizer_folder
        self.cache_counts = 0, 0

    def reset_cache(self) -> None:
        """Nothing is kept."""

    def expand(self, prompt: LoadedPrompt, _: Callable[[str], list[int]]) -> tuple[list[int], MediaPart]:
        """A token and its image. Raises InvalidRequest for an image with a text."""
        ((media, _uuid),) = prompt.items
        if prompt.options:
            raise UnsupportedParameter("mm_processor_kwargs is not for models that embed images. Leave it out.")
        if (prompt.text or "").strip() or prompt.token_ids is not None:
            raise InvalidRequest("The prompt has an image and a text, and the model embeds one of them. Give one.")
        if media.is_features:
            raise UnsupportedParameter("image_embeds is not for models that embed images. Give the image.")
        inputs = self._inputs(media)
        token_ids = self._token_ids(inputs)
        run = Run(start=0, length=len(token_ids))
        item = MediaItem(modality=IMAGE, runs=(run,), key=media.content_hash(), inputs=inputs)
        return token_ids, MediaPart(items=[item])

    def _inputs(self, media: Media) -> dict[str, ArrayBytes]:
        made = self._processor(images=[media.value], return_tensors="pt")
        return {name: ArrayBytes.of(np.asarray(made[name])) for name in made if name not in _OF_TEXT}

    def _token_ids(self, _: Mapping[str, ArrayBytes]) -> list[int]:
        return [0]

    @cached_property
    def _processor(self) -> Any:
        return read_image_processor(self._folder)


class PagesAlone(ImagesAlone):
    """Reader of the images of pages, which have all the tokens that the model's processor gives them."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        assert model.multimodal is not None, "a model of images"
        self._model_type = str(model.multimodal.hf_config.get("model_type"))

    def _token_ids(self, inputs: Mapping[str, ArrayBytes]) -> list[int]:
        return [int(token_id) for token_id in inputs["input_ids"].to_numpy()[0]]

    @cached_property
    def _processor(self) -> Any:
        return read_processor(self._folder, self._model_type)


def request_media(config: EngineConfig, tokenizer: Tokenizer) -> RequestMedia | ImagesAlone | None:
    """Reader of the media of an engine's prompts; None for an engine that takes text alone."""
    if not config.model.media_limits:
        return None
    architecture = None if config.model.pooling is None else config.model.pooling.architecture
    if architecture is not None and architecture.embeds_images:
        return (PagesAlone if architecture.is_page_encoder else ImagesAlone)(config.model)
    return RequestMedia(config.model, config.multimodal, tokenizer)
