"""Every speculator gives the tokens of the model without one.

The method "mtp" has no test here: it takes layers of the target's checkpoint, which this model lacks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from support.draft_heads import HeadSizes, eagle3_weights, eagle_weights, write_head
from support.real_model import EXACT, MARKS, greedy

pytestmark = MARKS
_SIZES = HeadSizes(hidden=576, inner=1536, heads=9, kv_heads=3, vocab=49152)
_OPTIONS = {**EXACT, "max_model_len": 1024, "kv_cache_memory_bytes": "128MiB"}
_TEXT = (
    "The old lighthouse stood on the northern cliff for more than two hundred years. Every evening the keeper climbed "
    "the narrow stairs, cleaned the glass and lit the lamp, so that ships could find their way past the rocks. When "
    "the railway came, fewer ships passed, and the harbour slowly fell asleep. The keeper stayed, wrote down the "
    "weather in a thick black book, and counted the birds that rested on the railing in autumn."
)


@pytest.mark.parametrize(
    "config",
    [
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
        {"method": "suffix"},
        {"method": "draft_model", "model": "smollm2", "num_speculative_tokens": 3},
    ],
    ids=lambda config: config["method"],
)
def test_speculation_changes_no_token(llm, config: dict[str, Any]):
    expected = greedy(llm)
    with LLM("smollm2", **_OPTIONS, speculative_config={**config, "adaptive": False}) as other:
        assert greedy(other) == expected


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_drafts_of_a_head_that_knows_nothing_change_no_token(llm, method: str, tmp_path: Path):
    weights = eagle_weights(sizes=_SIZES) if method == "eagle" else eagle3_weights(sizes=_SIZES)
    fields = {"draft_vocab_size": 40} if method == "eagle3" else {}
    write_head(tmp_path / "head", weights, _SIZES, **fields)
    config = {"method": method, "model": str(tmp_path / "head"), "adaptive": False}
    expected = greedy(llm)
    with LLM("smollm2", **_OPTIONS, speculative_config=config) as other:
        assert greedy(other) == expected


def test_most_tokens_of_an_edited_text_are_drafts_from_the_prompt():
    config = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "adaptive": False}
    messages = [{"role": "user", "content": f"Repeat this text word for word, in full:\n\n{_TEXT}"}]
    with LLM("smollm2", **_OPTIONS, speculative_config=config) as llm:
        (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=96), use_tqdm=False)
    metrics = output.metrics.spec_decode_metrics
    num_tokens = len(output.outputs[0].token_ids)
    assert num_tokens > 40
    assert metrics.num_accepted_tokens > num_tokens / 2, output.outputs[0].text
