"""Similarities of embeddings are those of sentence-transformers."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.engine.pair_scores import similarity

util = pytest.importorskip("sentence_transformers.util")
_DRAW = np.random.default_rng(0)
QUERY, DOCUMENT = (_DRAW.normal(size=(count, 16)).astype(np.float32) for count in (5, 9))


@pytest.mark.parametrize(
    ("name", "oracle"),
    [("cosine", "cos_sim"), ("dot", "dot_score"), ("euclidean", "euclidean_sim"), ("manhattan", "manhattan_sim")],
)
def test_similarities_of_texts_are_the_oracles(name: str, oracle: str) -> None:
    expected = getattr(util, oracle)(QUERY, DOCUMENT)
    for i, first in enumerate(QUERY):
        for j, second in enumerate(DOCUMENT):
            assert similarity(name, first, second) == pytest.approx(float(expected[i, j]), abs=1e-4)


@pytest.mark.parametrize(("name", "is_mean"), [("maxsim", False), ("meanmaxsim", True)])
def test_similarities_of_tokens_are_the_oracles(name: str, is_mean: bool) -> None:
    from sentence_transformers.util.similarity import maxsim

    expected = float(maxsim([QUERY], [DOCUMENT], length_normalize=is_mean))
    assert similarity(name, QUERY, DOCUMENT) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["maxsim", "meanmaxsim"])
def test_a_text_without_tokens_has_no_similarity(name: str) -> None:
    assert similarity(name, QUERY[:0], DOCUMENT) == similarity(name, QUERY, DOCUMENT[:0]) == 0
