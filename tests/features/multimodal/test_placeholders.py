"""Placeholders become the tokens of their items, in texts and among token ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.checkpoints.multimodal import MultimodalCheckpoint
from penstock.contract.array_bytes import ArrayBytes
from penstock.errors import InvalidRequest
from penstock.features.multimodal.inputs.placeholders import Placeholders
from penstock.features.multimodal.messages import Run
from penstock.media.processors.processor import ProcessedItem

VOCABULARY = {"a": 1, "b": 2, "<image>": 3, "<video>": 4, "<start>": 5, "<end>": 6, "row": 7}
VISION = {"spatial_merge_size": 2, "tokens_per_second": 2}


def tokenize(text: str) -> list[int]:
    return [VOCABULARY[word] for word in text.split()]


def placeholders(**fields: Any) -> Placeholders:
    hf_config = {"model_type": "m", "image_token_id": 3, "vision_config": VISION, **fields}
    return Placeholders(MultimodalCheckpoint("M", hf_config, ("image", "video"), rope_sections=(1, 1, 1)), tokenize)


def item(key: str, modality: str, text: str, *forms: str, **fields: Any) -> ProcessedItem:
    return ProcessedItem(modality, key, forms or (f"<{modality}>",), text, fields.pop("inputs", {}), **fields)


PICTURE, OTHER = item("p", "image", "<image> <image>"), item("o", "image", "<image>")
FRAMES = item("f", "video", "row <image> row <image>")


def test_items_of_two_modalities_take_tokens_of_one_id_in_the_order_of_the_prompt() -> None:
    expander = placeholders()
    text, ordered = expander.expand_text("a <image> b <video> a <image>", [FRAMES, PICTURE, OTHER])
    assert text == "a <image> <image> b row <image> row <image> a <image>"
    ids, ordered_ids = expander.expand_ids(tokenize("a <image> b <video> a <image>"), [FRAMES, PICTURE, OTHER])
    assert ids == tokenize(text)
    assert ordered == ordered_ids == [PICTURE, FRAMES, OTHER]
    runs = {one.key: [(run.start, run.length) for run in one.runs] for one in expander.part(ids, ordered).items}
    assert runs == {"p": [(1, 2)], "f": [(5, 1), (7, 1)], "o": [(9, 1)]}


def test_tokens_around_a_placeholder_go_where_its_text_has_its_own() -> None:
    expander = placeholders(video_token_id=4)
    film = item("f", "video", "row <start> <video> <video> <end>", "<start> <video> <end>", "<video>")
    expected = "a row <start> <video> <video> <end> b"
    for given in ("a <start> <video> <end> b", "a <video> b"):
        assert expander.expand_text(given, [film])[0] == expected
        assert expander.expand_ids(tokenize(given), [film])[0] == tokenize(expected)


def test_expanded_tokens_stay_unless_they_could_be_of_an_image_or_a_video() -> None:
    expanded = tokenize("a <image> <image> b <image>")
    assert placeholders().expand_ids(expanded, [PICTURE, OTHER]) == (expanded, [PICTURE, OTHER])
    with pytest.raises(InvalidRequest, match="do not tell image and video apart"):
        placeholders().expand_ids(tokenize("<image> row <image> <image> row <image>"), [PICTURE, FRAMES])


def test_a_video_has_its_grid_and_the_positions_between_its_rows_in_time() -> None:
    grid = {"video_grid_thw": ArrayBytes.of(np.array([[2, 2, 4]]))}
    film = item("f", "video", "<video> <video> <video> <video>", inputs=grid, row_seconds=0.75)
    (made,) = placeholders(video_token_id=4).part(tokenize("a <video> <video> <video> <video>"), [film]).items
    assert made.runs == (Run(start=1, length=4, grid=(2, 1, 2), time_step=1.5),)


def test_too_many_placeholders_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="has 2 x '<image>' for 1 of image"):
        placeholders().expand_text("<image> <image>", [OTHER])
