"""Expansion of prompts with media: each placeholder becomes the tokens of its item."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from penstock.checkpoints.multimodal import MultimodalCheckpoint
from penstock.errors import InvalidRequest
from penstock.features.multimodal.messages import MediaItem, MediaPart, Run
from penstock.media.processors.processor import ProcessedItem, row_token_id


class Placeholders:
    """Placeholders of one multimodal model. tokenize: token ids of a text without special tokens around it."""

    def __init__(self, checkpoint: MultimodalCheckpoint, tokenize: Callable[[str], Sequence[int]]) -> None:
        self._checkpoint = checkpoint
        self._tokenize = tokenize
        self._row_ids = {
            modality: token_id
            for modality in checkpoint.modalities
            if (token_id := row_token_id(checkpoint.hf_config, modality)) is not None
        }

    def expand_text(self, text: str, items: Sequence[ProcessedItem]) -> tuple[str, list[ProcessedItem]]:
        """Replace the placeholders of a text, of each modality in the order of its items.

        Returns the items in the order of the text too. Raises InvalidRequest unless there are as many as items.
        """
        by_modality = _by_modality(items)
        forms = {modality: "|".join(map(re.escape, own[0].placeholders)) for modality, own in by_modality.items()}
        pattern = "|".join(f"(?P<{modality}>{form})" for modality, form in forms.items())
        found = list(re.finditer(pattern, text)) if pattern else []
        ordered = self._in_order([str(match.lastgroup) for match in found], by_modality)
        pieces, done = [], 0
        for match, item in zip(found, ordered, strict=True):
            pieces += [text[done : match.start()], item.text]
            done = match.end()
        return "".join([*pieces, text[done:]]), ordered

    def expand_ids(self, token_ids: list[int], items: Sequence[ProcessedItem]) -> tuple[list[int], list[ProcessedItem]]:
        """Replace the placeholders among token ids, unless they are expanded already; otherwise as `expand_text`."""
        by_modality = _by_modality(items)
        if self._are_expanded(token_ids, by_modality):
            return token_ids, list(items)
        forms = [
            (list(self._tokenize(form)), modality)
            for modality, own in by_modality.items()
            for form in own[0].placeholders
        ]
        firsts = np.unique([ids[0] for ids, _ in forms])
        found: list[tuple[int, int, str]] = []
        for place in np.flatnonzero(np.isin(token_ids, firsts)).tolist():
            for ids, modality in forms:
                if token_ids[place : place + len(ids)] == ids and (not found or place >= found[-1][1]):
                    found.append((place, place + len(ids), modality))
        ordered = self._in_order([modality for _, _, modality in found], by_modality)
        expanded, done = [], 0
        for (start, stop, _), item in zip(found, ordered, strict=True):
            expanded += [*token_ids[done:start], *self._tokenize(item.text)]
            done = stop
        return [*expanded, *token_ids[done:]], ordered

    def part(self, token_ids: Sequence[int], items: Sequence[ProcessedItem]) -> MediaPart:
        """Find the items' tokens in an expanded prompt. items: in the prompt's order.

        Raises InvalidRequest for tokens that belong to no item.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        places = {row_id: np.flatnonzero(ids == row_id) for row_id in self._row_ids.values()}
        begins = dict.fromkeys(places, 0)
        made: list[MediaItem] = []
        for item in items:
            row_id = self._row_ids[item.modality]
            begin, count = begins[row_id], list(self._tokenize(item.text)).count(row_id)
            own = places[row_id][begin : begin + count]
            if len(own) < count or count == 0:
                self._check_count(item.modality, len(places[row_id]), begin + count, f"tokens of id {row_id}")
                raise InvalidRequest(f"The {item.modality} has no tokens in the prompt.")
            made.append(self._item(item, own))
            begins[row_id] += count
        for item in items:
            row_id = self._row_ids[item.modality]
            self._check_count(item.modality, len(places[row_id]), begins[row_id], f"tokens of id {row_id}")
        return MediaPart(items=sorted(made, key=lambda item: item.start))

    def _are_expanded(self, token_ids: list[int], by_modality: Mapping[str, list[ProcessedItem]]) -> bool:
        """Whether token ids have the tokens of all items already."""
        wanted: dict[int, int] = {}
        for modality, own in by_modality.items():
            row_id = self._row_ids[modality]
            count = sum(list(self._tokenize(item.text)).count(row_id) for item in own)
            wanted[row_id] = wanted.get(row_id, 0) + count
        is_expanded = all(0 < count == token_ids.count(row_id) for row_id, count in wanted.items())
        if is_expanded and len(wanted) < len(by_modality):
            raise InvalidRequest(
                f"The prompt's tokens do not tell {' and '.join(by_modality)} apart. Give one placeholder per item."
            )
        return is_expanded

    def _in_order(self, found: list[str], by_modality: Mapping[str, list[ProcessedItem]]) -> list[ProcessedItem]:
        """The items in the order of their placeholders. found: modality of each."""
        for modality, own in by_modality.items():
            self._check_count(modality, found.count(modality), len(own), repr(own[0].placeholders[-1]))
        waiting = {modality: iter(own) for modality, own in by_modality.items()}
        return [next(waiting[modality]) for modality in found]

    def _item(self, item: ProcessedItem, places: np.ndarray) -> MediaItem:
        breaks = np.flatnonzero(np.diff(places) != 1) + 1
        pieces = np.split(places, breaks)
        grids, time_step = self._grids(item, len(pieces)), self._time_step(item)
        runs = tuple(
            Run(start=int(piece[0]), length=len(piece), grid=grid, time_step=time_step)
            for piece, grid in zip(pieces, grids, strict=True)
        )
        return MediaItem(
            modality=item.modality,
            runs=runs,
            key=item.key,
            inputs=item.inputs,
            may_cut=self._checkpoint.may_cut_items,
        )

    def _grids(self, item: ProcessedItem, num_runs: int) -> list[tuple[int, int, int] | None]:
        """Grid of each run, for models with positions in time, height and width."""
        given = item.inputs.get(f"{item.modality}_grid_thw")
        if given is None or self._checkpoint.rope_sections is None:
            return [None] * num_runs
        merge = int(self._checkpoint.hf_config["vision_config"].get("spatial_merge_size", 1))
        time, height, width = (int(size) for size in given.to_numpy().reshape(-1)[:3])
        if num_runs == time > 1:
            return [(1, height // merge, width // merge)] * time
        return [(time, height // merge, width // merge)]

    def _time_step(self, item: ProcessedItem) -> float:
        """Positions between two rows in time, rounded as Transformers rounds them (Qwen2.5-VL, section 2.1.1)."""
        per_second = self._checkpoint.hf_config.get("vision_config", {}).get("tokens_per_second")
        if per_second is None or item.row_seconds is None:
            return 1.0
        return float(np.float32(per_second) * np.float32(item.row_seconds))

    def _check_count(self, modality: str, found: int, wanted: int, what: str) -> None:
        if found != wanted:
            raise InvalidRequest(
                f"The prompt has {found} x {what} for {wanted} of {modality}. Give one placeholder per item, in the "
                "order of the items; LLM.chat puts them there."
            )


def _by_modality(items: Sequence[ProcessedItem]) -> dict[str, list[ProcessedItem]]:
    modalities = dict.fromkeys(item.modality for item in items)
    return {modality: [item for item in items if item.modality == modality] for modality in modalities}
