"""A checkpoint decides whether an output projection is tied to its embedding, as it does in Transformers."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.attention import NO_CONTEXT
from penstock.config import LoadConfig, ModelConfig
from penstock.engine.planning.plan import plan_engine
from penstock.errors import CheckpointError
from penstock.loader.loader import load_model
from penstock.loader.sharded_state import copy_model_files, save_sharded_state
from penstock.models.causal_lm import CausalLM
from penstock.parallel import ParallelState
from support.checkpoints import FAMILIES, oracle_logits, save_checkpoint, tiny_model
from support.plain_attention import plain_context, sequence_logits
from support.ranks import SilentGroup

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
SOURCE = {"gpt2": "transformer.wte.weight"}
STORED = ["both", "equal", "head", "embedding"]


def checkpoint(folder: Path, family: str, stored: str) -> ModelConfig:
    """A checkpoint whose config.json ties the projection, with these of the two matrices."""
    config = save_checkpoint(tiny_model(family, tie_word_embeddings=True), folder)
    weights = load_file(folder / "model.safetensors")
    source = SOURCE.get(family, "model.embed_tokens.weight")
    embedding = weights.pop(source)
    if stored != "head":
        weights[source] = embedding
    if stored != "embedding":
        weights["lm_head.weight"] = embedding.flip(0).contiguous() if stored == "both" else embedding.clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return config


def loaded(config: ModelConfig, load_format: str = "auto") -> CausalLM:
    options = LoadConfig(load_format=load_format, use_tqdm_on_load=False)
    return load_model(config, options, ParallelState(), torch.device("cpu"), torch.float32)


def transformers_logits(folder: Path, family: str) -> Tensor:
    model_class = getattr(transformers, FAMILIES[family].architecture)
    return oracle_logits(model_class.from_pretrained(folder, attn_implementation="eager").eval(), TOKENS)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.each_value_quick
def test_every_family_has_the_logits_of_transformers(tmp_path: Path, family: str, stored: str) -> None:
    config = checkpoint(tmp_path, family, stored)
    expected = transformers_logits(tmp_path, family)
    torch.testing.assert_close(sequence_logits(loaded(config), [TOKENS])[0], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.each_value_quick
def test_the_same_holds_for_models_that_run_through_transformers(tmp_path: Path, family: str, stored: str) -> None:
    config = replace(checkpoint(tmp_path, family, stored), model_impl="transformers")
    expected = transformers_logits(tmp_path, family)
    torch.testing.assert_close(sequence_logits(loaded(config), [TOKENS])[0], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("stored", ["both", "head"])
@pytest.mark.each_value_quick
def test_quantized_weights_are_those_that_are_stored(tmp_path: Path, stored: str, quantization: str) -> None:
    config = checkpoint(tmp_path / "tied", "qwen3", stored)
    right = tiny_model("qwen3", tie_word_embeddings=stored == "head")
    if stored == "both":
        weights = load_file(tmp_path / "tied" / "model.safetensors")
        right.load_state_dict(weights)
    expected = save_checkpoint(right, tmp_path / "right")
    logits = [
        sequence_logits(loaded(replace(one, quantization=quantization)), [TOKENS])[0] for one in (config, expected)
    ]
    assert torch.equal(*logits)


def test_bins_hold_both_names_of_a_tied_weight(tmp_path: Path) -> None:
    config = checkpoint(tmp_path, "llama", "both")
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").rename(tmp_path / "elsewhere")
    expected = sequence_logits(loaded(config), [TOKENS])[0]
    (tmp_path / "elsewhere").rename(tmp_path / "model.safetensors")
    assert torch.equal(sequence_logits(loaded(config), [TOKENS])[0], expected)


@pytest.mark.parametrize("stored", STORED)
def test_it_is_said_only_where_the_projection_differs(
    tmp_path: Path, stored: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = checkpoint(tmp_path, "llama", stored)
    with caplog.at_level(logging.WARNING, "penstock"):
        loaded(config)
    assert ("tie_word_embeddings" in caplog.text and "lm_head.weight" in caplog.text) == (stored == "both")


def test_a_projection_of_another_shape_is_named(tmp_path: Path) -> None:
    config = checkpoint(tmp_path, "llama", "both")
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"][:-1].contiguous()
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 misshapen: lm_head\.weight"):
        loaded(config)


def test_neither_of_the_two_is_a_missing_embedding(tmp_path: Path) -> None:
    config = checkpoint(tmp_path, "llama", "embedding")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.embed_tokens.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing: model\.embed_tokens\.weight"):
        loaded(config)


@pytest.mark.parametrize("stored", STORED)
def test_a_saved_state_keeps_what_was_loaded(tmp_path: Path, stored: str) -> None:
    config = checkpoint(tmp_path / "model", "llama", stored)
    model = loaded(config)
    expected = sequence_logits(model, [TOKENS])[0]
    save_sharded_state(model, tmp_path / "state", ParallelState())
    copy_model_files(config.folder, tmp_path / "state")
    again = loaded(ModelConfig.load(str(tmp_path / "state")), load_format="sharded_state")
    assert torch.equal(sequence_logits(again, [TOKENS])[0], expected)


@pytest.mark.parametrize("stored", STORED)
def test_a_plan_counts_the_weights_that_loading_makes(tmp_path: Path, stored: str) -> None:
    checkpoint(tmp_path, "llama", stored)
    embedding = tiny_model("llama").get_parameter("model.embed_tokens.weight").numel()
    tied = sum(parameter.numel() for parameter in tiny_model("llama", tie_word_embeddings=True).parameters())
    plan = plan_engine(str(tmp_path), device="cpu")
    assert plan.num_parameters == tied + (embedding if stored == "both" else 0)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.each_value_quick
def test_stages_of_a_pipeline_find_the_same(tmp_path: Path, family: str, stored: str) -> None:
    config = checkpoint(tmp_path, family, stored)
    expected = transformers_logits(tmp_path, family)
    options = LoadConfig(use_tqdm_on_load=False)
    ranks = [ParallelState(pipeline=SilentGroup(rank, 2), pipeline_layers=(1, 1)) for rank in range(2)]
    first, last = (load_model(config, options, rank, torch.device("cpu"), torch.float32) for rank in ranks)
    ids, positions = torch.tensor(TOKENS, dtype=torch.int32), torch.arange(len(TOKENS))
    with torch.no_grad():
        hidden = first(ids, positions, plain_context(first, [len(TOKENS)]))
        hidden = last(ids, positions, plain_context(last, [len(TOKENS)]), hidden)  # type: ignore[call-arg]
        logits = last.compute_logits(hidden, NO_CONTEXT)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
