"""The same runner on CUDA: tokens of Transformers, no waiting on the hot path, memory given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.attention import LayerAttention
from penstock.attention.torch_varlen import TorchVarlenBackend
from support.checkpoints import VOCAB_SIZE, save_checkpoint, tiny_model
from support.engines import Result, add, assert_greedy_continuation, greedy, make_core, random_prompts, run

pytestmark = pytest.mark.gpu
LENGTHS = (1, 3, 40, 17, 33, 55)


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("model")
    oracle = tiny_model(request.param, **({"sliding_window": 9} if request.param == "mistral" else {}))
    save_checkpoint(oracle, folder)
    return oracle, folder


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("max_num_batched_tokens", [13, 1024])
def test_tokens_equal_transformers_in_float32(
    model: tuple[Any, Path], async_scheduling: bool, max_num_batched_tokens: int
) -> None:
    oracle, folder = model
    core = make_core(
        folder,
        device="cuda",
        dtype="float32",
        async_scheduling=async_scheduling,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    prompts = random_prompts(LENGTHS, VOCAB_SIZE)
    for prompt, result in zip(prompts, run(core, prompts, greedy(20, logprobs=2)), strict=True):
        assert_greedy_continuation(oracle, prompt, result)
    core.close()


def test_asynchronous_scheduling_is_the_default_and_nothing_waits_between_steps(model: tuple[Any, Path]) -> None:
    _, folder = model
    core = make_core(folder, device="cuda", dtype="float32")
    assert core._max_in_flight == 2
    results: dict[str, Result] = {}
    for index, prompt in enumerate(random_prompts(LENGTHS, VOCAB_SIZE)):
        add(core, f"r{index}", prompt, greedy(30))
    for _ in range(4):
        for output in core.step():
            results.setdefault(output.req_id, Result()).take(output)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            core.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    core.close()


def test_varlen_attention_equals_the_reference_where_torch_has_it(model: tuple[Any, Path]) -> None:
    _, folder = model
    layer = LayerAttention("layer", 4, 2, 16, 0.25)
    block_size = 256
    why_not = TorchVarlenBackend.why_not(layer, torch.bfloat16, torch.device("cuda"), block_size)
    if why_not is not None:
        pytest.skip(f"torch_varlen cannot run here: {why_not}")
    prompts = random_prompts(LENGTHS, VOCAB_SIZE)
    options = {"device": "cuda", "dtype": "bfloat16", "block_size": block_size, "kv_cache_memory_bytes": 64 << 20}
    tokens = []
    for backend in ("torch_varlen", "reference"):
        core = make_core(folder, attention_backend=backend, **options)
        tokens.append([result.tokens[0] for result in run(core, prompts, greedy(1))])
        core.close()
    assert tokens[0] == tokens[1]


def test_closing_gives_the_gpus_memory_back(model: tuple[Any, Path]) -> None:
    _, folder = model
    make_core(folder, device="cuda", kv_cache_memory_bytes=64 << 20).close()
    before = torch.cuda.memory_reserved()
    core = make_core(folder, device="cuda", kv_cache_memory_bytes=64 << 20)
    assert torch.cuda.memory_reserved() > before
    core.close()
    assert torch.cuda.memory_reserved() <= before
