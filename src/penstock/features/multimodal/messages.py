"""Media items in messages: those of a request, and those of a step."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

import msgspec

from penstock.contract.array_bytes import ArrayBytes
from penstock.contract.parts import Part
from penstock.media.item import FEATURES, NAMED

# Modality of items that are embeddings of a prompt's tokens.
EMBEDDINGS = "embeddings"
# Worker method that drops all features.
RESET = "reset_encoder_cache"
# Worker method that encodes items for other engines.
ENCODE = "encode_items"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive tokens of an item whose embeddings are rows of its features.

    start: position in the prompt. grid: numbers of rows in time, height and width, for models that give each its own
    position (M-RoPE). time_step: positions between two rows in time.
    """

    start: int
    length: int
    grid: tuple[int, int, int] | None = None
    time_step: float = 1.0

    @property
    def stop(self) -> int:
        return self.start + self.length


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """An image, a clip of audio, a video, or embeddings of tokens.

    runs: its tokens, in the order of its features' rows. key: of its content; items with equal keys have equal
    features. may_cut: whether a chunk may end inside it; where it may not, the tokens of a run see one another. inputs:
    what the model's processor has made of it, by name, or its features (`media.item: FEATURES`).
    """

    modality: str
    runs: tuple[Run, ...]
    key: str
    inputs: dict[str, ArrayBytes]
    may_cut: bool = True

    @property
    def is_named(self) -> bool:
        """Whether the key is a caller's name, which another engine may know as that of another item."""
        return self.key.startswith(NAMED)

    @property
    def start(self) -> int:
        return self.runs[0].start

    @property
    def stop(self) -> int:
        return self.runs[-1].stop

    @property
    def num_rows(self) -> int:
        """Rows of its features."""
        return sum(run.length for run in self.runs)

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether it has tokens of this range of positions, or between two of its own."""
        return self.start < stop and start < self.stop

    def rows(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Its rows in a range of positions: first position, first row and number of each part."""
        row = 0
        for run in self.runs:
            first, last = max(start, run.start), min(stop, run.stop)
            if first < last:
                yield first, row + first - run.start, last - first
            row += run.length

    def scheduled(self, req_id: str, number: int, start: int, stop: int) -> Iterator[ScheduledRows]:
        """Its rows in a step that computes a range of positions of a request. number: of the item in it."""
        for position, row, count in self.rows(start, stop):
            yield ScheduledRows(
                req_id=req_id, item=number, token=position - start, row=row, count=count, may_cut=self.may_cut
            )


class MediaPart(Part, frozen=True, kw_only=True):
    """The media items of a request, in the order of its tokens. Only blocks with equal items are shared."""

    feature = "images, audio and video"
    items: list[MediaItem]

    @property
    def has_lasting_keys(self) -> bool:
        return not any(item.is_named for item in self.items)

    def of_tokens_from(self, start: int) -> MediaPart:
        """The items without inputs, which come with the step that encodes them."""
        return MediaPart(items=[msgspec.structs.replace(item, inputs={}) for item in self.items])

    def of_replayed_step(self, req_id: str, start: int, stop: int) -> StepMediaPart | None:
        rows = [row for number, item in enumerate(self.items) for row in item.scheduled(req_id, number, start, stop)]
        inputs = {self.items[row.item].key: self.items[row.item].inputs for row in rows}
        return StepMediaPart(evicted=[], rows=rows, inputs=inputs) if rows else None

    def keys_of_block(self, start: int, stop: int) -> tuple[str, ...]:
        keys = []
        for item in self.items[bisect.bisect_right(self.items, start, key=lambda item: item.stop) :]:
            if item.start >= stop:
                break
            keys.append(f"{item.key} at {item.start}")
        return tuple(keys)

    @property
    def has_prompt_ids(self) -> bool:
        return all(item.modality != EMBEDDINGS for item in self.items)

    @property
    def given_values(self) -> str | None:
        given = next((item.modality for item in self.items if FEATURES in item.inputs), None)
        return "prompt_embeds" if given == EMBEDDINGS else given and f"{given}_embeds"


class ScheduledRows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of an item's features that a step takes in: `count` from `row` on, for the request's tokens in the step from
    `token` on. item: number of the item in its request. may_cut: of the item.
    """

    req_id: str
    item: int
    token: int
    row: int
    count: int
    may_cut: bool = True


class StepMediaPart(Part, frozen=True, kw_only=True):
    """The media items of a step, which is not repeated.

    evicted: keys whose features are dropped before the step. inputs: of the items that the step encodes, by key.
    """

    feature = "media of a step"
    may_repeat = False
    evicted: list[str]
    rows: list[ScheduledRows]
    inputs: dict[str, dict[str, ArrayBytes]] = {}  # noqa: RUF012 - msgspec copies it
