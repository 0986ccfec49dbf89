"""Embeddings of a prompt's tokens, which a caller gives in place of text."""

from __future__ import annotations

from typing import Any

from penstock.config import ModelConfig
from penstock.contract.array_bytes import ArrayBytes
from penstock.features.multimodal.messages import EMBEDDINGS, MediaItem, MediaPart, Run
from penstock.media.features import rows_of
from penstock.media.item import FEATURES, Media

# Rows of an item: blocks of the KV cache that are multiples of it are shared by their content alone.
_ROWS_OF_ITEM = 16


def part_of_embeddings(given: Any, model: ModelConfig, max_rows: int) -> tuple[list[int], MediaPart]:
    """A token per embedding (`prompt_embeds`), and these as a part.

    max_rows: most rows of a saved tensor. Raises InvalidRequest for embeddings that do not fit the model.
    """
    width = model.hf_config.get("word_embed_proj_dim") or model.hidden_size
    rows = rows_of("prompt_embeds", given, width, max_rows)
    items = []
    for start in range(0, len(rows), _ROWS_OF_ITEM):
        own = rows[start : start + _ROWS_OF_ITEM]
        items.append(
            MediaItem(
                modality=EMBEDDINGS,
                runs=(Run(start=start, length=len(own)),),
                key=Media(EMBEDDINGS, own, is_features=True).content_hash(),
                inputs={FEATURES: ArrayBytes.of(own)},
            )
        )
    return [0] * len(rows), MediaPart(items=items)
