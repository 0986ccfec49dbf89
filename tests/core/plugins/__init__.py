"""Features as plugins would add them: each module registers itself and changes nothing of the package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import tiny_checkpoint
from support.engines import Result

# Options of engines in which requests run otherwise than alone: together, in chunks, preempted, with drafts.
CIRCUMSTANCES: list[dict[str, Any]] = [
    {},
    {"async_scheduling": False},
    {"max_num_batched_tokens": 7},
    {"kv_cache_memory_bytes": 110 << 10, "max_model_len": 64},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}},
]


def write_checkpoint(folder: Path, architecture: str) -> Path:
    """A tiny Llama under the name of a plugin's architecture, which has the same weights."""
    tiny_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    return folder


def assert_equal(results: Sequence[Result], expected: Sequence[Result]) -> None:
    """Equal tokens, and log-probabilities that are equal bit for bit."""
    for result, other in zip(results, expected, strict=True):
        assert result.error is None, result.error
        assert result.tokens == other.tokens
        assert result.logprobs == other.logprobs


def install_plugin(folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make these modules known to all processes that are started, as an installed package with entry points does."""
    info = folder / "penstock_test_plugins-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock-test-plugins\nVersion: 1.0\n")
    entry_points = "\n".join(f"{name} = core.plugins.{name}:register" for name in names)
    (info / "entry_points.txt").write_text(f"[penstock.general_plugins]\n{entry_points}\n")
    monkeypatch.syspath_prepend(str(folder))
