"""LoRA adapters of embedding models, compared with PEFT in sentence-transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import LLM, LoRARequest
from penstock.errors import ConfigError, InvalidRequest, UnsupportedFeature
from support.adapters import make_adapters, request_of, with_adapter
from support.pooling_models import (
    TINY_DECODER,
    TINY_ENCODER,
    TINY_MODERN_BERT,
    random_model,
    random_text,
    sentence_transformer,
)

pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.one_path(reason="the programs of pooling models are compared with eager steps elsewhere")

TEXTS = [random_text(num_words, seed=num_words) for num_words in (3, 40, 17, 5, 64, 9)]
_DECODER = [
    {"r": 4, "target_modules": "all-linear"},
    {"r": 6, "target_modules": ["q_proj", "embed_tokens"]},
]
_ENCODER = [
    {"r": 4, "target_modules": ["query", "key", "value", "attention.output.dense", "intermediate.dense"]},
    {"r": 6, "target_modules": ["word_embeddings", r"layer.1.output.dense"]},
]
_MODERN = [
    {"r": 4, "target_modules": ["Wqkv", "Wi", "mlp.Wo"]},
    {"r": 6, "target_modules": ["tok_embeddings", "attn.Wo"]},
]
_BERT = {**TINY_ENCODER, "type_vocab_size": 1, "pad_token_id": 1}
MODELS: dict[str, tuple[str, dict[str, Any], str, list[dict[str, Any]]]] = {
    "Bert": ("bert", TINY_ENCODER, "mean", _ENCODER),
    "Qwen3": ("last", {**TINY_DECODER, "head_dim": 16}, "lasttoken", _DECODER),
    "Mistral": ("last", TINY_DECODER, "mean", _DECODER),
    "ModernBert": ("bert", TINY_MODERN_BERT, "mean", _MODERN),
    "XLMRoberta": ("roberta", _BERT, "cls", _ENCODER),
}
OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": "4MiB", "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.one_case_quick
def test_embeddings_are_those_of_peft(family: str, tmp_path: Path) -> None:
    kind, fields, pooling, variants = MODELS[family]
    model = random_model(f"{family}Model", f"{family}Config", **fields)
    folders = make_adapters(model, tmp_path, [{**one, "task_type": "FEATURE_EXTRACTION"} for one in variants])
    oracle = sentence_transformer(tmp_path, model, kind=kind, pooling=pooling)
    adapters = [None, *(request_of(index + 1, folder) for index, folder in enumerate(folders))]
    each = [adapters[index % 3] for index in range(len(TEXTS))]
    with LLM(tmp_path / "model", **OPTIONS) as llm:
        found = [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False, lora_request=each)]
        (score,) = llm.score(TEXTS[0], TEXTS[3], use_tqdm=False, lora_request=adapters[1])
        pair = llm.embed(TEXTS[:4:3], use_tqdm=False, lora_request=adapters[1])
        cosine = np.dot(*(output.outputs.embedding for output in pair))
        assert score.outputs.score == pytest.approx(float(cosine), abs=1e-5)
        with pytest.raises(InvalidRequest, match="6 prompts but 2 lora_requests"):
            llm.embed(TEXTS, use_tqdm=False, lora_request=each[:2])
    for number, adapter in enumerate(adapters):
        # The adapter goes into the modules of the oracle's model.
        adapted = None if adapter is None else with_adapter(oracle[0].auto_model, Path(adapter.lora_path))
        expected = oracle.encode(TEXTS[number::3])
        if adapted is not None:
            adapted.unload()
        np.testing.assert_allclose(np.array(found[number::3]), expected, atol=2e-5)


@pytest.mark.slow
def test_models_that_run_a_text_at_a_time_refuse_adapters(tmp_path: Path) -> None:
    fields = {"vocab_size": TINY_ENCODER["vocab_size"], "dim": 32, "hidden_dim": 56, "n_layers": 1, "n_heads": 4}
    sentence_transformer(tmp_path, random_model("DistilBertModel", "DistilBertConfig", **fields))
    with pytest.raises((UnsupportedFeature, ConfigError), match="enable_lora"):
        LLM(tmp_path / "model", **OPTIONS)


@pytest.mark.slow
def test_an_engine_without_adapters_refuses_a_request_with_one(tmp_path: Path) -> None:
    sentence_transformer(tmp_path, random_model("BertModel", "BertConfig", **TINY_ENCODER))
    adapter = LoRARequest("a", 1, str(tmp_path))
    refused = pytest.raises(InvalidRequest, match="enable_lora=True")
    with LLM(tmp_path / "model", kv_cache_memory_bytes="4MiB") as llm, refused:
        llm.embed(TEXTS[:1], use_tqdm=False, lora_request=adapter)
