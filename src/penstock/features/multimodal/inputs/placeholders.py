"""Expansion of prompts with media: each placeholder becomes the tokens of its item."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.checkpoints.multimodal import MultimodalCheckpoint
from penstock.errors import InvalidRequest
from penstock.features.multimodal.inputs.processor import ProcessedItem
from penstock.features.multimodal.messages import MediaItem, MediaPart, Run


class PlacedItem(NamedTuple):
    """An item of a prompt. placeholder: its text in the prompt."""

    modality: str
    placeholder: str
    processed: ProcessedItem


class Placeholders:
    """Placeholders of one multimodal model. tokenize: token ids of a text without special tokens around it."""

    def __init__(self, checkpoint: MultimodalCheckpoint, tokenize: Callable[[str], Sequence[int]]) -> None:
        self._checkpoint = checkpoint
        self._tokenize = tokenize
        self._row_ids = {
            modality: token_id
            for modality in checkpoint.modalities
            if (token_id := _token_id(checkpoint.hf_config, modality)) is not None
        }

    def expand_text(self, text: str, items: Sequence[PlacedItem]) -> str:
        """Replace the placeholders of a text, of each modality in the order of its items.

        Raises InvalidRequest unless there are as many as items.
        """
        for modality in dict.fromkeys(item.modality for item in items):
            texts = [item.processed.text for item in items if item.modality == modality]
            placeholder = next(item.placeholder for item in items if item.modality == modality)
            pieces = text.split(placeholder)
            self._check_count(modality, len(pieces) - 1, len(texts), repr(placeholder))
            text = pieces[0] + "".join(new + piece for new, piece in zip(texts, pieces[1:], strict=True))
        return text

    def expand_ids(self, token_ids: list[int], items: Sequence[PlacedItem]) -> list[int]:
        """Replace the placeholders among token ids, unless they are expanded already."""
        for modality in dict.fromkeys(item.modality for item in items):
            own = [item for item in items if item.modality == modality]
            texts = [list(self._tokenize(item.processed.text)) for item in own]
            row_id = self._row_ids[modality]
            if token_ids.count(row_id) == sum(ids.count(row_id) for ids in texts) > 0 and len(texts) > 0:
                continue
            (placeholder_id,) = self._tokenize(own[0].placeholder)
            places = [place for place, token_id in enumerate(token_ids) if token_id == placeholder_id]
            self._check_count(modality, len(places), len(own), f"token id {placeholder_id}")
            expanded: list[int] = []
            for place, start, ids in zip(places, [0, *(one + 1 for one in places)], texts, strict=False):
                expanded += [*token_ids[start:place], *ids]
            token_ids = expanded + token_ids[places[-1] + 1 :]
        return token_ids

    def part(self, token_ids: Sequence[int], items: Sequence[PlacedItem]) -> MediaPart:
        """Find the items' tokens in an expanded prompt. Raises InvalidRequest for tokens that belong to no item."""
        ids = np.asarray(token_ids, dtype=np.int64)
        made: list[MediaItem] = []
        for modality in dict.fromkeys(item.modality for item in items):
            row_id = self._row_ids[modality]
            places = np.flatnonzero(ids == row_id)
            begin = 0
            for item in (one for one in items if one.modality == modality):
                count = list(self._tokenize(item.processed.text)).count(row_id)
                own = places[begin : begin + count]
                if len(own) < count or count == 0:
                    self._check_count(modality, len(places), begin + count, f"tokens of id {row_id}")
                    raise InvalidRequest(f"The {modality} has no tokens in the prompt.")
                made.append(self._item(item, own))
                begin += count
            if begin != len(places):
                self._check_count(modality, len(places), begin, f"tokens of id {row_id}")
        return MediaPart(items=sorted(made, key=lambda item: item.start))

    def _item(self, item: PlacedItem, places: np.ndarray) -> MediaItem:
        breaks = np.flatnonzero(np.diff(places) != 1) + 1
        pieces = np.split(places, breaks)
        grids = self._grids(item, len(pieces))
        runs = tuple(
            Run(start=int(piece[0]), length=len(piece), grid=grid) for piece, grid in zip(pieces, grids, strict=True)
        )
        return MediaItem(
            modality=item.modality,
            runs=runs,
            key=item.processed.key,
            inputs=item.processed.inputs,
            may_cut=self._checkpoint.may_cut_items,
        )

    def _grids(self, item: PlacedItem, num_runs: int) -> list[tuple[int, int, int] | None]:
        """Grid of each run, for models with positions in time, height and width."""
        given = item.processed.inputs.get(f"{item.modality}_grid_thw")
        if given is None or self._checkpoint.rope_sections is None:
            return [None] * num_runs
        merge = int(self._checkpoint.hf_config["vision_config"].get("spatial_merge_size", 1))
        time, height, width = (int(size) for size in given.to_numpy().reshape(-1)[:3])
        if num_runs == time > 1:
            return [(1, height // merge, width // merge)] * time
        return [(time, height // merge, width // merge)]

    def _check_count(self, modality: str, found: int, wanted: int, what: str) -> None:
        if found != wanted:
            raise InvalidRequest(
                f"The prompt has {found} x {what} for {wanted} of {modality}. Give one placeholder per item, in the "
                "order of the items; LLM.chat puts them there."
            )


def _token_id(hf_config: Mapping[str, Any], modality: str) -> int | None:
    names = (f"{modality}_token_id", f"{modality}_token_index")
    return next((hf_config[name] for name in names if isinstance(hf_config.get(name), int)), None)
