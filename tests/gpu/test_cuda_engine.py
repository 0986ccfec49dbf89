"""The same runner on CUDA: tokens of Transformers, no waiting on the hot path, memory given back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.attention import LayerAttention
from penstock.attention.torch_varlen import TorchVarlenBackend
from penstock.contract import RpcCall, SamplingParams
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
    assert core._runs_ahead
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


def test_decode_steps_run_as_graphs_at_batch_sizes_that_shrink(model: tuple[Any, Path]) -> None:
    oracle, folder = model
    core = make_core(folder, device="cuda", dtype="float32")
    prompts = random_prompts((5, 21, 1, 40, 13, 8, 3), VOCAB_SIZE)
    params = [greedy(count) for count in (30, 11, 25, 40, 18, 22, 35)]
    for prompt, result in zip(prompts, run(core, prompts, params), strict=True):
        assert_greedy_continuation(oracle, prompt, result)
    (execution,) = core.collective_rpc(RpcCall(lambda worker: worker.runner.execution))
    assert execution.num_replays > 20, execution.refusals
    core.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampled_tokens_do_not_depend_on_graphs(model: tuple[Any, Path], dtype: str) -> None:
    _, folder = model
    prompts = random_prompts(LENGTHS, VOCAB_SIZE)
    params = [
        SamplingParams(temperature=0.9, seed=seed, max_tokens=24, ignore_eos=True, **fields)
        for seed, fields in enumerate(({}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.1}, {"logprobs": 2}, {}))
    ]
    tokens = []
    for fast_paths in ("auto", "off"):
        core = make_core(folder, device="cuda", dtype=dtype, fast_paths=fast_paths)
        tokens.append([result.tokens for result in run(core, prompts, params)])
        core.close()
    num_equal = sum(a == b for a, b in zip(*tokens, strict=True))
    assert num_equal == len(prompts) if dtype == "float32" else num_equal > 0, tokens


def test_log_probabilities_in_bfloat16_are_as_good_as_those_of_transformers(model: tuple[Any, Path]) -> None:
    """Error against float32, beside that of Transformers in bfloat16 on the same GPU."""
    oracle, folder = model
    exact = copy.deepcopy(oracle).float().cuda()
    rounded = copy.deepcopy(oracle).bfloat16().cuda()
    prompts = random_prompts((40, 55, 33), VOCAB_SIZE)
    core = make_core(folder, device="cuda", dtype="bfloat16")
    ours, theirs = [], []
    for prompt, result in zip(prompts, run(core, prompts, greedy(12, logprobs=5)), strict=True):
        sequence = torch.tensor([[*prompt, *result.tokens]]).cuda()
        with torch.no_grad():
            expected, other = (
                torch.log_softmax(each(sequence).logits[0, len(prompt) - 1 : -1].float(), -1)
                for each in (exact, rounded)
            )
        for row, logprobs in enumerate(result.logprobs):
            for token, value in logprobs.items():
                ours.append(abs(value - float(expected[row, token])))
                theirs.append(abs(float(other[row, token]) - float(expected[row, token])))
    core.close()
    assert sum(ours) <= 1.25 * sum(theirs) + 1e-3 * len(ours)


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
