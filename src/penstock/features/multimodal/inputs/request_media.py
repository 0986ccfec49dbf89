"""Media of prompts: from `multi_modal_data` to expanded tokens and the part of the request with the items."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.config import EngineConfig, ModelConfig
from penstock.config.multimodal import MultimodalConfig
from penstock.contract import Parts
from penstock.contract.param_checks import shown
from penstock.errors import InvalidRequest
from penstock.features.multimodal.inputs.decode import MediaLoader
from penstock.features.multimodal.inputs.media import Media
from penstock.features.multimodal.inputs.placeholders import PlacedItem, Placeholders
from penstock.features.multimodal.inputs.processor import MediaProcessor
from penstock.text.tokenizer import Tokenizer

# Fields of a prompt with media.
DATA, OPTIONS, UUIDS = "multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids"
MEDIA_KEYS = (DATA, OPTIONS, UUIDS)
_GIB = 1 << 30


class RequestMedia:
    """Reader of the media of one engine's prompts. Any thread may call it."""

    def __init__(self, model: ModelConfig, config: MultimodalConfig, tokenizer: Tokenizer, loader: MediaLoader) -> None:
        checkpoint = model.multimodal
        assert checkpoint is not None, "only multimodal models have media"
        self._limits = model.media_limits
        self._loader = loader
        cache_bytes = int(config.mm_processor_cache_gb * _GIB)
        self.processor = MediaProcessor(model.tokenizer_folder, checkpoint, model.mm_processor_kwargs, cache_bytes)
        self._placeholders = Placeholders(checkpoint, lambda text: tokenizer.encode(text, add_special_tokens=False))

    def expand(self, prompt: Any, encode: Callable[[str], list[int]]) -> Any:
        """The prompt with its tokens, placeholders replaced, and its items as a part; others as they are.

        encode: tokenises the prompt's text. Raises InvalidRequest for media or placeholders that do not fit, and
        UnsupportedParameter for media of a kind that the model does not take.
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
            token_ids = encode(type(text)(self._placeholders.expand_text(text, placed)))
        else:
            token_ids = self._placeholders.expand_ids(list(token_ids), placed)
        part = self._placeholders.part(token_ids, placed)
        parts = {**(fields.get("parts") or {}), **Parts.of([part])}
        return {**fields, "prompt_token_ids": token_ids, "parts": parts}

    def _placed(self, prompt: Mapping[str, Any]) -> list[PlacedItem]:
        data, options, uuids = (prompt.get(key) or {} for key in MEDIA_KEYS)
        for key, value in zip(MEDIA_KEYS, (data, options, uuids), strict=True):
            if not isinstance(value, Mapping):
                raise InvalidRequest(f"{key}={shown(value)} is a {type(value).__name__}. Allowed: a dictionary.")
        placed = []
        for modality, given in data.items():
            items = list(given) if isinstance(given, (list, tuple)) and not _is_one(given) else [given]
            self._check_count(modality, len(items))
            names = _uuids_of(uuids.get(modality), modality, len(items))
            placeholder = self.processor.placeholder(modality)
            for number, (item, uuid) in enumerate(zip(items, names, strict=True)):
                name = f"{DATA}[{modality!r}][{number}]"
                media = item if isinstance(item, Media) else self._loader.load(modality, item, name)
                placed.append(PlacedItem(modality, placeholder, self.processor.process(media, options, uuid)))
        return placed

    def _check_count(self, modality: Any, count: int) -> None:
        limit = self._limits.get(modality, 0)
        if count > limit:
            allowed = ", ".join(f"up to {count} of {name}" for name, count in self._limits.items())
            raise InvalidRequest(
                f"The prompt has {count} of {modality!r}. Allowed in this engine: {allowed} (limit_mm_per_prompt)."
            )


def _is_one(given: Sequence[Any]) -> bool:
    """Whether a sequence is one item: samples with their rate, or the frames of a video with its metadata."""
    return isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], (int, float, Mapping))


def _uuids_of(given: Any, modality: str, count: int) -> Sequence[str | None]:
    names = [None] * count if given is None else [given] if isinstance(given, str) else list(given)
    if len(names) != count or not all(name is None or isinstance(name, str) for name in names):
        raise InvalidRequest(
            f"{UUIDS} of {modality} is {shown(given)}. Allowed: a text or null for each of the {count} items."
        )
    return names


def request_media(config: EngineConfig, tokenizer: Tokenizer) -> RequestMedia | None:
    """Reader of the media of an engine's prompts; None for an engine that takes text alone."""
    if not config.model.media_limits:
        return None
    return RequestMedia(config.model, config.multimodal, tokenizer, MediaLoader())
