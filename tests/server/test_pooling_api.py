"""Embeddings, scores and classes over HTTP: the openai package and raw requests against a real server."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from penstock.engine.async_engine import AsyncEngine
from penstock.server.requests.generation import Generation
from support.pooling_models import (
    TINY_ENCODER,
    multi_vector_encoder,
    random_model,
    random_text,
    save,
    sentence_transformer,
)
from support.servers import Served, serving

TEXTS = [random_text(num_words, seed=num_words) for num_words in (2, 9, 30, 4)]
QUERY = random_text(5, seed=77)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Any]]:
    folder = tmp_path_factory.mktemp("embedder")
    model = random_model("BertModel", "BertConfig", **TINY_ENCODER, matryoshka_dimensions=[8, 32])
    oracle = sentence_transformer(folder, model)
    with serving(AsyncEngine(folder / "model")) as served:
        yield served, oracle


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Any]]:
    from sentence_transformers import CrossEncoder

    folder = tmp_path_factory.mktemp("reranker")
    labels = {"id2label": {0: "relevant"}, "num_labels": 1}
    save(random_model("BertForSequenceClassification", "BertConfig", **TINY_ENCODER, **labels), folder)
    with serving(AsyncEngine(folder)) as served:
        yield served, CrossEncoder(str(folder), device="cpu")


def test_the_openai_client_gets_the_oracles_embeddings(embedder: tuple[Served, Any]) -> None:
    served, oracle = embedder
    expected = oracle.encode(TEXTS)
    with served.client() as client:
        # Base64, which the client asks for and decodes by itself.
        answer = client.embeddings.create(model="demo", input=TEXTS)
        plain = client.embeddings.create(model="demo", input=TEXTS, encoding_format="float")
    found = np.array([one.embedding for one in answer.data])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(found, [one.embedding for one in plain.data], atol=1e-7)
    assert [one.index for one in answer.data] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(text.split()) + 2 for text in TEXTS)


def test_the_model_has_the_tasks_of_its_pooling(embedder: tuple[Served, Any]) -> None:
    (card,) = embedder[0].request("GET", "/v1/models").json["data"]
    assert card["tasks"] == ["embed", "token_embed"]


def test_many_texts_keep_their_order(embedder: tuple[Served, Any]) -> None:
    served, oracle = embedder
    texts = [random_text(1 + seed % 5, seed=seed) for seed in range(100)]
    with served.client() as client:
        answer = client.embeddings.create(model="demo", input=texts)
    np.testing.assert_allclose([one.embedding for one in answer.data], oracle.encode(texts), atol=1e-5)


def test_a_request_of_many_texts_is_submitted_in_portions(
    embedder: tuple[Served, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, oracle = embedder
    sizes, submit_all = [], Generation._submit_all

    async def noted(generation: Generation) -> None:
        sizes.append(len(generation._submissions))
        await submit_all(generation)

    monkeypatch.setattr("penstock.server.routes.common._PROMPTS_AT_ONCE", 3)
    monkeypatch.setattr(Generation, "_submit_all", noted)
    texts = [random_text(1 + seed % 5, seed=seed) for seed in range(7)]
    with served.client() as client:
        answer = client.embeddings.create(model="demo", input=texts)
    assert sizes == [3, 3, 1]
    np.testing.assert_allclose([one.embedding for one in answer.data], oracle.encode(texts), atol=1e-5)


def test_token_ids_and_dimensions(embedder: tuple[Served, Any]) -> None:
    served, oracle = embedder
    ids = [oracle.tokenizer(text)["input_ids"] for text in TEXTS]
    with served.client() as client:
        whole = client.embeddings.create(model="demo", input=ids, dimensions=8)
        one = client.embeddings.create(model="demo", input=ids[2], dimensions=8)
        with pytest.raises(openai.BadRequestError, match=r"dimensions=9 is not valid. Allowed: 8, 32"):
            client.embeddings.create(model="demo", input=ids, dimensions=9)
    cut = oracle.encode(TEXTS)[:, :8]
    expected = cut / np.linalg.norm(cut, axis=1, keepdims=True)
    np.testing.assert_allclose([one.embedding for one in whole.data], expected, atol=1e-5)
    assert one.data[0].embedding == whole.data[2].embedding


def test_base64_is_little_endian_float32(embedder: tuple[Served, Any]) -> None:
    served, oracle = embedder
    reply = served.post("/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"})
    values = np.frombuffer(base64.b64decode(reply.json["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(values, oracle.encode(TEXTS[0]), atol=1e-5)


def test_a_long_text_is_refused_or_cut(embedder: tuple[Served, Any]) -> None:
    served, oracle = embedder
    text = random_text(300, seed=3)
    reply = served.post("/v1/embeddings", {"input": text})
    assert reply.status == 400
    assert "302 tokens" in reply.error["message"]
    cut = served.post("/v1/embeddings", {"input": text, "truncate_prompt_tokens": -1})
    np.testing.assert_allclose(cut.json["data"][0]["embedding"], oracle.encode(text), atol=1e-5)


def test_vectors_of_tokens(embedder: tuple[Served, Any]) -> None:
    served, oracle = embedder
    reply = served.post("/pooling", {"input": TEXTS[:2], "task": "token_embed"})
    expected = oracle.encode(TEXTS[:2], output_value="token_embeddings")
    for data, rows in zip(reply.json["data"], expected, strict=True):
        unit = rows / rows.norm(dim=-1, keepdim=True)
        np.testing.assert_allclose(data["data"], unit, atol=1e-4)


def test_an_embedding_model_scores_by_cosine(embedder: tuple[Served, Any]) -> None:
    served, oracle = embedder
    reply = served.post("/v1/score", {"text_1": QUERY, "text_2": TEXTS})
    expected = oracle.similarity(oracle.encode([QUERY]), oracle.encode(TEXTS))[0]
    np.testing.assert_allclose([one["score"] for one in reply.json["data"]], expected, atol=1e-4)


@pytest.mark.slow
def test_a_late_interaction_model_ranks_by_its_tokens(tmp_path: Path) -> None:
    oracle = multi_vector_encoder(tmp_path, random_model("BertModel", "BertConfig", **TINY_ENCODER))
    with serving(AsyncEngine(tmp_path / "model")) as served:
        reply = served.post("/rerank", {"query": QUERY, "documents": TEXTS})
        wrong = served.post("/v1/embeddings", {"input": QUERY})
    expected = [float(oracle.similarity(oracle.encode_query(QUERY), oracle.encode_document(one))) for one in TEXTS]
    scores = {one["index"]: one["relevance_score"] for one in reply.json["results"]}
    np.testing.assert_allclose([scores[index] for index in range(len(TEXTS))], expected, atol=1e-4)
    assert wrong.status == 400
    assert "cannot do embed: it has BertModel. Allowed: token_embed" in wrong.error["message"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_as_by_the_cross_encoder(path: str, reranker: tuple[Served, Any]) -> None:
    served, oracle = reranker
    reply = served.post(path, {"query": QUERY, "documents": TEXTS, "top_n": 3})
    expected = oracle.predict([(QUERY, text) for text in TEXTS])
    results = reply.json["results"]
    assert [one["index"] for one in results] == np.argsort(-expected)[:3].tolist()
    np.testing.assert_allclose([one["relevance_score"] for one in results], np.sort(expected)[::-1][:3], atol=1e-4)
    assert results[0]["document"] == {"text": TEXTS[results[0]["index"]]}


def test_classes_have_their_labels(reranker: tuple[Served, Any]) -> None:
    served, _ = reranker
    reply = served.post("/classify", {"input": TEXTS[0]})
    (data,) = reply.json["data"]
    assert (data["label"], data["num_classes"]) == ("relevant", 1)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/embeddings", {"input": "ba"}, "cannot do embed: it has BertForSequenceClassification. Allowed: classify"),
        ("/v1/embeddings", {"input": []}, "input is an empty list"),
        ("/v1/embeddings", {"input": [[1], "ba"]}, "Allowed: text, a list of token ids"),
        ("/v1/score", {"text_1": ["ba", "be"], "text_2": ["ba"]}, "text_1 has 2 texts and text_2 1"),
        ("/rerank", {"query": "ba", "documents": []}, "documents is empty"),
        (
            "/rerank",
            {"query": "ba", "documents": ["ba"] * 16_385},
            "documents has 16,385 items. Allowed: at most 16,384",
        ),
        ("/rerank", {"query": "ba", "documents": ["be", "ba " * 150]}, "documents[1]: The text has 154 tokens"),
        ("/v1/score", {"text_1": "ba", "text_2": ["be", "ba " * 150]}, "text_2[1]: The text has 154 tokens"),
        ("/classify", {"input": ["be", "ba " * 150]}, "input[1]: The text has 152 tokens"),
        ("/classify", {"input": [[2], [2, -1]]}, "input[1]: The prompt has token id -1"),
        ("/classify", {"input": ["be", "ba"], "truncate_prompt_tokens": 999}, "truncate_prompt_tokens=999 is not"),
        ("/pooling", {"input": "ba", "task": "nonsense"}, "cannot do nonsense"),
        ("/v1/completions", {"prompt": "ba"}, "pools, and generates no text"),
        ("/classify", {"input": "ba", "colour": "red"}, "colour"),
    ],
)
def test_bad_requests_name_what_is_wrong(
    path: str, body: dict[str, Any], message: str, reranker: tuple[Served, Any]
) -> None:
    reply = reranker[0].post(path, body)
    assert reply.status == 400
    assert message in reply.error["message"]
