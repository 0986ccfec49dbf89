"""A request's logits have the same bits alone, in any batch, in chunks, after a prefix hit or a preemption, and on any
number of threads: with weights in float32 and in half precision, and in bfloat16 arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.kernels.native import NATIVE
from support.checkpoints import tiny_config
from support.engines import Result, greedy, make_core, random_prompts, run

pytestmark = [
    pytest.mark.processor,
    pytest.mark.skipif(NATIVE is None, reason="torch's own kernels do not promise it"),
]
VOCAB_SIZE = 1003  # not a whole number of panels
LENGTHS = [1, 2, 3, 5, 7, 16, 17, 31, 33, 48, 64, 65, 90, 97, 110, 120]
PROMPTS = random_prompts(LENGTHS + [length + 1 for length in LENGTHS], VOCAB_SIZE, seed=3)
# Of these the logits are looked at; the others are company.
WATCHED = range(0, 32, 3)
PARAMS = [greedy(5, logprobs=-1 if number in WATCHED else None) for number in range(32)]
OPTIONS = {
    "load_format": "dummy",
    "max_logprobs": -1,
    "logprobs_mode": "raw_logits",
    "max_num_seqs": 32,
    "max_num_batched_tokens": 4096,
    "kv_cache_memory_bytes": 64 << 20,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    sizes = {"hidden_size": 192, "intermediate_size": 520, "head_dim": 32, "vocab_size": VOCAB_SIZE}
    tiny_config("qwen3", architectures=["Qwen3ForCausalLM"], **sizes).save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def options_of(dtype: str) -> dict[str, str]:
    """bfloat16: products and attention in bfloat16 arithmetic, emulated on a processor without the instructions."""
    if dtype == "bfloat16":
        return {"dtype": dtype, "cpu_arithmetic": "bfloat16", "kv_cache_dtype": "bfloat16"}
    return {"dtype": dtype}


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone(folder: Path, dtype: str) -> list[Result]:
    """Each request by itself, its prompt in one step, on one thread."""
    core = make_core(folder, **options_of(dtype), fast_paths="auto", enable_prefix_caching=False, **OPTIONS)
    results = [run(core, [PROMPTS[number]], [PARAMS[number]])[0] for number in WATCHED]
    core.close()
    return results


def serve(folder: Path, dtype: str, prompts: list[list[int]], **options: Any) -> list[Result]:
    core = make_core(folder, **options_of(dtype), **{**OPTIONS, **options})
    results = run(core, prompts, PARAMS)
    core.close()
    return results


def assert_same_bits(actual: list[Result], expected: list[Result]) -> None:
    for number, other in zip(WATCHED, expected, strict=True):
        one = actual[number]
        assert one.tokens == other.tokens, number
        assert len(one.logprobs) == len(other.logprobs) == 5
        for step, (row, wanted) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
            assert len(row) == VOCAB_SIZE
            assert row == wanted, (number, step)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.each_value_quick
def test_in_a_batch_of_32(folder: Path, dtype: str, alone: list[Result], num_threads: int) -> None:
    assert_same_bits(serve(folder, dtype, PROMPTS, num_threads=num_threads), alone)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("chunk", [7, 50])
@pytest.mark.one_case_quick
def test_with_chunked_prefill(folder: Path, dtype: str, alone: list[Result], chunk: int, num_threads: int) -> None:
    options = {"max_num_batched_tokens": chunk, "max_num_seqs": 7, "num_threads": num_threads}
    assert_same_bits(serve(folder, dtype, PROMPTS, **options), alone)


def test_after_a_prefix_hit(folder: Path, dtype: str, alone: list[Result]) -> None:
    core = make_core(folder, **options_of(dtype), **OPTIONS)
    run(core, PROMPTS, PARAMS)
    again = run(core, PROMPTS, PARAMS)
    core.close()
    assert sum(result.num_cached_tokens > 0 for result in again) > 20
    assert_same_bits(again, alone)


def test_after_preemption(folder: Path, dtype: str, alone: list[Result]) -> None:
    bytes_per_block = 16 * 2 * 2 * 2 * 32 * (2 if dtype == "bfloat16" else 4)
    # Room for the prompts of a few requests, which push each other out as they grow. Blocks of another size would add
    # in another order.
    options = {"max_model_len": 128, "kv_cache_memory_bytes": 20 * bytes_per_block, "enable_prefix_caching": False}
    results = serve(folder, dtype, PROMPTS, **options)
    assert any(result.num_preemptions > 0 for result in results)
    assert_same_bits(results, alone)
