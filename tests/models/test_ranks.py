"""Models whose layers are split over ranks: each loads its part of the checkpoint, and all give the logits of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config import EngineConfig, LoadConfig, ModelConfig
from penstock.contract import SchedulerOutput
from penstock.errors import RanksDisagree, UnsupportedFeature
from penstock.executor import MultiprocessExecutor, create_executor
from penstock.layers.linear import restore_weights
from penstock.loader.loader import build_model, load_model
from penstock.models.attention_layers import attention_layers
from penstock.models.causal_lm import CausalLM
from penstock.parallel import GroupAgreement, ParallelState
from support.checkpoints import save_checkpoint, tiny_model
from support.plain_attention import sequence_logits
from support.quantized_checkpoints import W8A8, awq_layer, gptq_layer, int8_layer, packed_layer, w4a16, write_quantized
from support.ranks import SilentGroup, contexts, run_ranks

SEQUENCES = [[3, 14, 15, 92, 65, 35], [89, 79]]
# Sizes that two and four ranks divide, vocabularies apart; two KV heads, which four ranks have twice.
SIZES: dict[str, Any] = {"vocab_size": 96, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "attention_bias": True, "mlp_bias": True},
    "qwen3": {**SIZES, "vocab_size": 99, "tie_word_embeddings": True},
    "phi3": SIZES,
    "gemma2": SIZES,
    "granite": SIZES,
    "ernie4_5": {**SIZES, "use_bias": True},
    "hunyuan_v1_dense": SIZES,
    "olmo2": SIZES,
    "gpt2": {"vocab_size": 97, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0},
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_has_the_logits_of_the_whole_model(family: str, size: int, tmp_path: Path) -> None:
    config = save_checkpoint(tiny_model(family, **FAMILIES[family]), tmp_path)

    def load(parallel: ParallelState) -> Any:
        return load_model(config, LoadConfig(use_tqdm_on_load=False), parallel, torch.device("cpu"), torch.float32)

    whole = load(ParallelState())
    expected = sequence_logits(whole, SEQUENCES)
    ranks = [load(parallel) for parallel in contexts(size)]
    for logits in run_ranks(size, lambda rank: sequence_logits(ranks[rank], SEQUENCES)):
        assert not isinstance(logits, BaseException), logits
        for ours, theirs in zip(logits, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    heads = [(layer.num_heads, layer.num_kv_heads) for layer in attention_layers(ranks[0]).values()]
    (whole_heads, *_) = [(layer.num_heads, layer.num_kv_heads) for layer in attention_layers(whole).values()]
    assert set(heads) == {(whole_heads[0] // size, max(1, whole_heads[1] // size))}


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_that_become_integers_are_split_before(quantization: str, tmp_path: Path) -> None:
    config = save_checkpoint(tiny_model("llama", **SIZES), tmp_path)
    rounded = type(config).load(str(tmp_path), quantization=quantization)

    def load(config: Any, parallel: ParallelState) -> Any:
        return load_model(config, LoadConfig(use_tqdm_on_load=False), parallel, torch.device("cpu"), torch.float32)

    exact = torch.cat(sequence_logits(load(config, ParallelState()), SEQUENCES))
    error = (torch.cat(sequence_logits(load(rounded, ParallelState()), SEQUENCES)) - exact).abs().mean()
    ranks = [load(rounded, parallel) for parallel in contexts(2)]
    for logits in run_ranks(2, lambda rank: sequence_logits(ranks[rank], SEQUENCES)):
        assert not isinstance(logits, BaseException), logits
        # What a row of inputs is rounded by differs where two ranks have half of it each.
        assert 0 < (torch.cat(logits) - exact).abs().mean() < 1.25 * error


# Input features of 32 a group; those of attention's output are two groups, those of the MLP's four.
QUANTIZED = {
    "gptq": (gptq_layer(32, desc_act=False), {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}),
    "gptq-one-group": (
        gptq_layer(128, desc_act=False),
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False},
    ),
    "awq": (awq_layer(32), {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}),
    "w4a16": (packed_layer(32, symmetric=False), w4a16(symmetric=False)),
    "w8a8": (int8_layer, W8A8),
}


def load_ranks(config: ModelConfig, size: int) -> list[CausalLM]:
    option = LoadConfig(use_tqdm_on_load=False)
    return [load_model(config, option, parallel, torch.device("cpu"), torch.float32) for parallel in contexts(size)]


@pytest.mark.parametrize("form", QUANTIZED)
def test_ranks_share_the_integers_of_a_checkpoint(form: str, tmp_path: Path) -> None:
    quantize, quantization_config = QUANTIZED[form]
    # A row of each matrix is one group there.
    sizes = {"hidden_size": 128, "head_dim": 32} if form == "gptq-one-group" else {}
    written = write_quantized(tmp_path, quantize, quantization_config, **{**SIZES, "intermediate_size": 128, **sizes})
    floats = type(written.config).load(str(written.float_folder))
    (whole,) = load_ranks(floats, 1)
    expected = torch.cat(sequence_logits(whole, SEQUENCES))
    error = (torch.cat(sequence_logits(load_ranks(written.config, 1)[0], SEQUENCES)) - expected).abs().mean()
    ranks = load_ranks(written.config, 2)
    for logits in run_ranks(2, lambda rank: sequence_logits(ranks[rank], SEQUENCES)):
        assert not isinstance(logits, BaseException), logits
        # Of weights that are the same: what is left is how activations are rounded.
        assert 0 < (torch.cat(logits) - expected).abs().mean() < 1.5 * error
    restore_weights(whole)
    for model, parts in zip(ranks, load_ranks(floats, 2), strict=True):
        restore_weights(model)
        restore_weights(parts)
        others = dict(parts.named_parameters())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, others[name], rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize(
    ("desc_act", "size", "message"),
    [
        (
            False,
            4,
            r"tensor_parallel_size=4 .*: 64 input features of model.layers.0.self_attn.o_proj, in groups of 32, cannot "
            r"be shared by 4 ranks.*all of its layers accept: 1, 2\.",
        ),
        (True, 2, r"model.layers.0.*_proj: its groups have inputs from anywhere \(g_idx\)"),
    ],
)
def test_groups_that_ranks_cannot_share_are_refused(desc_act: bool, size: int, message: str, tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": desc_act}
    written = write_quantized(
        tmp_path, gptq_layer(32, desc_act=desc_act), config, **{**SIZES, "intermediate_size": 128}
    )
    with pytest.raises(UnsupportedFeature, match=message):
        load_ranks(written.config, size)


def test_heads_that_do_not_divide_are_refused_by_the_model(tmp_path: Path) -> None:
    config = save_checkpoint(tiny_model("llama", **{**SIZES, "num_key_value_heads": 4}), tmp_path)
    with pytest.raises(UnsupportedFeature, match="4 attention heads with 4 KV heads cannot be shared by 3 ranks"):
        build_model(config, ParallelState(tensor=SilentGroup(0, 3)))


def test_a_size_that_one_layer_refuses_is_refused_before_workers_start_with_sizes_that_all_layers_accept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Twelve heads can be shared by 3 and 6 ranks, and four KV heads cannot.
    sizes = {**SIZES, "hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 4}
    save_checkpoint(tiny_model("llama", **sizes), tmp_path)
    monkeypatch.setattr(MultiprocessExecutor, "__init__", lambda *_: pytest.fail("workers start"))
    config = EngineConfig.create(tmp_path, tensor_parallel_size=6, device="cpu")
    with pytest.raises(UnsupportedFeature, match=r"tensor_parallel_size=6 .*12 attention heads.*accept: 1, 2, 4\."):
        create_executor(config)


def step(step_id: int, **counts: int) -> SchedulerOutput:
    total = sum(counts.values())
    return SchedulerOutput(step_id=step_id, num_scheduled_tokens=counts, total_num_scheduled_tokens=total)


def test_a_rank_that_was_given_another_step_is_named_with_the_step() -> None:
    agreements = [GroupAgreement(parallel.tensor) for parallel in contexts(3)]
    same, other = step(7, a=3, b=1), step(7, a=3)
    assert run_ranks(3, lambda rank: agreements[rank].on_step(same)) == [None] * 3
    for error in run_ranks(3, lambda rank: agreements[rank].on_step(other if rank == 1 else same)):
        assert isinstance(error, RanksDisagree)
        assert "Step 7: rank 1 runs step 7 with 3 tokens of 1 requests" in str(error)
    later = run_ranks(3, lambda rank: agreements[rank].on_step(step(8, a=1) if rank == 2 else step(9, a=1)))
    assert all("rank 2 runs step 8" in str(error) for error in later)
    assert ParallelState().agreement is None
