"""Features that a caller gives in place of an item: rows of floats, which an encoder would make of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.contract.param_checks import shown
from penstock.errors import InvalidRequest
from penstock.media.item import Media
from penstock.media.saved_tensor import read_saved_tensor

# Rows of a saved tensor of features, before they are compared with the context.
_MAX_ROWS = 1 << 20


def _values_of(name: str, given: Any, max_rows: int) -> Any:
    """Array of a tensor, or of a saved one in base64; anything else as it is."""
    if isinstance(given, str):
        return read_saved_tensor(name, given, max_rows)
    if hasattr(given, "detach"):
        values = given.detach().cpu()
        values = values.float() if str(values.dtype) in ("torch.bfloat16", "torch.float64") else values
        return values.numpy()
    return given


def rows_of(name: str, given: Any, width: int | None, max_rows: int) -> NDArray[np.floating[Any]]:
    """Rows of a tensor or array of floats, [P, D] or [1, P, D], or of a saved one in base64; float32 or float16.

    name: of the field. width: D; None allows any. Raises InvalidRequest for other shapes, dtypes, and values that are
    not finite.
    """
    values = _values_of(name, given, max_rows)
    if not isinstance(values, np.ndarray):
        raise InvalidRequest(
            f"{name} is a {type(given).__name__}: {shown(given)}. Allowed: a tensor or an array of floats."
        )
    if values.ndim == 3 and len(values) == 1:
        values = values[0]
    if values.ndim != 2 or width not in (None, values.shape[1]) or not values.size:
        size = "hidden size" if width is None else width
        raise InvalidRequest(
            f"{name} has the shape {list(values.shape)}. Allowed: [tokens, {size}] or [1, tokens, {size}], with a row "
            "per token."
        )
    if values.dtype.kind != "f":
        raise InvalidRequest(f"{name} has the dtype {values.dtype}. Allowed: float32, bfloat16, float16.")
    if values.dtype.itemsize > 4:
        values = values.astype(np.float32)
    if not np.isfinite(values).all():
        raise InvalidRequest(f"{name} has values that are not finite numbers.")
    return np.ascontiguousarray(values)


def are_features(modality: str, given: Any) -> bool:
    """Whether items are given by their features: as {"image_embeds": ...}, or as a tensor of floats [L, D]."""
    if isinstance(given, Mapping):
        return f"{modality}_embeds" in given
    is_tensor = hasattr(given, "detach") and given.is_floating_point()
    return bool(is_tensor and (given.ndim == 2 or (given.ndim == 3 and len(given) == 1)))


def features_of(modality: str, given: Any) -> list[Media]:
    """Items given by their features: a tensor [L, D], or {"image_embeds": [L, D], "image_grid_thw": [3]}.

    With grids [N, 3] it has the rows of several after one another, each as long as its grid says. Raises InvalidRequest
    for others.
    """
    name, grid_name = f"{modality}_embeds", f"{modality}_grid_thw"
    fields = given if isinstance(given, Mapping) else {name: given}
    unknown = next((field for field in fields if field not in (name, grid_name)), None)
    if unknown is not None:
        raise InvalidRequest(f"It has a field {shown(unknown)}. Allowed: {name}, {grid_name}.")
    rows = rows_of(name, fields[name], None, _MAX_ROWS)
    grids = [None] if fields.get(grid_name) is None else _grids(grid_name, fields[grid_name])
    sizes = [int(np.prod(grid)) for grid in grids if grid is not None]
    # Patches of a row: those that the model merges.
    merged, rest = divmod(sum(sizes), len(rows))
    if rest or any(size % merged for size in sizes):
        raise InvalidRequest(f"{name} has {len(rows)} rows, which do not fit {grid_name}={grids}.")
    pieces = np.split(rows, np.cumsum([size // merged for size in sizes[:-1]]))
    return [Media(modality, piece, is_features=True, grid=grid) for piece, grid in zip(pieces, grids, strict=True)]


def _grids(name: str, given: Any) -> list[tuple[int, ...]]:
    values = np.asarray(_values_of(name, given, _MAX_ROWS))
    values = values[None] if values.ndim == 1 else values
    is_valid = values.ndim == 2 and values.shape[1] == 3 and values.dtype.kind in "iu" and len(values) > 0
    if not is_valid or bool((values < 1).any()):
        raise InvalidRequest(
            f"{name} has the shape {list(values.shape)}. Allowed: time, height and width of each item."
        )
    return [tuple(row) for row in values.tolist()]
