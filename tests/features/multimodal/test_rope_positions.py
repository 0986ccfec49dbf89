"""Positions in time, height and width are those of Transformers' models, and of the paper for longer videos."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from penstock.features.multimodal.messages import MediaItem, Run
from penstock.features.multimodal.rope_positions import media_positions
from support.multimodal_models import tiny_multimodal_model

TEXT, IMAGE, VIDEO = 0, 1, 2
MERGE = 2


# Families whose videos are frames with a text before each.
_BY_FRAME = ("qwen3-vl", "qwen3.5")


@pytest.fixture(scope="module", params=["qwen2-vl", "qwen2.5-vl", *_BY_FRAME])
def family(request: pytest.FixtureRequest) -> tuple[str, PreTrainedModel]:
    return request.param, tiny_multimodal_model(request.param)


@pytest.mark.parametrize("seed", range(25))
def test_positions_of_mixed_prompts_are_those_of_transformers(family: tuple[str, PreTrainedModel], seed: int) -> None:
    name, model = family
    rng = np.random.default_rng(seed)
    kinds: list[int] = [TEXT] * int(rng.integers(0, 4))
    items: list[MediaItem] = []
    grids: dict[int, list[list[int]]] = {IMAGE: [], VIDEO: []}
    seconds: list[float] = []
    for _ in range(int(rng.integers(1, 6))):
        kind = int(rng.integers(IMAGE, VIDEO + 1))
        height, width = (int(side) for side in rng.integers(1, 7, 2))
        # Transformers' text goes on after the larger side of a video, even if the video has later times.
        time = 1 if kind == IMAGE else int(rng.integers(1, max(height, width) + 1))
        step = 1.0
        if kind == VIDEO and name == "qwen2.5-vl":
            longest = (max(height, width) - 1) // max(time - 1, 1)
            seconds.append(float(rng.integers(0, longest + 1)))
            step = model.config.vision_config.tokens_per_second * seconds[-1]
        grids[kind].append([time, height * MERGE, width * MERGE])
        runs = []
        frames = [1] * time if kind == VIDEO and name in _BY_FRAME else [time]
        for count in frames:
            grid = (count, height, width)
            runs.append(Run(start=len(kinds), length=count * height * width, grid=grid, time_step=step))
            kinds += [kind] * runs[-1].length + [TEXT] * int(rng.integers(1, 4))
        items.append(MediaItem(modality="video", runs=tuple(runs), key="", inputs={}))
    positions, delta = media_positions(len(kinds), items)
    expected, expected_delta = model.model.get_rope_index(
        torch.ones(1, len(kinds), dtype=torch.int64),
        mm_token_type_ids=torch.tensor([kinds]),
        image_grid_thw=torch.tensor(grids[IMAGE]) if grids[IMAGE] else None,
        video_grid_thw=torch.tensor(grids[VIDEO]) if grids[VIDEO] else None,
        **({"second_per_grid_ts": torch.tensor(seconds)} if seconds else {}),
    )
    assert positions.tolist() == expected[:, 0].tolist()
    assert delta == int(expected_delta)


def test_text_goes_on_after_the_largest_position_of_a_long_video() -> None:
    # Two tokens, a video of 3 x 1 x 2 with 1.5 positions from row to row, and two tokens.
    run = Run(start=2, length=6, grid=(3, 1, 2), time_step=1.5)
    positions, delta = media_positions(10, [MediaItem(modality="video", runs=(run,), key="", inputs={})])
    assert positions.tolist() == [
        [0, 1, 2, 2, 3, 3, 5, 5, 6, 7],
        [0, 1, 2, 2, 2, 2, 2, 2, 6, 7],
        [0, 1, 2, 3, 2, 3, 2, 3, 6, 7],
    ]
    assert delta == -2


def test_transformers_agrees_on_a_long_video_but_for_the_text_behind_it(family: tuple[str, PreTrainedModel]) -> None:
    """Versions before 5.3 go on after the largest position, like vLLM; later ones after the frame's larger side.

    These, too, continue a prompt that ends with the video after its largest position.
    """
    name, model = family
    if name in _BY_FRAME:
        pytest.skip("a video is one run per row in time, with the time as text: no run has later times than sides")
    seconds = {"second_per_grid_ts": torch.tensor([1.0])} if name == "qwen2.5-vl" else {}
    run = Run(start=2, length=10, grid=(5, 1, 2), time_step=1.0)
    items = [MediaItem(modality="video", runs=(run,), key="", inputs={})]
    for num_behind in (0, 3):
        kinds = torch.tensor([[TEXT] * 2 + [VIDEO] * run.length + [TEXT] * num_behind])
        positions, delta = media_positions(kinds.shape[1], items)
        grids = torch.tensor([[5, MERGE, 2 * MERGE]])
        expected, expected_delta = model.model.get_rope_index(
            torch.ones_like(kinds), mm_token_type_ids=kinds, video_grid_thw=grids, **seconds
        )
        assert positions[:, : run.stop].tolist() == expected[:, 0, : run.stop].tolist()
        largest, larger_side = 2 + 5, 2 + 2
        assert positions[0, run.stop :].tolist() == list(range(largest, largest + num_behind))
        assert expected[0, 0, run.stop :].tolist() in (
            [start + index for index in range(num_behind)] for start in (largest, larger_side)
        )
        if num_behind == 0:
            assert delta == int(expected_delta) == largest - run.stop
