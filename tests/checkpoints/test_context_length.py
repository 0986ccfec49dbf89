"""The longest context of a model is that of its rotary scaling, as in vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config import EngineConfig, ModelConfig
from penstock.errors import ConfigError
from support.fake_engine import write_model

YARN = {"type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Fields of published models.
        ({"max_position_embeddings": 32768, "rope_scaling": None}, 32768),
        (
            {"max_position_embeddings": 32768, "rope_scaling": {**YARN, "original_max_position_embeddings": 32768}},
            131072,
        ),
        (
            {"max_position_embeddings": 40960, "rope_scaling": {**YARN, "original_max_position_embeddings": 32768}},
            131072,
        ),
        (
            {
                "max_position_embeddings": 163840,
                "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
            },
            163840,
        ),
        ({"max_position_embeddings": 16384, "rope_scaling": {"type": "linear", "factor": 4.0}}, 65536),
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 65536),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope", "factor": 32.0, "short_factor": [1.0], "long_factor": [2.0]},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "yarn", "factor": 64.0, "short_factor": [1.0], "long_factor": [2.0]},
            },
            131072,
        ),
        (
            {
                "model_type": "gemma3_text",
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            131072,
        ),
        # As Transformers 5 writes them.
        ({"max_position_embeddings": 1024, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 4096),
        ({"max_position_embeddings": 1024, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 1024),
        (
            {
                "max_position_embeddings": 1024,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            1024,
        ),
        # A length beside the settings wins over the one among them.
        (
            {
                "max_position_embeddings": 4096,
                "original_max_position_embeddings": 2048,
                "rope_scaling": {**YARN, "original_max_position_embeddings": 1024},
            },
            8192,
        ),
        # What makes no sense is refused where the rotary embedding is read.
        ({"max_position_embeddings": 1024, "rope_scaling": YARN | {"factor": "4"}}, 1024),
        ({"max_position_embeddings": 1024, "rope_scaling": YARN | {"factor": 1e308}}, 1024),
        ({"max_position_embeddings": 1024, "rope_scaling": YARN | {"factor": 10**299}}, 1024),
        ({"max_position_embeddings": 1024, "rope_scaling": YARN | {"factor": 0.5}}, 1024),
        ({"max_position_embeddings": 1024, "rope_scaling": [4.0]}, 1024),
    ],
    ids=str,
)
def test_the_context_is_what_the_scaling_says(tmp_path: Path, config: dict[str, Any], expected: int) -> None:
    content = {key: value for key, value in config.items() if key != "max_position_embeddings"}
    write_model(tmp_path, longest_context=config["max_position_embeddings"], **content)
    assert ModelConfig.load(tmp_path).longest_context == expected


def test_all_of_it_may_be_asked_for_and_no_more(tmp_path: Path) -> None:
    write_model(tmp_path, longest_context=1024, rope_scaling=YARN)
    assert EngineConfig.create(tmp_path, max_model_len=4096).model.max_model_len == 4096
    message = r"max_model_len=4097 is more than the 4096 .* \(max_position_embeddings=1024 with rope_type='yarn' and "
    with pytest.raises(ConfigError, match=message + r"factor=4\.0\)"):
        EngineConfig.create(tmp_path, max_model_len=4097)
