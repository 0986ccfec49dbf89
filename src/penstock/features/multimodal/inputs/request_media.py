"""Media of prompts: from `multi_modal_data` to expanded tokens and the part of the request with the items."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from penstock.config import EngineConfig, ModelConfig
from penstock.config.multimodal import MultimodalConfig
from penstock.contract import Parts
from penstock.contract.param_checks import shown
from penstock.errors import InvalidRequest
from penstock.features.multimodal.inputs.images_alone import ImagesAlone
from penstock.features.multimodal.inputs.placeholders import PlacedItem, Placeholders
from penstock.media.item import DATA, MEDIA_KEYS, OPTIONS, UUIDS
from penstock.media.processors.processor import MediaProcessor
from penstock.text.tokenizer import Tokenizer

_GIB = 1 << 30


class RequestMedia:
    """Reader of the media of one engine's prompts. Any thread may call it."""

    def __init__(self, model: ModelConfig, config: MultimodalConfig, tokenizer: Tokenizer) -> None:
        checkpoint = model.multimodal
        assert checkpoint is not None, "only multimodal models have media"
        self.limits = model.media_limits
        cache_bytes = int(config.mm_processor_cache_gb * _GIB)
        self.processor = MediaProcessor(model.tokenizer_folder, checkpoint, model.mm_processor_kwargs, cache_bytes)
        self._placeholders = Placeholders(checkpoint, lambda text: tokenizer.encode(text, add_special_tokens=False))

    def reset_cache(self) -> None:
        """Forget all processed items."""
        self.processor.reset_cache()

    @property
    def markers(self) -> Mapping[str, str]:
        """Text that stands for an item in a prompt, by modality."""
        return _Markers(self)

    def expand(self, prompt: Any, encode: Callable[[str], list[int]]) -> Any:
        """The prompt with its tokens, placeholders replaced, and its items as a part; others as they are.

        prompt: with its media loaded (`MediaIntake`). encode: tokenises the prompt's text. Raises InvalidRequest for
        media or placeholders that do not fit.
        """
        if not isinstance(prompt, Mapping) or not any(prompt.get(key) for key in MEDIA_KEYS):
            return prompt
        fields = {name: value for name, value in prompt.items() if name not in MEDIA_KEYS}
        placed = self._placed(prompt)
        if not placed:
            return fields
        text, token_ids = fields.get("prompt"), fields.get("prompt_token_ids")
        if token_ids is None:
            if not isinstance(text, str):
                raise InvalidRequest("The prompt has media, but neither text nor tokens. Give prompt.")
            expanded, placed = self._placeholders.expand_text(str(text), placed)
            token_ids = encode(expanded)
        else:
            token_ids, placed = self._placeholders.expand_ids(list(token_ids), placed)
        part = self._placeholders.part(token_ids, placed)
        parts = {**(fields.get("parts") or {}), **Parts.of([part])}
        return {**fields, "prompt_token_ids": token_ids, "parts": parts}

    def _placed(self, prompt: Mapping[str, Any]) -> list[PlacedItem]:
        options = prompt.get(OPTIONS) or {}
        if not isinstance(options, Mapping):
            raise InvalidRequest(f"{OPTIONS}={shown(options)} is not valid. Allowed: a dictionary.")
        data, uuids = prompt.get(DATA) or {}, prompt.get(UUIDS) or {}
        placed = []
        for modality, items in data.items():
            names = uuids.get(modality) or [None] * len(items)
            for media, uuid in zip(items, names, strict=True):
                placed.append(PlacedItem(modality, self.processor.process(media, options, uuid)))
        return placed


class _Markers(Mapping[str, str]):
    """Placeholders of a processor, which is read when the first one is asked for."""

    def __init__(self, media: RequestMedia) -> None:
        self._media = media

    def __getitem__(self, modality: str) -> str:
        return self._media.processor.placeholder(modality)

    def __iter__(self) -> Iterator[str]:
        return iter(self._media.limits)

    def __len__(self) -> int:
        return len(self._media.limits)

    def __contains__(self, modality: object) -> bool:
        return modality in self._media.limits


def request_media(config: EngineConfig, tokenizer: Tokenizer) -> RequestMedia | ImagesAlone | None:
    """Reader of the media of an engine's prompts; None for an engine that takes text alone."""
    if not config.model.media_limits:
        return None
    if config.model.pooling is not None and config.model.pooling.architecture.is_dual_encoder:
        return ImagesAlone(config.model)
    return RequestMedia(config.model, config.multimodal, tokenizer)
