"""Mixtures of experts with drafts, small steps, preemption, prefix hits and constraints, all at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import jsonschema
import pytest

from penstock.contract import RpcCall, SamplingParams, SchedulerOutput, StructuredOutputsParams
from penstock.engine.core.engine_core import EngineCore
from penstock.scheduler.kv_cache_plan import bytes_per_block, bytes_to_serve
from penstock.scheduler.outputs import FinishReason
from penstock.worker.worker import Worker
from support import constraints
from support.checkpoints import VOCAB_SIZE, save_checkpoint, tiny_checkpoint
from support.draft_heads import write_deepseek_mtp
from support.engines import Result, add, assert_greedy_continuation, finish, greedy, make_core, random_prompts, run
from support.uneven_mixtures import ALL, FIRST, uneven_mixture

NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3, "adaptive": False}
MTP = {"method": "deepseek_mtp", "num_speculative_tokens": 3, "adaptive": False}
# Model, and how it drafts.
DRAFTED: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v3", MTP),
    ("deepseek_v3", NGRAM),
    ("deepseek_v2", NGRAM),
    ("glm4_moe", NGRAM),
    ("gpt_oss", NGRAM),
]
DRAWN: dict[str, Any] = {"temperature": 0.9, "ignore_eos": True}
SHARED = random_prompts([17], VOCAB_SIZE, seed=5)[0]
# N-grams of the prompts are found in the outputs of models as small as these.
PROMPTS = [SHARED + tail * 2 for tail in random_prompts([3, 7, 1, 8, 11, 6], VOCAB_SIZE, seed=7)]
PARAMS = [
    greedy(30),
    SamplingParams(**DRAWN, seed=1, max_tokens=28, logprobs=2),
    greedy(24, logprobs=0),
    SamplingParams(**DRAWN, seed=2, max_tokens=25, presence_penalty=0.5, repetition_penalty=1.2, top_k=9),
    greedy(30, logprobs=1),
    greedy(26),
]
LENGTH, STEP, BLOCK = 72, 9, 4


class WatchedWorker(Worker):
    """Counts the draft tokens of its steps."""

    num_drafts: ClassVar[int] = 0

    def execute_model(self, output: SchedulerOutput) -> None:
        type(self).num_drafts += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        super().execute_model(output)


def write(folder: Path, family: str, **overrides: Any) -> None:
    """Write a tiny model; DeepSeek V3 has an MTP layer."""
    if family == "deepseek_v3":
        write_deepseek_mtp(folder, **overrides)
    else:
        tiny_checkpoint(folder, family, **overrides)


def crowded(folder: Path, speculative: dict[str, Any], *, async_scheduling: bool) -> EngineCore:
    """An engine with small steps and blocks, and a KV cache for one of the longest requests and little more."""
    options: dict[str, Any] = {
        "block_size": BLOCK,
        "max_model_len": LENGTH,
        "max_num_batched_tokens": STEP,
        "speculative_config": speculative,
        "async_scheduling": async_scheduling,
    }
    core = make_core(folder, **options)
    groups = core.kv_cache_config.groups
    core.close()
    room = bytes_to_serve(groups, LENGTH, STEP) + 4 * bytes_per_block(groups, 0)
    worker = f"{__name__}.WatchedWorker"
    return make_core(folder, **options, kv_cache_memory_bytes=room, worker_cls=worker)


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["async scheduling", "sync"])
@pytest.mark.parametrize(
    ("family", "speculative"), DRAFTED, ids=lambda value: value if isinstance(value, str) else value["method"]
)
@pytest.mark.one_case_quick
def test_drafts_small_steps_preemption_and_prefix_hits_change_no_token(
    family: str, speculative: dict[str, Any], async_scheduling: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WatchedWorker, "num_drafts", 0)
    write(tmp_path, family)
    # Blocks of one size, which attention adds up one after another.
    plain = make_core(tmp_path, block_size=BLOCK)
    expected = run(plain, PROMPTS, PARAMS)
    plain.close()
    core = crowded(tmp_path, speculative, async_scheduling=async_scheduling)
    for _ in range(2):
        found = run(core, PROMPTS, PARAMS)
        assert [one.error for one in found] == [None] * len(PROMPTS)
        assert [one.tokens for one in found] == [one.tokens for one in expected]
        assert [one.logprobs for one in found] == [one.logprobs for one in expected]
    core.close()
    assert sum(one.num_preemptions for one in found) > 0
    assert sum(one.num_cached_tokens for one in found) > 0
    assert WatchedWorker.num_drafts > 0


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def constrained(core: EngineCore) -> list[Result]:
    results: dict[str, Result] = {}
    for number in range(4):
        params = SamplingParams(
            seed=number,
            temperature=1.0 if number % 2 else 0.0,
            max_tokens=120,
            structured_outputs=StructuredOutputsParams(json=PERSON),
        )
        prompt = constraints.encode(["Who are you?", "Tell me about a cat by the sea."][number // 2])
        add(core, f"r{number}", prompt, params, eos_token_ids=frozenset({constraints.END}))
    finish(core, results)
    core.close()
    return [results[f"r{number}"] for number in range(4)]


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "gpt_oss"])
@pytest.mark.one_case_quick
def test_constrained_outputs_have_their_form_with_and_without_drafts(family: str, tmp_path: Path) -> None:
    write(tmp_path, family, vocab_size=constraints.VOCAB_SIZE, max_position_embeddings=512)
    options = {"tokenizer": "demo", "max_model_len": 200}
    expected = constrained(make_core(tmp_path, **options))
    for result in expected:
        assert result.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), result.error
        if result.finish_reason is FinishReason.STOP:
            jsonschema.validate(json.loads(constraints.demo_tokenizer().decode(result.tokens)), PERSON)
    assert any(result.finish_reason is FinishReason.STOP for result in expected)
    drafts = MTP if family == "deepseek_v3" else NGRAM
    found = constrained(
        make_core(tmp_path, **options, speculative_config=drafts, max_num_batched_tokens=STEP, async_scheduling=True)
    )
    assert [one.tokens for one in found] == [one.tokens for one in expected]


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "gpt_oss"])
@pytest.mark.one_case_quick
def test_ties_an_expert_without_tokens_and_one_with_all(family: str, tmp_path: Path) -> None:
    oracle = uneven_mixture(family)
    save_checkpoint(oracle, tmp_path)
    prompts, params = random_prompts((5, 40, 1, 19), VOCAB_SIZE), greedy(8, logprobs=2)
    core = make_core(tmp_path, max_num_batched_tokens=16, enable_prefix_caching=False)
    core.collective_rpc(RpcCall("start_expert_stats"))
    together = run(core, prompts, params)
    (tokens,) = core.collective_rpc(RpcCall("get_expert_stats"))
    alone = [run(core, [prompt], params)[0] for prompt in prompts]
    core.close()
    for counts in tokens.values():
        assert counts[ALL] == counts[FIRST] > 0
        assert sum(counts) == 2 * counts[ALL]
    for prompt, one, other in zip(prompts, together, alone, strict=True):
        assert_greedy_continuation(oracle, prompt, one)
        assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
