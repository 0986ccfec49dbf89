"""Features that a caller gives: embeddings of a prompt, and of images, in place of what an encoder computes."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.config import ModelConfig
from penstock.contract import Parts
from penstock.contract.array_bytes import ArrayBytes
from penstock.contract.param_checks import shown
from penstock.errors import InvalidRequest
from penstock.features.multimodal.inputs.saved_tensor import read_saved_tensor
from penstock.features.multimodal.messages import EMBEDDINGS, FEATURES, MediaItem, MediaPart, Run

# Rows of an item: blocks of the KV cache that are multiples of it are shared by their content alone.
_ROWS_OF_ITEM = 16


def rows_of(name: str, given: Any, width: int, max_rows: int) -> NDArray[np.floating[Any]]:
    """Rows of a tensor or array of floats, [P, D] or [1, P, D], or of a saved one in base64; float32 or float16.

    name: of the field. width: D. Raises InvalidRequest for other shapes, dtypes, and values that are not finite.
    """
    if isinstance(given, str):
        values: Any = read_saved_tensor(name, given, max_rows)
    elif hasattr(given, "detach"):
        values = given.detach().cpu()
        values = values.float() if str(values.dtype) in ("torch.bfloat16", "torch.float64") else values
        values = values.numpy()
    else:
        values = given
    if not isinstance(values, np.ndarray):
        raise InvalidRequest(
            f"{name} is a {type(given).__name__}: {shown(given)}. Allowed: a tensor or an array of floats."
        )
    if values.ndim == 3 and len(values) == 1:
        values = values[0]
    if values.ndim != 2 or values.shape[1] != width or not len(values):
        raise InvalidRequest(
            f"{name} has the shape {list(values.shape)}. Allowed: [tokens, {width}], with a row per token."
        )
    if values.dtype.kind != "f":
        raise InvalidRequest(f"{name} has the dtype {values.dtype}. Allowed: float32, bfloat16, float16.")
    if values.dtype.itemsize > 4:
        values = values.astype(np.float32)
    if not np.isfinite(values).all():
        raise InvalidRequest(f"{name} has values that are not finite numbers.")
    return np.ascontiguousarray(values)


def content_key(rows: NDArray[np.floating[Any]]) -> str:
    """Key of features by their values."""
    digest = hashlib.blake2b(f"{rows.dtype} {rows.shape}".encode(), digest_size=16)
    digest.update(rows.tobytes())
    return digest.hexdigest()


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
