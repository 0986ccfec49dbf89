"""Sets of similarity and retrieval score as through sentence-transformers: offline, and by the openai client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import LLM
from penstock.engine.async_engine import AsyncEngine
from support.embedding_sets import TEXTS, ndcg, retrieval_scores, similarity_scores, spearman
from support.pooling_models import TINY_ENCODER, random_model, sentence_transformer, tokenizer, vocabulary
from support.servers import serving

pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.one_path(reason="programs and eager steps of pooling models are compared in test_embeddings")


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random model that knows the words of the sets."""
    from sentence_transformers import SentenceTransformer

    folder = tmp_path_factory.mktemp("model")
    words = sorted({word for text in TEXTS for word in text.split()})
    fields = {**TINY_ENCODER, "vocab_size": len(vocabulary(words))}
    sentence_transformer(folder, random_model("BertModel", "BertConfig", **fields))
    tokenizer(words=words).save_pretrained(folder / "model")
    return folder / "model", SentenceTransformer(str(folder / "model"), device="cpu")


def check(embed: Any, oracle: Any) -> None:
    expected, found = similarity_scores(oracle.encode), similarity_scores(embed)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert spearman(found) == pytest.approx(spearman(expected), abs=1e-9)
    expected, found = retrieval_scores(oracle.encode), retrieval_scores(embed)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert ndcg(found) == pytest.approx(ndcg(expected), abs=1e-9)


def test_the_sets_score_as_through_sentence_transformers(oracle: tuple[Path, Any]) -> None:
    folder, expected = oracle
    with LLM(folder) as llm:

        def embed(texts: Sequence[str]) -> np.ndarray:
            return np.array([one.outputs.embedding for one in llm.embed(list(texts), use_tqdm=False)])

        check(embed, expected)


@pytest.mark.slow
def test_the_sets_score_the_same_through_the_openai_client(oracle: tuple[Path, Any]) -> None:
    folder, expected = oracle
    with serving(AsyncEngine(folder)) as served, served.client() as client:

        def embed(texts: Sequence[str]) -> np.ndarray:
            return np.array([one.embedding for one in client.embeddings.create(model="demo", input=list(texts)).data])

        check(embed, expected)
