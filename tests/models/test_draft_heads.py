"""Draft heads against their papers' definitions, from checkpoints in each format."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.attention import NO_CONTEXT, AuxHiddenStates
from penstock.config import LoadConfig, ModelConfig
from penstock.errors import CheckpointError, ModelError, UnsupportedFeature
from penstock.loader.loader import load_model
from penstock.models.causal_lm import CausalLM
from penstock.models.decoder import DecoderForCausalLM
from penstock.models.draft_head import STORED_NAMES, DraftHead
from penstock.parallel import ParallelState
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.draft_heads import (
    HIDDEN,
    deepseek_mtp_hidden,
    eagle3_fused,
    eagle3_hidden,
    eagle3_logits,
    eagle3_weights,
    eagle_hidden,
    eagle_weights,
    logits_of,
    mtp_hidden,
    mtp_weights,
    random_weights,
    write_deepseek_mtp,
    write_head,
)
from support.plain_attention import plain_context
from support.qwen_mtp import qwen_mtp_hidden, write_qwen_mtp

LENGTHS = [7, 1, 12]


def load(folder: Path, **config: Any) -> CausalLM:
    model_config = ModelConfig.load(str(folder), model_impl="penstock")
    model_config = dataclasses.replace(model_config, hf_config={**model_config.hf_config, **config})
    return load_model(model_config, LoadConfig(), ParallelState(), torch.device("cpu"), torch.float32)


def load_head(folder: Path, architecture: str, target: CausalLM, weights: Mapping[str, Tensor]) -> DraftHead:
    head = load(folder, architectures=[architecture], **{STORED_NAMES: list(weights)})
    assert isinstance(head, DraftHead)
    head.attach(target)
    return head


@pytest.fixture
def target(tmp_path: Path) -> DecoderForCausalLM:
    tiny_checkpoint(tmp_path / "target", num_hidden_layers=5)
    model = load(tmp_path / "target")
    assert isinstance(model, DecoderForCausalLM)
    return model


def random_step(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions, and hidden states."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(LENGTHS)
    ids_T = torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator, dtype=torch.int32)
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS])
    return ids_T, positions_T, torch.randn(num_tokens, HIDDEN, generator=generator)


def assert_computes(
    head: DraftHead, expected: Callable[[Tensor, Tensor], Tensor], embedding: Tensor, logits: Callable[[Tensor], Tensor]
) -> None:
    """expected: a sequence's next hidden states from its tokens' embeddings and its hidden states."""
    ids_T, positions_T, hidden_TD = random_step()
    with torch.inference_mode():
        found_TD = head(ids_T, positions_T, plain_context(head, LENGTHS), hidden_TD)
        parts = zip(embedding[ids_T.long()].split(LENGTHS), hidden_TD.split(LENGTHS), strict=True)
        expected_TD = torch.cat([expected(*part) for part in parts])
        torch.testing.assert_close(found_TD, expected_TD, rtol=0, atol=1e-4)
        torch.testing.assert_close(head.compute_logits(found_TD, NO_CONTEXT), logits(expected_TD), rtol=0, atol=1e-3)
        chosen = head.compute_greedy(found_TD, NO_CONTEXT)
    if chosen is not None:
        assert chosen.token_ids_R.tolist() == logits(expected_TD).argmax(-1).tolist()


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("options", [{}, {"has_input_norm": True}, {"bias": True}], ids=str)
def test_eagle(tmp_path: Path, target: DecoderForCausalLM, prefix: str, options: dict[str, Any]) -> None:
    stored = eagle_weights(prefix=prefix, **options)
    write_head(tmp_path / "head", stored)
    head = load_head(tmp_path / "head", "EagleLlamaForCausalLM", target, stored)
    weights = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    embedding = target.model.embed_tokens.weight
    assert_computes(head, lambda *args: eagle_hidden(weights, *args), embedding, logits_of(target))


def test_eagle_with_an_embedding_and_a_head_of_its_own(tmp_path: Path, target: DecoderForCausalLM) -> None:
    own = random_weights({"embed_tokens.weight": (VOCAB_SIZE, HIDDEN), "lm_head.weight": (VOCAB_SIZE, HIDDEN)}, seed=5)
    weights = {**eagle_weights(), **own}
    write_head(tmp_path / "head", weights)
    head = load_head(tmp_path / "head", "EagleLlamaForCausalLM", target, weights)
    assert_computes(
        head,
        lambda *args: eagle_hidden(weights, *args),
        own["embed_tokens.weight"],
        lambda hidden: hidden @ own["lm_head.weight"].T,
    )


@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_eagle3(tmp_path: Path, target: DecoderForCausalLM, layer: str, norm_before_residual: bool) -> None:
    weights = eagle3_weights(layer=layer)
    write_head(tmp_path / "head", weights, draft_vocab_size=40, norm_before_residual=norm_before_residual)
    head = load_head(tmp_path / "head", "Eagle3LlamaForCausalLM", target, weights)
    assert_computes(
        head,
        lambda *args: eagle3_hidden(weights, *args, layer=layer, norm_before_residual=norm_before_residual),
        target.model.embed_tokens.weight,
        lambda hidden: eagle3_logits(weights, hidden),
    )


def test_eagle3_fuses_what_comes_before_three_layers(tmp_path: Path, target: DecoderForCausalLM) -> None:
    weights = eagle3_weights()
    write_head(tmp_path / "head", weights, draft_vocab_size=40, eagle_aux_hidden_state_layer_ids=[0, 2, 4])
    head = load_head(tmp_path / "head", "Eagle3LlamaForCausalLM", target, weights)
    aux = [random_step(seed)[2] for seed in range(3)]
    found = head.from_target(torch.zeros(1), aux)
    torch.testing.assert_close(found, eagle3_fused(weights, aux), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (2,)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}, (0, 1, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}}, (1, 3, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, (2,)),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
            },
            (1, 3, 5),
        ),
    ],
    ids=str,
)
def test_eagle3_reads_from_these_layers(
    tmp_path: Path, target: DecoderForCausalLM, config: dict[str, Any], expected: tuple[int, ...]
) -> None:
    weights = eagle3_weights()
    write_head(tmp_path / "head", weights, draft_vocab_size=40, **config)
    assert load_head(tmp_path / "head", "Eagle3LlamaForCausalLM", target, weights).aux_layers == expected


def test_eagle3_may_fuse_one_layer_twice(tmp_path: Path, target: DecoderForCausalLM) -> None:
    weights = eagle3_weights()
    write_head(tmp_path / "head", weights, draft_vocab_size=40, eagle_aux_hidden_state_layer_ids=[1, 3, 3])
    head = load_head(tmp_path / "head", "Eagle3LlamaForCausalLM", target, weights)
    first, second = random_step(0)[2], random_step(1)[2]
    assert head.aux_layers == (1, 3)
    found = head.from_target(torch.zeros(1), [first, second])
    torch.testing.assert_close(found, eagle3_fused(weights, [first, second, second]), rtol=0, atol=1e-4)


def test_mtp(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "qwen", "qwen2")
    qwen = load(tmp_path / "qwen")
    weights = {**_tensors(tmp_path / "qwen"), **mtp_weights()}
    options = {"model_type": "mimo", "num_hidden_layers": 2, "num_nextn_predict_layers": 1, "attention_bias": True}
    write_head(tmp_path / "mimo", weights, architectures=["MiMoForCausalLM"], **options)
    target = load(tmp_path / "mimo")
    head = load_head(tmp_path / "mimo", "MiMoMTP", target, weights)
    embedding = weights["model.embed_tokens.weight"]
    assert_computes(head, lambda *args: mtp_hidden(weights, *args), embedding, logits_of(target))
    ids_T, positions_T, _ = random_step()
    with torch.inference_mode():
        plain = [model(ids_T, positions_T, plain_context(model, LENGTHS)) for model in (qwen, target)]
    assert torch.equal(*plain)
    assert head.aux_layers == (2,)


@pytest.mark.parametrize("options", [{}, {"q_lora_rank": None, "rope_interleave": False}], ids=str)
def test_deepseek_mtp(tmp_path: Path, options: dict[str, Any]) -> None:
    oracle = write_deepseek_mtp(tmp_path, **options)
    target = load(tmp_path)
    assert isinstance(target, DecoderForCausalLM)
    head = load_head(tmp_path, "DeepSeekMTP", target, {})
    embedding = oracle.get_input_embeddings().weight
    assert_computes(
        head,
        lambda *args: deepseek_mtp_hidden(oracle, *args),
        embedding,
        logits_of(target),
    )
    assert head.aux_layers == ()


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("are_stacked", [False, True])
def test_qwen3_next_mtp(tmp_path: Path, family: str, are_stacked: bool) -> None:
    oracle = write_qwen_mtp(tmp_path, family, are_stacked=are_stacked)
    target = load(tmp_path)
    assert isinstance(target, DecoderForCausalLM)
    head = load_head(tmp_path, "Qwen3NextMTP", target, {})
    embedding = oracle.get_input_embeddings().weight
    assert_computes(head, lambda *args: qwen_mtp_hidden(oracle, *args), embedding, logits_of(target))
    assert head.aux_layers == ()


def test_taps_take_down_the_residual_stream(target: DecoderForCausalLM) -> None:
    ids_T, positions_T, _ = random_step()
    seen: dict[int, Tensor] = {}
    for index, layer in enumerate(target.model.layers):
        layer.register_forward_pre_hook(
            lambda _, args, index=index: seen.update({index: args[0] + (0 if args[1] is None else args[1])})
        )
    aux = AuxHiddenStates((0, 3, 5))
    with torch.inference_mode():
        context = dataclasses.replace(plain_context(target, LENGTHS), aux=aux)
        hidden_TD = target(ids_T, positions_T, context)
        assert torch.equal(aux.states[0], seen[0])
        assert torch.equal(aux.states[3], seen[3])
        torch.testing.assert_close(target.model.norm(aux.states[5]), hidden_TD)
        assert torch.equal(target(ids_T, positions_T, plain_context(target, LENGTHS)), hidden_TD)
    assert len(aux.states) == 3


def _eagle3(
    folder: Path, target: DecoderForCausalLM, change: Callable[[dict[str, Tensor]], None], **config: Any
) -> None:
    weights = eagle3_weights()
    change(weights)
    write_head(folder, weights, **{"draft_vocab_size": 40, **config})
    load_head(folder, "Eagle3LlamaForCausalLM", target, weights)


@pytest.mark.parametrize(
    ("change", "config", "error", "message"),
    [
        (lambda weights: weights.pop("d2t"), {}, CheckpointError, "no tensor d2t"),
        (lambda weights: weights["d2t"].fill_(90), {}, CheckpointError, "does not name 40 of the tokens"),
        (lambda weights: weights.update(d2t=weights["d2t"][:3]), {}, CheckpointError, r"must be \[40\] integers"),
        (lambda weights: weights.pop("norm.weight"), {}, CheckpointError, "1 missing: norm.weight"),
        (lambda weights: None, {"draft_vocab_size": 98}, UnsupportedFeature, "draft_vocab_size=98"),
        (
            lambda weights: None,
            {"vocab_size": 98},
            ModelError,
            "vocab_size=98, but the target model has 97",
        ),
        (lambda weights: None, {"num_hidden_layers": 2}, UnsupportedFeature, "num_hidden_layers=2"),
        (lambda weights: None, {"eagle_aux_hidden_state_layer_ids": [3, 1, 2]}, UnsupportedFeature, "layer_ids"),
        (lambda weights: None, {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, ModelError, "1, 2, 6, but .* has 5"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    tmp_path: Path,
    target: DecoderForCausalLM,
    change: Callable[[dict[str, Tensor]], None],
    config: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        _eagle3(tmp_path / "head", target, change, **config)


def test_a_target_without_hidden_states_between_layers_is_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "target", "gpt2")
    weights = eagle_weights()
    write_head(tmp_path / "head", weights)
    with pytest.raises(UnsupportedFeature, match="GPT2LMHeadModel does not give"):
        load_head(tmp_path / "head", "EagleLlamaForCausalLM", load(tmp_path / "target"), weights)


def _tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
