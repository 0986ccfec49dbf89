"""A pooling head as a plugin, on a model without a KV cache and with attention in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from core.plugins import install_plugin, mean_pooling, write_checkpoint
from penstock.contract import RpcCall, SamplingParams
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import ConfigError, ContextTooLong, UnsupportedFeature
from penstock.llm import LLM
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.engines import add, make_core, random_prompts

PROMPTS = random_prompts((5, 37, 1, 40, 13, 22, 60, 3), VOCAB_SIZE, seed=3)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "output_head": mean_pooling.HEAD,
    "enable_chunked_prefill": False,
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    mean_pooling.register()
    folder = write_checkpoint(tmp_path_factory.mktemp("bidirectional"), mean_pooling.ARCHITECTURE)
    return folder, load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def folder(weights: tuple[Path, dict[str, Tensor]]) -> Path:
    return weights[0]


def oracle(state: dict[str, Tensor], prompt: Sequence[int]) -> Tensor:
    """The mean hidden state of a prompt, by the definition of the layers."""

    def norm(x_SD: Tensor, name: str) -> Tensor:
        return F.rms_norm(x_SD, x_SD.shape[-1:], state[f"model.{name}.weight"], 1e-5)

    x_SD = state["model.embed_tokens.weight"][torch.tensor(prompt)]
    for index in range(2):
        layer = f"layers.{index}"

        def project(x_SD: Tensor, name: str, layer: str = layer) -> Tensor:
            return x_SD @ state[f"model.{layer}.{name}.weight"].T

        normed_SD = norm(x_SD, f"{layer}.input_layernorm")
        heads = [project(normed_SD, f"self_attn.{name}_proj").unflatten(1, (-1, 16)) for name in "qkv"]
        x_SD = x_SD + project(mean_pooling.attend(*heads), "self_attn.o_proj")
        normed_SD = norm(x_SD, f"{layer}.post_attention_layernorm")
        gated_SI = F.silu(project(normed_SD, "mlp.gate_proj")) * project(normed_SD, "mlp.up_proj")
        x_SD = x_SD + project(gated_SI, "mlp.down_proj")
    return norm(x_SD, "norm").mean(0)


def pool(core: EngineCore, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    for index, prompt in enumerate(prompts):
        add(core, f"r{index}", prompt, SamplingParams(seed=0))
    found: dict[str, np.ndarray] = {}
    for _ in range(200):
        if not core.has_unfinished_requests():
            return [found[f"r{index}"] for index in range(len(prompts))]
        for output in core.step():
            assert output.error is None, output.error
            assert output.pooled is not None
            found[output.req_id] = output.pooled.to_numpy()
    raise AssertionError("it does not end")


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_prompts_of_mixed_lengths_are_pooled_whole(
    weights: tuple[Path, dict[str, Tensor]], async_scheduling: bool
) -> None:
    folder, state = weights
    core = make_core(folder, **OPTIONS, async_scheduling=async_scheduling)
    together = pool(core, PROMPTS)
    for prompt, found in zip(PROMPTS, together, strict=True):
        np.testing.assert_allclose(found, oracle(state, prompt).numpy(), rtol=2e-4, atol=2e-5)
        assert pool(core, [prompt])[0].tobytes() == found.tobytes()
    core.close()


@pytest.mark.one_path(reason="recorded programs belong to the fast paths")
def test_each_attention_cuts_the_program(folder: Path) -> None:
    core = make_core(folder, **OPTIONS)
    plain = make_core(folder, **OPTIONS, fast_paths="off")
    fast = pool(core, PROMPTS)
    assert [found.tobytes() for found in fast] == [found.tobytes() for found in pool(plain, PROMPTS)]

    def segments(worker: Any) -> set[int]:
        recorded = worker.runner.execution.programs._recorded.values()
        return {0 if found is None else found.num_segments for found in recorded}

    assert core.collective_rpc(RpcCall(segments)) == [{3}]
    core.close()
    plain.close()


def test_a_prompt_that_no_step_runs_whole_is_refused(folder: Path) -> None:
    core = make_core(folder, **OPTIONS)
    with pytest.raises(ContextTooLong, match=r"65 tokens.*enable_chunked_prefill=False.*max_num_batched_tokens=64"):
        add(core, "long", [5] * 65, SamplingParams(seed=0))
    assert len(pool(core, PROMPTS)) == len(PROMPTS)
    core.close()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_prompts_in_chunks_are_pooled_as_whole_ones(tmp_path: Path, async_scheduling: bool) -> None:
    mean_pooling.register()
    tiny_checkpoint(tmp_path)
    found = []
    for max_num_batched_tokens in (512, 16):
        core = make_core(
            tmp_path,
            dtype="float32",
            output_head=mean_pooling.LAST_TOKEN_HEAD,
            async_scheduling=async_scheduling,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        found.append([vector.tobytes() for vector in pool(core, PROMPTS)])
        core.close()
    assert found[0] == found[1]


@pytest.mark.one_path(reason="ranks are compared with each other")
@pytest.mark.slow
def test_ranks_of_a_tensor_parallel_group_pool_alike(
    weights: tuple[Path, dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin(tmp_path, monkeypatch, "mean_pooling")
    folder, state = weights
    core = make_core(folder, **OPTIONS, tensor_parallel_size=2)
    for prompt, found in zip(PROMPTS, pool(core, PROMPTS), strict=True):
        np.testing.assert_allclose(found, oracle(state, prompt).numpy(), rtol=2e-4, atol=2e-5)
    core.close()


def test_what_does_not_go_together_is_refused_at_start(folder: Path) -> None:
    with pytest.raises(UnsupportedFeature, match="output_head='mean' pools"):
        LLM(str(folder), **OPTIONS)
    with pytest.raises(ConfigError, match="enable_chunked_prefill=False is not valid for a model that generates"):
        make_core(folder, enable_chunked_prefill=False)
    with pytest.raises(ConfigError, match="output_head='median' is not registered. Registered: generate, last"):
        make_core(folder, **{**OPTIONS, "output_head": "median"})
