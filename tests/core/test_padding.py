"""Steps that are padded, tokens and requests, give the tokens and bits of those that are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.contract import SamplingParams
from penstock.runner.build.batch_builder import BatchBuilder
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.engines import greedy, make_core, random_prompts, run
from support.padding import pad_every_step

PROMPTS = random_prompts((5, 21, 1, 40, 13, 8), VOCAB_SIZE, seed=3)
DRAWN: dict[str, Any] = {"temperature": 0.9, "ignore_eos": True}
PARAMS = [
    greedy(30),
    SamplingParams(**DRAWN, seed=1, max_tokens=20, logprobs=2),
    greedy(24, logprobs=0),
    SamplingParams(**DRAWN, seed=2, max_tokens=25, presence_penalty=0.5, top_k=9),
    SamplingParams(**DRAWN, seed=3, max_tokens=19, min_tokens=19, bad_words_token_ids=[[5, 6]]),
    greedy(9, prompt_logprobs=1),
]


def _serve(folder: Path, **options: Any) -> list[Any]:
    core = make_core(folder, **options)
    try:
        return [(each.tokens, each.logprobs, each.prompt_logprobs) for each in run(core, PROMPTS, PARAMS)]
    finally:
        core.close()


@pytest.fixture
def num_padding(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of padding in each step."""
    found: list[int] = []
    for name in ("build", "build_again"):
        original = getattr(BatchBuilder, name)

        def note(self: Any, *args: Any, original: Any = original) -> Any:
            batch = original(self, *args)
            found.append(batch.input_ids.shape[0] - batch.layout.plan.num_tokens)
            return batch

        monkeypatch.setattr(BatchBuilder, name, note)
    return found


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"dtype": "float32"}),
        ("qwen3", {"dtype": "bfloat16", "async_scheduling": True}),
        ("gemma2", {"dtype": "float32", "block_size": 4, "max_num_batched_tokens": 17, "max_num_seqs": 5}),
        ("llama", {"dtype": "float32", "quantization": "int8", "kv_cache_dtype": "int8"}),
        ("llama", {"dtype": "float32", "attention_backend": "cpu_paged"}),
        ("gemma2", {"dtype": "float32", "attention_backend": "cpu_paged"}),
        ("llama", {"dtype": "float32", "attention_backend": "reference"}),
        ("olmo2", {"dtype": "float32"}),
    ],
    ids=str,
)
@pytest.mark.one_case_quick
def test_padding_is_inert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_padding: list[int], family: str, options: dict[str, Any]
) -> None:
    tiny_checkpoint(tmp_path, family)
    plain = _serve(tmp_path, **options)
    assert sum(num_padding) <= 1, "the warm-up is padding alone"
    num_padding.clear()
    pad_every_step(monkeypatch)
    assert _serve(tmp_path, **options) == plain
    assert len([number for number in num_padding if number > 0]) > 10
