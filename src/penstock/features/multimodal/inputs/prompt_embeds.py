"""Embeddings of a prompt's tokens, which a caller gives in place of text."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.config import ModelConfig
from penstock.contract import Parts
from penstock.contract.array_bytes import ArrayBytes
from penstock.errors import InvalidRequest
from penstock.features.multimodal.messages import EMBEDDINGS, MediaItem, MediaPart, Run
from penstock.media.features import rows_of
from penstock.media.item import FEATURES

# Rows of an item: blocks of the KV cache that are multiples of it are shared by their content alone.
_ROWS_OF_ITEM = 16


def prompt_of_embeddings(prompt: Any, model: ModelConfig, max_rows: int) -> Any:
    """The prompt with a placeholder per embedding (`prompt_embeds`), and these as a part.

    max_rows: most rows of a saved tensor. Raises InvalidRequest for embeddings that do not fit the model, or that are
    beside other contents.
    """
    fields: dict[str, Any] = dict(prompt)
    given = fields.pop("prompt_embeds")
    for key in ("prompt_token_ids", "multi_modal_data"):
        if fields.pop(key, None) is not None:
            raise InvalidRequest(f"The prompt has prompt_embeds and {key}. Give one of them.")
    width = model.hf_config.get("word_embed_proj_dim") or model.hidden_size
    rows = rows_of("prompt_embeds", given, width, max_rows)
    parts = {**(fields.get("parts") or {}), **Parts.of([_part_of_embeddings(rows)])}
    return {**fields, "prompt_token_ids": [0] * len(rows), "parts": parts}


def _part_of_embeddings(rows: NDArray[np.floating[Any]]) -> MediaPart:
    """The part of a request whose prompt has these embeddings."""
    items = []
    for start in range(0, len(rows), _ROWS_OF_ITEM):
        own = rows[start : start + _ROWS_OF_ITEM]
        items.append(
            MediaItem(
                modality=EMBEDDINGS,
                runs=(Run(start=start, length=len(own)),),
                key=content_key(own),
                inputs={FEATURES: ArrayBytes.of(own)},
            )
        )
    return MediaPart(items=items)


def content_key(rows: NDArray[np.floating[Any]]) -> str:
    """Key of features by their values."""
    digest = hashlib.blake2b(f"{rows.dtype} {rows.shape}".encode(), digest_size=16)
    digest.update(rows.tobytes())
    return digest.hexdigest()
