"""Workers that keep a request's positions by turns give the tokens of one worker, from a cache of half the size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.engine.core.engine_core import EngineCore
from penstock.errors import ConfigError, UnsupportedFeature
from support.arrangements import PARAMS, PROMPTS, VOCAB_SIZE, assert_same, results_of
from support.checkpoints import tiny_checkpoint
from support.engines import greedy, make_core, random_prompts, run

# A block of one worker: keys and values of 16 positions and of one head in two layers.
BLOCK_BYTES = 2 * 2 * 16 * 1 * 16 * 4


def make(folder: Path, size: int, context: int, **options: Any) -> EngineCore:
    room = {"kv_cache_memory_bytes": 13 * BLOCK_BYTES, "max_model_len": 128}
    ranks = {"tensor_parallel_size": size, "decode_context_parallel_size": context, "num_threads": size}
    return make_core(folder, **ranks, **{**room, **options})


@pytest.mark.parametrize(
    ("family", "size", "interleave", "options"),
    [
        ("llama", 2, 1, {}),
        ("llama", 4, 4, {"async_scheduling": True}),
        ("gemma3", 2, 8, {}),
        ("qwen3", 2, 2, {"kv_cache_dtype": "int8"}),
        ("llama", 2, 2, {"attention_backend": "cpu_paged"}),
    ],
)
@pytest.mark.one_case_quick
def test_ranks_that_share_positions_give_the_tokens_of_one_worker(
    family: str, size: int, interleave: int, options: dict[str, Any], tmp_path: Path
) -> None:
    tiny_checkpoint(tmp_path, family, vocab_size=VOCAB_SIZE, head_dim=16, num_key_value_heads=1)
    is_int8 = "kv_cache_dtype" in options
    block_bytes = BLOCK_BYTES * 20 // 64 if is_int8 else BLOCK_BYTES
    of_one = {"kv_cache_dtype": "int8"} if is_int8 else {}
    expected = results_of(make(tmp_path, 1, 1, kv_cache_memory_bytes=13 * block_bytes, **of_one))
    # Half the memory holds as many blocks of the same number of positions.
    halved = {"block_size": 8, "kv_cache_memory_bytes": 13 * block_bytes // 2}
    found = results_of(make(tmp_path, size, 2, cp_kv_cache_interleave_size=interleave, **halved, **options))
    # Sums in another order are rounded to another of 255 numbers here and there.
    assert_same(found, expected, tolerance=2e-3 if is_int8 else 1e-4)


@pytest.mark.slow
def test_a_token_takes_half_the_memory_of_each_rank(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, vocab_size=VOCAB_SIZE, head_dim=16, num_key_value_heads=1)
    found = []
    for context in (1, 2):
        core = make(tmp_path, 2, context)
        (group,) = core.kv_cache_config.groups
        found.append((core.kv_cache_config.pools[0].num_blocks, group.spec.block_size, group.spec.page_size_bytes))
        core.close()
    (num_blocks, positions, page_bytes), shared = found
    assert shared == (num_blocks, 2 * positions, page_bytes)


@pytest.mark.one_path(reason="refused before any step")
def test_what_does_not_fit_together_is_refused_by_name_before_workers_start(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, vocab_size=VOCAB_SIZE)
    with pytest.raises(ConfigError, match="decode_context_parallel_size=3 is not valid with tensor_parallel_size=2"):
        make(tmp_path, 2, 3)
    with pytest.raises(ConfigError, match="cp_kv_cache_interleave_size=3 is not valid with block_size=16"):
        make(tmp_path, 2, 2, cp_kv_cache_interleave_size=3)
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(UnsupportedFeature, match="decode_context_parallel_size=2: with 2 KV heads"):
        make(tmp_path, 2, 2)
    tiny_checkpoint(tmp_path / "gpt2", "gpt2", vocab_size=VOCAB_SIZE)
    with pytest.raises(UnsupportedFeature, match="decode_context_parallel_size=2 with GPT2LMHeadModel: "):
        make(tmp_path / "gpt2", 2, 2)
    # Every query head of this one has a KV head of its own.
    tiny_checkpoint(tmp_path / "zamba2", "zamba2", vocab_size=VOCAB_SIZE)
    with pytest.raises(UnsupportedFeature, match="with 4 KV heads and .*=2, no two ranks have the same ones"):
        make(tmp_path / "zamba2", 2, 2)
    kinds = {"layer_types": ["conv", "conv"], "num_key_value_heads": 1}
    tiny_checkpoint(tmp_path / "lfm2", "lfm2", vocab_size=VOCAB_SIZE, num_hidden_layers=2, **kinds)
    with pytest.raises(UnsupportedFeature, match="Lfm2ForCausalLM: none of its layers has a KV cache"):
        make(tmp_path / "lfm2", 2, 2)
    assert {child.pid for child in psutil.Process().children()} == before


@pytest.mark.slow
def test_shared_positions_with_drafts_and_scattered_rows(tmp_path: Path) -> None:
    """Two KV heads of four workers, of whom two have each; several tokens of a request in a step."""
    tiny_checkpoint(tmp_path, vocab_size=VOCAB_SIZE, head_dim=16)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    options = {"kv_cache_memory_bytes": "1MiB", "speculative_config": drafts}
    results = []
    for size, context, scattered in ((1, 1, {}), (4, 2, {"enable_sp": True, "sp_min_token_num": 6})):
        core = make(tmp_path, size, context, **options, **scattered)
        results.append(run(core, PROMPTS, PARAMS) + run(core, PROMPTS, PARAMS))
        core.close()
    assert_same(results[1], results[0])


@pytest.mark.slow
def test_a_hybrid_begins_from_states_at_the_ends_of_shared_blocks(tmp_path: Path) -> None:
    layout = {"num_key_value_heads": 1, "use_shared_attention_adapter": False}
    tiny_checkpoint(tmp_path, "zamba2", vocab_size=VOCAB_SIZE, **layout)
    prompts, params = random_prompts((50, 70), VOCAB_SIZE), greedy(12, logprobs=3)
    results = []
    for size in (1, 2):
        core = make(tmp_path, size, size, kv_cache_memory_bytes="1MiB")
        results.append(run(core, prompts, params) + run(core, prompts, params))
        core.close()
    assert_same(results[1], results[0])
    assert [result.num_cached_tokens for result in results[0]] == [0, 0, 48, 64]
    assert [result.num_cached_tokens for result in results[1]] == [0, 0, 32, 64]
