"""MTP layers draft for hybrid models: states go back to the accepted tokens, at borders of blocks too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core.plugins import assert_equal
from support.checkpoints import VOCAB_SIZE
from support.engines import greedy, make_core, random_prompts, run
from support.qwen_mtp import write_agreeing_mtp

OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_model_len": 64, "kv_cache_memory_bytes": 24 << 20}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}}
PROMPTS = random_prompts((5, 26, 1, 13), VOCAB_SIZE)
PARAMS = greedy(14, logprobs=2)


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_5",
        pytest.param("qwen3_next", marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", marks=pytest.mark.slow),
        pytest.param("qwen3.5", marks=pytest.mark.slow),
    ],
)
@pytest.mark.one_path(reason="runs engines with and without fast paths itself")
def test_accepted_and_rejected_drafts_change_no_bit(family: str, tmp_path: Path) -> None:
    write_agreeing_mtp(tmp_path, family)
    plain = make_core(tmp_path, **OPTIONS, fast_paths="off", enable_prefix_caching=False, language_model_only=True)
    expected = [run(plain, [prompt], PARAMS)[0] for prompt in PROMPTS]
    plain.close()
    core = make_core(tmp_path, **OPTIONS, **MTP, max_num_batched_tokens=11, language_model_only=True)
    # The second time from snapshots.
    for _ in range(2):
        assert_equal(run(core, PROMPTS, PARAMS), expected)
    metrics = core.scheduler.spec_decode_metrics
    assert 0 < metrics.num_accepted_tokens < metrics.num_draft_tokens
    core.close()
