"""Late interaction of whole engines, compared with MultiVectorEncoder of sentence-transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import LLM, PoolingParams
from penstock.errors import ConfigError, ContextTooLong, InvalidParameter, UnsupportedModel
from support.pooling_models import (
    TINY_DECODER,
    TINY_ENCODER,
    TINY_MODERN_BERT,
    multi_vector_encoder,
    random_model,
    random_text,
    save,
)

pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.one_path(reason="programs and eager steps of pooling models are compared in test_embeddings")

QUERIES = [random_text(num_words, seed=70 + num_words) for num_words in (3, 7, 5)]
DOCUMENTS = [random_text(num_words, seed=num_words) for num_words in (1, 20, 60, 9, 33)]
PROMPTS = {"query": f"{random_text(1, seed=1)} ", "document": f"{random_text(2, seed=2)} "}
# The special tokens of the tokenizer are words that scores may skip.
SKIPPED = ["[SEP]", *DOCUMENTS[2].split()[:4]]
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Bert": ("BertModel", "BertConfig", TINY_ENCODER),
    "ModernBert": ("ModernBertModel", "ModernBertConfig", TINY_MODERN_BERT),
    "Mistral": ("MistralModel", "MistralConfig", TINY_DECODER),
}


def make_oracle(folder: Path, family: str = "Bert", **options: Any) -> Any:
    class_name, config_name, fields = MODELS[family]
    model, kind = random_model(class_name, config_name, **fields), "last" if family == "Mistral" else "bert"
    return multi_vector_encoder(folder, model, kind=kind, skipped=SKIPPED, prompts=PROMPTS, **options)


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(folder / "model", kv_cache_memory_bytes="4MiB", **options)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any]]:
    folder = tmp_path_factory.mktemp("bert")
    oracle = make_oracle(folder)
    with open_llm(folder, fast_paths="auto") as llm:
        yield llm, oracle


def expected_scores(oracle: Any, queries: list[str] = QUERIES) -> np.ndarray:
    # One text at a time: no padding.
    documents = [oracle.encode_document(text) for text in DOCUMENTS]
    return np.array(
        [[float(oracle.similarity(oracle.encode_query(query), one)) for one in documents] for query in queries]
    )


@pytest.mark.slow
def test_scores_are_those_of_the_oracle(bert: tuple[LLM, Any]) -> None:
    llm, oracle = bert
    for query, expected in zip(QUERIES, expected_scores(oracle), strict=True):
        scores = [output.outputs.score for output in llm.score(query, DOCUMENTS, use_tqdm=False)]
        np.testing.assert_allclose(scores, expected, atol=1e-4)
    pairs = llm.score(QUERIES, DOCUMENTS[:3], use_tqdm=False)
    np.testing.assert_allclose([one.outputs.score for one in pairs], expected_scores(oracle).diagonal(), atol=1e-4)


def test_the_model_has_one_task_and_names_it(bert: tuple[LLM, Any]) -> None:
    llm, _ = bert
    with pytest.raises(InvalidParameter, match="cannot do embed: it has BertModel. Allowed: token_embed"):
        llm.embed("ba")
    with pytest.raises(InvalidParameter, match="chat_template is for rerankers"):
        llm.score("ba", "ba", chat_template="{{ messages }}")


def test_queries_and_documents_have_lengths_of_their_own(bert: tuple[LLM, Any]) -> None:
    llm, oracle = bert
    long_query = random_text(30, seed=5)
    with pytest.raises(ContextTooLong, match=r"has 33 tokens, but this engine takes 12 .*query_length"):
        llm.score(long_query, DOCUMENTS)
    params = PoolingParams(truncate_prompt_tokens=-1)
    scores = [output.outputs.score for output in llm.score(long_query, DOCUMENTS, pooling_params=params)]
    np.testing.assert_allclose(scores, expected_scores(oracle, [long_query])[0], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["ModernBert", "Mistral"])
def test_every_kind_of_model_scores_as_the_oracle(family: str, tmp_path: Path) -> None:
    oracle = make_oracle(tmp_path, family)
    options = {"max_num_batched_tokens": 16} if family == "Mistral" else {}
    expected = expected_scores(oracle)
    with open_llm(tmp_path, **options) as llm:
        for query, row in zip(QUERIES, expected, strict=True):
            scores = [output.outputs.score for output in llm.score(query, DOCUMENTS, use_tqdm=False)]
            np.testing.assert_allclose(scores, row, atol=1e-4)


@pytest.mark.slow
def test_expanded_queries_are_refused_unless_they_are_turned_off(tmp_path: Path) -> None:
    make_oracle(tmp_path, query_expansion={"strategy": "fixed", "attend": False, "length": 12})
    with pytest.raises(ConfigError, match=r"filled up with mask tokens .*query_expansion': false"):
        open_llm(tmp_path)
    with open_llm(tmp_path, pooler_config={"query_expansion": False}) as llm:
        (output,) = llm.score(QUERIES[0], DOCUMENTS[0], use_tqdm=False)
    assert len(output.prompt_token_ids) < 12


@pytest.mark.slow
def test_any_model_scores_by_its_tokens_where_it_has_no_other_task(tmp_path: Path) -> None:
    save(random_model("BertModel", "BertConfig", **TINY_ENCODER), tmp_path)
    with LLM(tmp_path, convert="none") as llm:
        (scored,) = llm.score(QUERIES[0], DOCUMENTS[1], use_tqdm=False)
        query, document = (one.outputs.data.double() for one in llm.encode([QUERIES[0], DOCUMENTS[1]], use_tqdm=False))
    assert scored.outputs.score == pytest.approx(float((query @ document.T).amax(1).sum()), abs=1e-6)


def test_a_model_saved_by_pylate_is_refused_with_what_to_do(tmp_path: Path) -> None:
    make_oracle(tmp_path)
    path = tmp_path / "model" / "config_sentence_transformers.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "ColBERT"}))
    with pytest.raises(UnsupportedModel, match="saved by PyLate. Load it with MultiVectorEncoder"):
        open_llm(tmp_path)
