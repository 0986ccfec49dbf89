"""Classes and scores of whole engines, compared with Transformers and with CrossEncoder of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from penstock import LLM, PoolingParams
from penstock.errors import ConfigError, InvalidParameter, InvalidRequest, UnsupportedModel
from support.pooling_models import (
    TINY_DECODER,
    TINY_ENCODER,
    TINY_MODERN_BERT,
    VOCAB,
    random_model,
    random_text,
    save,
    sentence_transformer,
    tokenizer,
)

pytestmark = pytest.mark.one_path(reason="programs and eager steps of pooling models are compared in test_embeddings")

TEXTS = [random_text(num_words, seed=num_words) for num_words in (1, 3, 17, 40, 100, 5)]
QUERY = random_text(6, seed=99)
_GPT2 = {"vocab_size": len(VOCAB), "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "pad_token_id": 0}
_ROBERTA = {**TINY_ENCODER, "type_vocab_size": 1, "pad_token_id": 1}
_DISTIL = {"vocab_size": len(VOCAB), "dim": 32, "hidden_dim": 56, "n_layers": 2, "n_heads": 4}
_HEADS = {**TINY_DECODER, "head_dim": 16}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
_JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
}
_ZAMBA = {"layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 4, "adapter_rank": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "Bert": ("BertConfig", TINY_ENCODER, "bert"),
    "Roberta": ("RobertaConfig", _ROBERTA, "roberta"),
    "XLMRoberta": ("XLMRobertaConfig", _ROBERTA, "roberta"),
    "ModernBert": ("ModernBertConfig", TINY_MODERN_BERT, "bert"),
    "Electra": ("ElectraConfig", {**TINY_ENCODER, "embedding_size": 32}, "bert"),
    "DistilBert": ("DistilBertConfig", {**_DISTIL, "max_position_embeddings": 130}, "bert"),
    "Qwen2": ("Qwen2Config", TINY_DECODER, "last"),
    "Qwen3": ("Qwen3Config", _HEADS, "last"),
    "Gemma2": ("Gemma2Config", _HEADS, "last"),
    "HunYuanDenseV1": ("HunYuanDenseV1Config", _HEADS, "last"),
    "Llama": ("LlamaConfig", TINY_DECODER, "last"),
    "Mistral": ("MistralConfig", TINY_DECODER, "last"),
    "Phi3": ("Phi3Config", TINY_DECODER, "last"),
    "GPT2": ("GPT2Config", _GPT2, "last"),
    "Jamba": ("JambaConfig", {**TINY_DECODER, **_JAMBA}, "last"),
    "Qwen3Next": ("Qwen3NextConfig", {**_HEADS, **_DELTA, **_EXPERTS}, "last"),
    "Qwen3_5Text": ("Qwen3_5TextConfig", {**_HEADS, **_DELTA}, "last"),
    "Zamba2": ("Zamba2Config", {**TINY_DECODER, **_ZAMBA}, "last"),
}
_QUICK = ("Bert", "Qwen3")
_WITH_TOKENS = ("Bert", "Roberta", "ModernBert", "DistilBert", "Qwen2", "Qwen3", "Llama", "Mistral")
LOGITS = PoolingParams(use_activation=False)


def families(*names: str) -> list[Any]:
    return [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def make_model(folder: Path, family: str, use: str, **fields: Any) -> Any:
    config, own, kind = FAMILIES[family]
    model = random_model(f"{family}For{use}", config, **own, **fields)
    save(model, folder, kind=kind)
    return model


def logits_of(model: Any, token_ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].numpy()  # type: ignore[no-any-return]


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(folder, kv_cache_memory_bytes="4MiB", **options)


@pytest.mark.parametrize("family", families(*FAMILIES))
def test_classes_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, family, "SequenceClassification", num_labels=3)
    with open_llm(tmp_path) as llm:
        for output in llm.encode(TEXTS, LOGITS, pooling_task="classify", use_tqdm=False):
            expected = logits_of(model, output.prompt_token_ids)
            np.testing.assert_allclose(output.outputs.data.numpy(), expected, atol=1e-4)
        together = llm.classify(TEXTS, use_tqdm=False)
        alone = [llm.classify(text, use_tqdm=False)[0] for text in TEXTS]
    for output in together:
        expected = torch.tensor(logits_of(model, output.prompt_token_ids)).softmax(-1)
        np.testing.assert_allclose(output.outputs.probs, expected, atol=1e-4)
    assert [one.outputs.probs for one in together] == [one.outputs.probs for one in alone]


def test_the_head_of_modernbert_pools_as_the_checkpoint_says(tmp_path: Path) -> None:
    """With biases everywhere, and the fields of early configurations."""
    biases = dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True)
    fields = {**biases, "classifier_pooling": "mean", "classifier_activation": "silu", "num_labels": 3}
    thetas = {"global_rope_theta": 5000.0, "local_rope_theta": 70.0}
    model = make_model(tmp_path, "ModernBert", "SequenceClassification", **fields, **thetas)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    del content["rope_parameters"], content["layer_types"]
    path.write_text(json.dumps({**content, **thetas, "global_attn_every_n_layers": 3}))
    with open_llm(tmp_path) as llm:
        for output in llm.encode(TEXTS, LOGITS, pooling_task="classify", use_tqdm=False):
            expected = logits_of(model, output.prompt_token_ids)
            np.testing.assert_allclose(output.outputs.data.numpy(), expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", _WITH_TOKENS)
def test_classes_of_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, family, "TokenClassification", num_labels=3)
    options = {"max_num_batched_tokens": 16} if FAMILIES[family][2] == "last" else {}
    with open_llm(tmp_path, **options) as llm:
        for output in llm.encode(TEXTS, LOGITS, use_tqdm=False):
            expected = logits_of(model, output.prompt_token_ids)
            np.testing.assert_allclose(output.outputs.data.numpy(), expected, atol=1e-4)
        with pytest.raises(InvalidParameter, match="cannot do classify.*Allowed: token_classify"):
            llm.classify(TEXTS)


@pytest.mark.parametrize(
    ("fields", "activate"),
    [
        ({"problem_type": "multi_label_classification", "num_labels": 3}, torch.sigmoid),
        ({"problem_type": "regression", "num_labels": 1}, lambda x: x),
        ({"num_labels": 1}, torch.sigmoid),
    ],
)
def test_the_activation_follows_the_kind_of_problem(fields: dict[str, Any], activate: Any, tmp_path: Path) -> None:
    model = make_model(tmp_path, "Bert", "SequenceClassification", **fields)
    with open_llm(tmp_path) as llm:
        (output,) = llm.classify(TEXTS[2], use_tqdm=False)
    expected = activate(torch.tensor(logits_of(model, output.prompt_token_ids)))
    np.testing.assert_allclose(output.outputs.probs, expected, atol=1e-4)


@pytest.mark.parametrize("family", families("Bert", "Roberta", "ModernBert", "Qwen3", "Electra"))
def test_scores_are_those_of_a_cross_encoder(family: str, tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    make_model(tmp_path, family, "SequenceClassification", num_labels=1)
    oracle = CrossEncoder(str(tmp_path), device="cpu")
    # One pair at a time: no padding, which decoders would read.
    expected = oracle.predict([(QUERY, text) for text in TEXTS], batch_size=1)
    with open_llm(tmp_path) as llm:
        scores = [output.outputs.score for output in llm.score(QUERY, TEXTS, use_tqdm=False)]
        pairwise = [output.outputs.score for output in llm.score(TEXTS, TEXTS[::-1], use_tqdm=False)]
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    np.testing.assert_allclose(
        pairwise, oracle.predict(list(zip(TEXTS, TEXTS[::-1], strict=True)), batch_size=1), atol=1e-4
    )


def test_a_pair_is_cut_as_the_tokenizer_cuts_it(tmp_path: Path) -> None:
    make_model(tmp_path, "Bert", "SequenceClassification", num_labels=1)
    pairs = [
        (random_text(first, seed=1), random_text(second, seed=2)) for first, second in ((5, 90), (90, 5), (60, 61))
    ]
    with open_llm(tmp_path) as llm:
        for first, second in pairs:
            params = PoolingParams(truncate_prompt_tokens=32)
            (output,) = llm.score(first, second, pooling_params=params, use_tqdm=False)
            expected = tokenizer()(first, second, truncation="longest_first", max_length=32)["input_ids"]
            assert output.prompt_token_ids == expected


def test_the_score_of_an_embedding_model_is_the_cosine(tmp_path: Path) -> None:
    oracle = sentence_transformer(tmp_path, random_model("BertModel", "BertConfig", **TINY_ENCODER))
    expected = oracle.similarity(oracle.encode([QUERY]), oracle.encode(TEXTS))[0]
    with open_llm(tmp_path / "model") as llm:
        scores = [output.outputs.score for output in llm.score(QUERY, TEXTS, use_tqdm=False)]
        with pytest.raises(InvalidRequest, match="data_1 has 2 texts and data_2 3"):
            llm.score(TEXTS[:2], TEXTS[:3])
    np.testing.assert_allclose(scores, expected, atol=1e-4)


@pytest.mark.parametrize("is_tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_reranker_answers_yes_or_no(is_tied: bool, tmp_path: Path) -> None:
    model = random_model("Qwen3ForCausalLM", "Qwen3Config", **_HEADS, tie_word_embeddings=is_tied)
    save(model, tmp_path, kind="last")
    template = "{{ messages[0]['content'] }} is in {{ messages[1]['content'] }}"
    no, yes = VOCAB.index("no"), VOCAB.index("yes")
    options = {"runner": "pooling", "pooler_config": {"classifier_from_token": ["no", "yes"]}}
    with open_llm(tmp_path, **options) as llm:
        for chat_template in (None, template):
            for output in llm.score(QUERY, TEXTS, use_tqdm=False, chat_template=chat_template):
                logits = torch.tensor(logits_of(model, output.prompt_token_ids)[-1][[no, yes]])
                assert abs(output.outputs.score - float(logits.softmax(0)[1])) < 1e-4
    with pytest.raises(ConfigError, match="convert='classify' needs the classes of Qwen3ForCausalLM"):
        open_llm(tmp_path, convert="classify")


def test_gemma_embeds_in_both_directions(tmp_path: Path) -> None:
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    fields = {**_HEADS, "num_hidden_layers": 3, "layer_types": layers, "sliding_window": 16}
    model = random_model("Gemma3TextModel", "Gemma3TextConfig", **fields, use_bidirectional_attention=True)
    save(model, tmp_path, kind="last")
    with open_llm(tmp_path) as llm:
        outputs = llm.encode(TEXTS, LOGITS, pooling_task="token_embed", use_tqdm=False)
        assert "Recorded programs: 1" in llm.get_model_inspection()
    for output in outputs:
        with torch.no_grad():
            expected = model(torch.tensor([output.prompt_token_ids]))[0][0]
        np.testing.assert_allclose(output.outputs.data, expected, atol=1e-4)


def test_rewards_of_steps_are_those_at_their_ends(tmp_path: Path) -> None:
    model = make_model(tmp_path, "Qwen3", "TokenClassification", num_labels=2)
    tag = VOCAB.index("yes")
    text = f"{random_text(4)} yes {random_text(7)} yes {random_text(2)}"
    params = PoolingParams(step_tag_id=tag, returned_token_ids=[1])
    with open_llm(tmp_path) as llm:
        (output,) = llm.reward(text, pooling_params=params, use_tqdm=False)
    logits = torch.tensor(logits_of(model, output.prompt_token_ids))
    rows = [index for index, token_id in enumerate(output.prompt_token_ids) if token_id == tag]
    assert len(rows) == 2
    np.testing.assert_allclose(output.outputs.data, logits[rows][:, [1]].softmax(-1), atol=1e-4)


def save_reward_model(folder: Path, architecture: str, num_labels: int) -> tuple[Any, torch.nn.Sequential]:
    """A decoder with two layers as its head, which Transformers has no class for; as the two parts."""
    backbone = random_model("Qwen2Model", "Qwen2Config", **TINY_DECODER)
    save(backbone, folder, kind="last")
    torch.manual_seed(4)
    size = TINY_DECODER["hidden_size"]
    head = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.ReLU(), torch.nn.Linear(size, num_labels))
    weights = {f"model.{name}": tensor.contiguous() for name, tensor in backbone.state_dict().items()}
    weights |= {f"score.{name}": tensor.detach() for name, tensor in head.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    edit_config(folder, architectures=[architecture])
    return backbone, head


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("architecture", "num_labels", "activate"),
    [
        pytest.param("Qwen2ForRewardModel", 1, lambda x: x, marks=pytest.mark.slow),
        ("Qwen2ForProcessRewardModel", 2, lambda x: x.softmax(-1)),
    ],
)
def test_reward_models_have_a_reward_per_token(
    architecture: str, num_labels: int, activate: Any, tmp_path: Path
) -> None:
    backbone, head = save_reward_model(tmp_path, architecture, num_labels)
    with open_llm(tmp_path, max_num_batched_tokens=16) as llm:
        outputs = llm.reward(TEXTS, use_tqdm=False)
        with pytest.raises(InvalidParameter, match=f"cannot do embed: it has {architecture}. Allowed: token_classify"):
            llm.embed(TEXTS)
    for output in outputs:
        with torch.no_grad():
            expected = activate(head(backbone(torch.tensor([output.prompt_token_ids]))[0][0]))
        np.testing.assert_allclose(output.outputs.data, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("LlamaForRewardModel", "LlamaForRewardModel is a reward model whose head is not known. Supported: Qwen2For"),
        ("InternLM2ForRewardModel", "'InternLM2ForRewardModel'.* is not implemented here, nor in Transformers"),
    ],
)
def test_reward_models_with_another_head_are_refused_by_name(architecture: str, message: str, tmp_path: Path) -> None:
    save(random_model("Qwen2Model", "Qwen2Config", **TINY_DECODER), tmp_path, kind="last")
    edit_config(tmp_path, architectures=[architecture])
    with pytest.raises(UnsupportedModel, match=message):
        open_llm(tmp_path)


def test_labels_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    make_model(tmp_path, "Bert", "SequenceClassification", num_labels=2, id2label={0: "bad", 1: "good"})
    with open_llm(tmp_path) as llm:
        assert llm.config.model.pooling is not None
        assert llm.config.model.pooling.labels == ("bad", "good")
    edit_config(tmp_path, id2label={"x": "bad"})
    with pytest.raises(Exception, match="id2label"):
        open_llm(tmp_path)
