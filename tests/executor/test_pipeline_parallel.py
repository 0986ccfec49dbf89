"""Workers that have layers of their own give the tokens and log-probabilities of one that has all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.engine.core import EngineCore
from support.arrangements import VOCAB_SIZE, assert_same, results_of
from support.checkpoints import tiny_checkpoint
from support.engines import make_core

# A block: keys and values of 16 positions and two heads, of a layer.
LAYER_BYTES = 2 * 16 * 2 * 16 * 4
LAYERS = 6


def make(folder: Path, stages: tuple[int, ...], ranks: int = 1, **options: Any) -> EngineCore:
    """With room for a few of the requests, so that others are preempted: 13 blocks, whoever has their layers."""
    room = 13 * LAYER_BYTES * max(stages) // ranks
    arrangement = {"pipeline_parallel_size": len(stages), "tensor_parallel_size": ranks}
    if len(stages) > 1:
        arrangement["pipeline_layers"] = stages  # type: ignore[assignment]
    return make_core(
        folder,
        **{
            **arrangement,
            "num_threads": len(stages) * ranks,
            "kv_cache_memory_bytes": room,
            "max_model_len": 128,
            "max_num_batched_tokens": 64,
            **options,
        },
    )


@pytest.mark.parametrize(
    ("family", "stages", "ranks", "options"),
    [
        ("llama", (3, 3), 1, {"async_scheduling": False}),
        ("llama", (1, 3, 2), 1, {"async_scheduling": True}),
        ("qwen3", (3, 3), 2, {}),
        ("gemma3", (2, 4), 1, {}),
    ],
)
def test_stages_give_the_tokens_of_one_worker(
    family: str, stages: tuple[int, ...], ranks: int, options: dict[str, Any], tmp_path: Path
) -> None:
    tiny_checkpoint(tmp_path, family, vocab_size=VOCAB_SIZE, head_dim=16, num_hidden_layers=LAYERS)
    expected, found = (
        results_of(make(tmp_path, arrangement, size, **options), is_tight=family != "gemma3")
        for arrangement, size in (((LAYERS,), 1), (stages, ranks))
    )
    assert_same(found, expected)
