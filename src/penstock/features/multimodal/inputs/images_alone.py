"""Images as prompts of their own, of models that embed an image or a text."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config import ModelConfig
from penstock.contract import Parts
from penstock.contract.array_bytes import ArrayBytes
from penstock.errors import InvalidRequest, ModelError, UnsupportedParameter
from penstock.features.multimodal.messages import MediaItem, MediaPart, Run
from penstock.media.item import DATA, IMAGE, MEDIA_KEYS, OPTIONS


class ImagesAlone:
    """Reader of the images of one engine's prompts, each of which has one token. Any thread may call it."""

    def __init__(self, model: ModelConfig) -> None:
        self.limits = {IMAGE: 1}
        # Templates are of texts.
        self.markers: Mapping[str, str] = {IMAGE: ""}
        self._folder = model.tokenizer_folder
        self._lock = threading.Lock()
        self._processor: Any = None

    def expand(self, prompt: Any, encode: Callable[[str], list[int]]) -> Any:
        """The prompt as a token with its image; others as they are. Raises InvalidRequest for an image with a text."""
        if not isinstance(prompt, Mapping) or not any(prompt.get(key) for key in MEDIA_KEYS):
            return prompt
        fields = {name: value for name, value in prompt.items() if name not in MEDIA_KEYS}
        images = (prompt.get(DATA) or {}).get(IMAGE) or []
        if prompt.get(OPTIONS):
            raise UnsupportedParameter(f"{OPTIONS} is not for models that embed images. Leave it out.")
        if not images:
            return fields
        if str(fields.pop("prompt", None) or "").strip() or fields.get("prompt_token_ids") is not None:
            raise InvalidRequest("The prompt has an image and a text, and the model embeds one of them. Give one.")
        (media,) = images
        if media.is_features:
            raise UnsupportedParameter("image_embeds is not for models that embed images. Give the image.")
        with self._lock:
            if self._processor is None:
                self._processor = _read(self._folder)
        made = self._processor(images=[media.value], return_tensors="np")
        inputs = {name: ArrayBytes.of(np.asarray(values)) for name, values in made.items()}
        item = MediaItem(modality=IMAGE, runs=(Run(start=0, length=1),), key=media.content_hash(), inputs=inputs)
        parts = {**(fields.get("parts") or {}), **Parts.of([MediaPart(items=[item])])}
        return {**fields, "prompt_token_ids": [0], "parts": parts}

    def reset_cache(self) -> None:
        """Nothing is kept."""


def _read(folder: Path) -> Any:
    import transformers

    try:
        return transformers.AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damaged files raise anything
        raise ModelError(f"The image processor of {folder.name} cannot be read: {error}") from error
