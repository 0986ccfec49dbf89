"""Rules of Whisper's tokens: those of Transformers' logits processors, over its own logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from core.plugins import assert_equal
from penstock.contract import Parts
from penstock.features.encoder_decoder.messages import SpeechPart
from support.checkpoints import save_checkpoint
from support.encoder_decoders import ASKED_OF_AUDIO, speech_tokens, tiny_encoder_decoder
from support.engines import Result, add, finish, greedy, make_core

# Text is below 50, and timestamps are from 61 on.
RULES = {
    "eos_token_id": 50,
    "no_timestamps_token_id": 60,
    "suppress_tokens": [7, 8, 9, 45],
    "begin_suppress_tokens": [20, 50],
    "max_initial_timestamp_index": 5,
}
OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4}
NUM_TOKENS = 24
# Which timestamps are wanted.
TIMESTAMPS = [True, False, True, None]


@pytest.fixture(scope="module")
def oracle() -> Any:
    model: Any = tiny_encoder_decoder("whisper", seed=3, eos_token_id=50)
    with torch.no_grad():
        # Text and timestamps are about equally likely.
        model.proj_out.weight.mul_(0.5)
    return model


@pytest.fixture(scope="module")
def folder(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whisper")
    save_checkpoint(oracle, path)
    (path / "generation_config.json").write_text(json.dumps({**RULES, "decoder_start_token_id": 2}))
    return path


def run(folder: Path, **options: Any) -> list[Result]:
    core = make_core(folder, **OPTIONS, **options)
    for index, (asked, timestamps) in enumerate(zip(ASKED_OF_AUDIO, TIMESTAMPS, strict=True)):
        rules = [] if timestamps is None else [SpeechPart(timestamps=timestamps)]
        add(core, f"r{index}", asked.decoder, greedy(NUM_TOKENS), parts=Parts.of([asked.part(), *rules]))
    results: dict[str, Result] = {}
    finish(core, results)
    preempted = core.scheduler.num_preemptions
    core.close()
    assert (preempted > 0) is ("num_blocks" in options)
    return [results[f"r{index}"] for index in range(len(ASKED_OF_AUDIO))]


def test_tokens_follow_the_rules_of_transformers(oracle: Any, folder: Path) -> None:
    results = run(folder)
    for asked, timestamps, result in zip(ASKED_OF_AUDIO, TIMESTAMPS, results, strict=True):
        assert result.error is None
        assert result.tokens == speech_tokens(oracle, asked, RULES, timestamps, NUM_TOKENS)
    stamps = [token for token in results[0].tokens if token > 60]
    assert stamps == sorted(stamps)
    assert len(set(stamps)) > 2


@pytest.mark.parametrize("options", [{"async_scheduling": False}, {"num_blocks": 30, "max_model_len": 48}], ids=str)
def test_rules_hold_after_a_preemption_and_in_any_schedule(folder: Path, options: dict[str, Any]) -> None:
    assert_equal(run(folder, **options), run(folder))
