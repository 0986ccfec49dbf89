"""A small semantic-similarity set and a small retrieval set, with their measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy.stats import spearmanr

# Pairs of sentences, with their similarity from 0 to 5.
PAIRS: tuple[tuple[str, str, float], ...] = (
    ("A man is playing a guitar.", "A man plays the guitar.", 5.0),
    ("A dog runs across the field.", "A dog is running through a meadow.", 4.5),
    ("Two children are playing football.", "Two kids kick a ball in the park.", 4.0),
    ("The weather is cold today.", "It is freezing outside this morning.", 4.0),
    ("She cooked pasta for dinner.", "She made spaghetti in the evening.", 4.2),
    ("The train leaves at nine.", "The bus departs at ten.", 2.5),
    ("A woman is reading a book.", "A woman is writing a letter.", 2.0),
    ("The cat sleeps on the sofa.", "The dog sleeps on the floor.", 2.2),
    ("He bought a new car.", "He repaired his old bicycle.", 1.5),
    ("The bank raised its interest rates.", "We sat on the bank of the river.", 0.7),
    ("A plane lands at the airport.", "She paints the kitchen wall green.", 0.1),
    ("The children went to school.", "The stock market fell sharply.", 0.0),
    ("Add two cups of flour and stir.", "The court rejected the appeal.", 0.0),
)
DOCUMENTS = (
    "Photosynthesis is the process by which plants turn light, water and carbon dioxide into sugar and oxygen.",
    "The Treaty of Westphalia ended the Thirty Years War in Europe in 1648.",
    "To bake bread, mix flour, water, salt and yeast, let the dough rise, and bake it in a hot oven.",
    "A binary search looks for a value in a sorted list by halving the interval again and again.",
    "The heart pumps blood through the arteries and veins of the body.",
    "Mount Everest is the highest mountain on Earth above sea level.",
    "Interest on a savings account is paid by the bank on the money that is kept there.",
    "Chlorophyll gives leaves their green colour and absorbs sunlight.",
    "Hash tables store keys and values and find them in constant time on average.",
    "Sourdough bread rises with a starter of wild yeast instead of yeast from a packet.",
)
# Queries, with the relevance of documents by number.
QUERIES: tuple[tuple[str, dict[int, float]], ...] = (
    ("How do plants make their food from sunlight?", {0: 2.0, 7: 1.0}),
    ("recipe for homemade bread", {2: 2.0, 9: 1.0}),
    ("fast lookup of an element in a data structure", {8: 2.0, 3: 1.0}),
    ("Which organ moves blood around?", {4: 2.0}),
    ("tallest peak in the world", {5: 2.0}),
    ("peace agreement of the seventeenth century", {1: 2.0}),
    ("money earned by saving", {6: 2.0}),
)
# All texts of both sets.
TEXTS = (*(text for pair in PAIRS for text in pair[:2]), *DOCUMENTS, *(query for query, _ in QUERIES))

# Embeds texts: [number of texts, size].
Embed = Callable[[Sequence[str]], np.ndarray]


def similarity_scores(embed: Embed) -> np.ndarray:
    """Cosine of each pair."""
    first, second = (_unit(embed([pair[side] for pair in PAIRS])) for side in (0, 1))
    scores: np.ndarray = (first * second).sum(1)
    return scores


def spearman(scores: np.ndarray) -> float:
    """Rank correlation of the pairs' scores with their similarities."""
    return float(spearmanr(scores, [pair[2] for pair in PAIRS]).statistic)


def retrieval_scores(embed: Embed) -> np.ndarray:
    """Cosine of each query with each document."""
    scores: np.ndarray = _unit(embed([query for query, _ in QUERIES])) @ _unit(embed(DOCUMENTS)).T
    return scores


def ndcg(scores: np.ndarray) -> float:
    """Normalised discounted cumulative gain over all documents, averaged over the queries."""
    return float(np.mean([_ndcg(row, gains) for row, (_, gains) in zip(scores, QUERIES, strict=True)]))


def _ndcg(scores: np.ndarray, gains: dict[int, float]) -> float:
    found = [gains.get(int(number), 0.0) for number in np.argsort(-scores)]
    best = sorted(found, reverse=True)
    weights = 1 / np.log2(np.arange(len(found)) + 2)
    return float(found @ weights / (best @ weights))


def _unit(x: np.ndarray) -> np.ndarray:
    unit: np.ndarray = x / np.linalg.norm(x, axis=1, keepdims=True)
    return unit
