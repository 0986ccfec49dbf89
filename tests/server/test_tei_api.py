"""TEI's API against real servers, with sentence-transformers as the oracle and huggingface_hub's client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import InferenceClient

from penstock.engine.async_engine import AsyncEngine
from penstock.errors import Overloaded
from support.pooling_models import TINY_ENCODER, random_model, random_text, save
from support.servers import Served, serving

TEXTS = [random_text(num, seed=num) for num in (2, 9, 4)]
QUERY = random_text(5, seed=77)
LONG = random_text(2000, seed=1)


def classifier(folder: Path, *labels: str) -> AsyncEngine:
    config = {"id2label": dict(enumerate(labels)), "num_labels": len(labels)}
    save(random_model("BertForSequenceClassification", "BertConfig", **TINY_ENCODER, **config), folder)
    return AsyncEngine(folder)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(classifier(tmp_path_factory.mktemp("reranker"), "relevant")) as served:
        yield served


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(classifier(tmp_path_factory.mktemp("labelled"), "good", "bad", "odd")) as served:
        yield served


def test_the_hubs_client_gets_the_oracles_embeddings(embedder: tuple[Served, Any]) -> None:
    served, oracle = embedder
    client = InferenceClient(model=f"{served.url}/embed")
    found = [client.feature_extraction(text)[0] for text in TEXTS]
    np.testing.assert_allclose(found, oracle.encode(TEXTS, normalize_embeddings=True), atol=1e-5)


def test_embed_takes_several_texts_and_cuts_long_ones_on_request(embedder: tuple[Served, Any]) -> None:
    served, oracle = embedder
    vectors = np.array(served.post("/embed", {"inputs": TEXTS, "normalize": False}).json)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    assert abs(lengths - 1).min() > 0.1
    np.testing.assert_allclose(vectors / lengths, oracle.encode(TEXTS), atol=1e-5)
    refused = served.post("/embed", {"inputs": LONG})
    assert (refused.status, refused.json["error_type"]) == (413, "validation")
    assert len(served.post("/embed", {"inputs": LONG, "truncate": True}).json) == 1
    sides = [{"inputs": LONG, "truncate": True, "truncation_direction": side} for side in ("Left", "right")]
    left, right = (served.post("/embed", body).json for body in sides)
    assert left != right


def test_embed_all_has_the_vectors_of_the_tokens(embedder: tuple[Served, Any]) -> None:
    served, oracle = embedder
    found = served.post("/embed_all", {"inputs": TEXTS}).json
    expected = oracle.encode(TEXTS, output_value="token_embeddings")
    for vectors, rows in zip(found, expected, strict=True):
        np.testing.assert_allclose(vectors, rows.numpy()[: len(vectors)], atol=1e-5)
    assert [len(vectors) for vectors in found] == [len(oracle.tokenizer(text)["input_ids"]) for text in TEXTS]


def test_the_hubs_client_gets_the_oracles_similarities(embedder: tuple[Served, Any]) -> None:
    served, oracle = embedder
    found = InferenceClient(model=f"{served.url}/similarity").sentence_similarity(QUERY, other_sentences=TEXTS)
    source, *others = oracle.encode([QUERY, *TEXTS], normalize_embeddings=True)
    np.testing.assert_allclose(found, [source @ other for other in others], atol=1e-5)
    long = {"inputs": {"source_sentence": QUERY, "sentences": [LONG]}}
    assert served.post("/similarity", long).status == 413
    assert len(served.post("/similarity", {**long, "parameters": {"truncate": True}}).json) == 1


def test_errors_have_teis_statuses_and_types(
    embedder: tuple[Served, Any], reranker: Served, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, _ = embedder
    most = served.request("GET", "/info").json["max_client_batch_size"]
    many = ["a"] * (most + 1)
    given: list[tuple[Served, str, dict[str, Any], int, str]] = [
        (served, "/embed", {"inputs": many}, 413, "validation"),
        (served, "/similarity", {"inputs": {"source_sentence": "a", "sentences": many}}, 413, "validation"),
        (served, "/embed", {"inputs": "a", "prompt_name": "none"}, 413, "validation"),
        (served, "/embed", {"inputs": "a", "truncation": True}, 400, "validation"),
        (served, "/predict", {"inputs": "a"}, 424, "backend"),
        (reranker, "/embed", {"inputs": "a"}, 424, "backend"),
        (server, "/embed_all", {"inputs": "a"}, 424, "backend"),
        (reranker, "/rerank", {"query": QUERY, "texts": []}, 413, "validation"),
    ]
    for server_of, path, body, status, kind in given:
        reply = server_of.post(path, body)
        assert (reply.status, reply.json.get("error_type")) == (status, kind), (path, reply.body)
        assert reply.json.keys() == {"error", "error_type"}

    async def full(*_: Any, **__: Any) -> None:
        raise Overloaded("The queue is full.", retry_after_s=2)

    monkeypatch.setattr(served.engine, "submit", full)
    reply = served.post("/embed", {"inputs": "a"})
    assert (reply.status, reply.json["error_type"], reply.headers["retry-after"]) == (429, "overloaded", "2")


def test_predict_has_a_score_per_label(labelled: Served) -> None:
    expected = labelled.post("/classify", {"input": TEXTS[0]}).json["data"][0]["probs"]
    single = labelled.post("/predict", {"inputs": TEXTS[0]}).json
    assert {one["label"]: one["score"] for one in single} == dict(zip(("good", "bad", "odd"), expected, strict=True))
    assert [one["score"] for one in single] == sorted(expected, reverse=True)
    assert labelled.post("/predict", {"inputs": [[text] for text in TEXTS]}).json[0] == single
    raw = labelled.post("/predict", {"inputs": TEXTS[0], "raw_scores": True}).json
    assert sum(one["score"] for one in raw) != pytest.approx(1)
    pair = labelled.post("/predict", {"inputs": TEXTS[:2]}).json
    assert labelled.post("/predict", {"inputs": [TEXTS[:2], TEXTS[:1]]}).json == [pair, single]
    refused = labelled.post("/predict", {"inputs": TEXTS})
    assert refused.json["error"].startswith("inputs=[")


def test_rerank_takes_both_kinds_of_requests(reranker: Served) -> None:
    ours = reranker.post("/rerank", {"query": QUERY, "documents": TEXTS}).json["results"]
    theirs = reranker.post("/rerank", {"query": QUERY, "texts": TEXTS, "return_text": True}).json
    assert [(one["index"], one["relevance_score"]) for one in ours] == [(one["index"], one["score"]) for one in theirs]
    assert [one["text"] for one in theirs] == [TEXTS[one["index"]] for one in theirs]
    raw = reranker.post("/rerank", {"query": QUERY, "texts": TEXTS, "raw_scores": True}).json
    assert [one["index"] for one in raw] == [one["index"] for one in theirs]
    assert raw[0]["score"] != theirs[0]["score"]
    assert reranker.post("/rerank", {"query": QUERY}).error["message"] == "documents is empty. Give at least one text."


def test_the_root_takes_the_requests_of_all_routes(
    embedder: tuple[Served, Any], reranker: Served, labelled: Served, server: Served
) -> None:
    served, oracle = embedder
    found = InferenceClient(model=served.url).feature_extraction(TEXTS[0])[0]
    np.testing.assert_allclose(found, oracle.encode(TEXTS[0], normalize_embeddings=True), atol=1e-5)
    compared: dict[str, Any] = {"inputs": {"source_sentence": QUERY, "sentences": TEXTS}}
    ranked = {"query": QUERY, "texts": TEXTS}
    for server_of, path, body in (
        (served, "/similarity", compared),
        (labelled, "/predict", {"inputs": TEXTS[0]}),
        (reranker, "/rerank", ranked),
    ):
        assert server_of.post("/", body).json == server_of.post(path, body).json
    refused = served.post("/", {"inputs": "a", "colour": 1})
    assert (refused.status, refused.error["message"][:25]) == (400, "There is no field colour.")
    assert served.post("/", {"inputs": LONG}).status == 413
    assert server.post("/", {"inputs": "a"}).status == 424


def test_info_names_the_task(embedder: tuple[Served, Any], reranker: Served, labelled: Served, server: Served) -> None:
    info = embedder[0].request("GET", "/info").json
    assert (info["model_id"], info["model_type"]) == ("demo", {"embedding": {"pooling": "mean"}})
    limits = ("max_input_length", "max_batch_tokens", "max_batch_requests", "max_client_batch_size")
    assert all(info[name] > 0 for name in (*limits, "max_concurrent_requests", "tokenization_workers"))
    assert info["model_dtype"] == "float32"
    assert "reranker" in reranker.request("GET", "/info").json["model_type"]
    names = labelled.request("GET", "/info").json["model_type"]["classifier"]
    assert names["id2label"] == {"0": "good", "1": "bad", "2": "odd"}
    assert server.request("GET", "/info").status == 400


def test_a_model_that_generates_refuses(server: Served) -> None:
    reply = server.post("/embed", {"inputs": "a"})
    assert reply.status == 424
    assert reply.json.keys() == {"error", "error_type"}
