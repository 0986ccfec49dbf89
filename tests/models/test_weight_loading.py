"""`load_weights` takes exactly the model's weights, or says which ones are wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.config import LoadConfig
from penstock.errors import CheckpointError
from penstock.layers.linear import process_weights_after_loading
from penstock.loader.loader import load_model
from penstock.models.causal_lm import CausalLM
from penstock.models.registry import find_model_class
from penstock.parallel import ParallelState
from support.checkpoints import FAMILIES, oracle_logits, save_checkpoint, tiny_checkpoint, tiny_model
from support.plain_attention import sequence_logits

TOKENS = [3, 1, 4, 1, 5, 9]


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return dict(tiny_model("qwen3", head_dim=32).state_dict())


@pytest.fixture(scope="module")
def expected() -> Tensor:
    return oracle_logits(tiny_model("qwen3", head_dim=32), TOKENS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    config = tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", head_dim=32)
    return find_model_class(config)(config, ParallelState())


def test_the_slots_are_the_names_and_shapes_of_the_checkpoint(model: CausalLM, weights: dict[str, Tensor]) -> None:
    slots = {name: slot.shape for name, slot in model.checkpoint_slots().items()}
    assert slots == {name: tuple(tensor.shape) for name, tensor in weights.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_slots_of_every_family_are_those_of_its_checkpoint(tmp_path: Path, family: str, tied: bool) -> None:
    oracle = tiny_model(family, tie_word_embeddings=tied)
    config = save_checkpoint(oracle, tmp_path)
    slots = find_model_class(config)(config, ParallelState()).checkpoint_slots()
    expected = {name: tuple(tensor.shape) for name, tensor in oracle.state_dict().items()}
    if tied:
        del expected["lm_head.weight"]
    assert {name: slot.shape for name, slot in slots.items()} == expected


@given(st.randoms(use_true_random=False))
@settings(max_examples=10, deadline=None)
def test_the_order_of_the_weights_does_not_matter(
    model: CausalLM, weights: dict[str, Tensor], expected: Tensor, random: Random
) -> None:
    items = list(weights.items())
    random.shuffle(items)
    model.load_weights(items)
    torch.testing.assert_close(sequence_logits(model, [TOKENS])[0], expected, rtol=0, atol=1e-4)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_every_wrong_weight_is_named_and_no_right_one(
    model: CausalLM, weights: dict[str, Tensor], data: st.DataObject
) -> None:
    names = st.sets(st.sampled_from(sorted(weights)), max_size=3)
    missing = data.draw(names, "missing")
    misshapen = data.draw(names, "misshapen") - missing
    duplicate = data.draw(names, "duplicate") - missing - misshapen
    unexpected = {f"model.extra.{index}.weight" for index in range(data.draw(st.integers(0, 3), "unexpected"))}
    items = [
        (name, tensor[:-1] if name in misshapen else tensor) for name, tensor in weights.items() if name not in missing
    ]
    items += [(name, weights[name]) for name in duplicate] + [(name, torch.zeros(1)) for name in unexpected]
    if not (missing or misshapen or duplicate or unexpected):
        model.load_weights(items)
        return
    with pytest.raises(CheckpointError) as raised:
        model.load_weights(items)
    message = str(raised.value)
    for kind, wrong in (
        ("missing", missing),
        ("misshapen", misshapen),
        ("duplicate", duplicate),
        ("unexpected", unexpected),
    ):
        assert (f"{len(wrong)} {kind}: " in message) == bool(wrong)
        assert all(name in message for name in wrong)
    for name in set(weights) - missing - misshapen - duplicate:
        assert name not in message


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_no_weight_may_be_missing(tmp_path: Path, family: str) -> None:
    """Biases neither, which these families have."""
    oracle = tiny_model(family)
    config = save_checkpoint(oracle, tmp_path)
    model = find_model_class(config)(config, ParallelState())
    weights = dict(oracle.state_dict())
    for missing in model.checkpoint_slots():
        with pytest.raises(CheckpointError, match=rf"Weights 1 missing: {re.escape(missing)}\. "):
            model.load_weights((name, tensor) for name, tensor in weights.items() if name != missing)


def test_a_long_list_is_cut_and_counted(model: CausalLM) -> None:
    with pytest.raises(CheckpointError, match=r"25 missing: .* and 17 more"):
        model.load_weights([])


def test_a_misshapen_weight_comes_with_both_shapes(model: CausalLM, weights: dict[str, Tensor]) -> None:
    changed = weights | {"model.layers.1.self_attn.k_norm.weight": torch.zeros(4, 32)}
    with pytest.raises(CheckpointError, match=r"k_norm\.weight \(has \[4, 32\], needs \[32\]\)"):
        model.load_weights(changed.items())


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.float8_e4m3fn], ids=str)
def test_weights_of_other_dtypes_are_refused(model: CausalLM, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    changed = weights | {"model.norm.weight": weights["model.norm.weight"].to(dtype)}
    with pytest.raises(CheckpointError, match=rf"model\.norm\.weight \({dtype}\)"):
        model.load_weights(changed.items())


@pytest.mark.parametrize("buffer", ["inv_freq", "cos_cached", "sin_cached"])
def test_rotary_buffers_of_old_checkpoints_are_ignored(
    model: CausalLM, weights: dict[str, Tensor], expected: Tensor, buffer: str
) -> None:
    old = {f"model.layers.{layer}.self_attn.rotary_emb.{buffer}": torch.zeros(1, 1, 128, 16) for layer in (0, 1)}
    old[f"model.rotary_emb.{buffer}"] = torch.zeros(16)
    model.load_weights((weights | old).items())
    torch.testing.assert_close(sequence_logits(model, [TOKENS])[0], expected, rtol=0, atol=1e-4)


def test_a_name_that_only_begins_like_an_ignorable_one_is_unexpected(
    model: CausalLM, weights: dict[str, Tensor]
) -> None:
    scale = {"model.layers.0.self_attn.rotary_emb.inv_freq_scale": torch.zeros(16)}
    with pytest.raises(CheckpointError, match=r"1 unexpected: .*inv_freq_scale"):
        model.load_weights((weights | scale).items())


@pytest.mark.parametrize("tied", [True, False])
def test_an_lm_head_is_ignored_when_tied_and_needed_otherwise(tmp_path: Path, tied: bool) -> None:
    oracle = tiny_model("llama", tie_word_embeddings=tied)
    config = save_checkpoint(oracle, tmp_path)
    model = find_model_class(config)(config, ParallelState())
    others = {name: tensor for name, tensor in oracle.state_dict().items() if name != "lm_head.weight"}
    with_head = others | {"lm_head.weight": oracle.state_dict()["lm_head.weight"]}
    model.load_weights(with_head.items())
    if tied:
        model.load_weights(others.items())
    else:
        with pytest.raises(CheckpointError, match=r"1 missing: lm_head\.weight"):
            model.load_weights(others.items())


def test_gpt2_is_loaded_from_openai_s_names_and_beside_old_masks(tmp_path: Path) -> None:
    oracle = tiny_model("gpt2")
    config = save_checkpoint(oracle, tmp_path)
    model = find_model_class(config)(config, ParallelState())
    weights = {name.removeprefix("transformer."): tensor for name, tensor in oracle.state_dict().items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 128, 128) for layer in (0, 1)}
    masks |= {f"h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in (0, 1)}
    model.load_weights((weights | masks).items())
    torch.testing.assert_close(sequence_logits(model, [TOKENS])[0], oracle_logits(oracle, TOKENS), rtol=0, atol=1e-4)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_gpt2_is_quantized_from_openai_s_names(tmp_path: Path, quantization: str) -> None:
    logits = []
    for prefix in ("transformer.", ""):
        config = tiny_checkpoint(tmp_path / f"names-{prefix}", "gpt2")
        file = config.folder / "model.safetensors"
        save_file({name.replace("transformer.", prefix): tensor for name, tensor in load_file(file).items()}, file)
        config = replace(config, quantization=quantization)
        model = load_model(config, LoadConfig(), ParallelState(), torch.device("cpu"), torch.float32)
        logits.append(sequence_logits(model, [TOKENS])[0])
    assert torch.equal(*logits)


def test_a_transposed_weight_is_checked_as_the_checkpoint_has_it(tmp_path: Path) -> None:
    oracle = tiny_model("gpt2")
    config = save_checkpoint(oracle, tmp_path)
    model = find_model_class(config)(config, ParallelState())
    name = "transformer.h.0.mlp.c_fc.weight"
    weights = dict(oracle.state_dict())
    weights[name] = weights[name].t()
    with pytest.raises(CheckpointError, match=r"1 misshapen: .*c_fc\.weight \(has \[112, 64\], needs \[64, 112\]\)"):
        model.load_weights(weights.items())


@pytest.mark.parametrize("tied", [True, False])
def test_packed_weights_can_be_loaded_anew(tmp_path: Path, tied: bool) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1100, "vocab_size": 1200, "tie_word_embeddings": tied}
    config = tiny_checkpoint(tmp_path, "llama", seed=1, **sizes)
    model = load_model(config, LoadConfig(), ParallelState(), torch.device("cpu"), torch.float32)
    other = tiny_model("llama", seed=2, **sizes)
    model.load_weights(other.state_dict().items())
    plain = sequence_logits(model, [TOKENS])[0]
    process_weights_after_loading(model)
    packed = sequence_logits(model, [TOKENS])[0]
    expected = oracle_logits(other, TOKENS)
    torch.testing.assert_close(plain, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-4)
