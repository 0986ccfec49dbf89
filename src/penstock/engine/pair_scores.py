"""Scores of pairs by models that embed each text: similarities of two embeddings, or of two texts' tokens.

Suffixes: D embedding size, S tokens of a query, T tokens of a document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from penstock.checkpoints.pooling import PoolingConfig
from penstock.contract import PoolingParams
from penstock.engine.inputs.pooling_prompts import named_prompt
from penstock.engine.inputs.prompts import Prompt
from penstock.engine.output.outputs import RequestOutput
from penstock.engine.output.pooling_outputs import ScoringOutput, ScoringRequestOutput, pooled_array
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np

# Names of a checkpoint's prompts for the texts of each role; the first that has a text is taken.
_PROMPTS_OF_ROLES = {"query": ("query",), "document": ("document", "passage", "corpus")}


class PairScores:
    """Requests for the texts of pairs, and the pairs' scores from their outputs.

    A text that occurs twice in one role is embedded once. Each text gets the checkpoint's prompt for its role, or the
    default one.
    pairs: queries and documents. params: of all texts.
    prompts, params: of the requests, one each.
    """

    def __init__(
        self, pooling: PoolingConfig, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], params: PoolingParams
    ) -> None:
        self._pooling = pooling
        self._places: dict[tuple[Prompt, int | None], int] = {}
        # Places of texts without their prompts, which are long to put together for each pair of a query.
        self._known: dict[tuple[str, str], int] = {}
        self._pairs = [(self._place("query", query), self._place("document", document)) for query, document in pairs]
        self.prompts = [prompt for prompt, _ in self._places]
        self.params = [msgspec.structs.replace(params, max_length=length) for _, length in self._places]
        late = pooling.late_interaction
        ids = () if late is None else (tokenizer.token_id(text) for text in late.skipped)
        self._skipped = {token_id for token_id in ids if token_id is not None}
        self._skipped_in = () if late is None else late.skipped_in

    @staticmethod
    def task(pooling: PoolingConfig) -> str:
        """Task of the requests."""
        return "embed" if "embed" in pooling.tasks else "token_embed"

    def scores(self, outputs: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
        """Scores of the pairs, from the outputs of the requests. Raises RequestFailed for a request that failed."""
        return [self._score(outputs[query], outputs[document]) for query, document in self._pairs]

    def values(self, outputs: Sequence[RequestOutput]) -> list[float]:
        """Numbers of the scores alone. Raises as `scores`."""
        return [self._value(outputs[query], outputs[document]) for query, document in self._pairs]

    def _value(self, query: RequestOutput, document: RequestOutput) -> float:
        return similarity(self._pooling.similarity, self._rows("query", query), self._rows("document", document))

    def _score(self, query: RequestOutput, document: RequestOutput) -> ScoringRequestOutput:
        return ScoringRequestOutput(
            request_id=f"{query.request_id}_{document.request_id}",
            outputs=ScoringOutput(self._value(query, document)),
            prompt_token_ids=query.prompt_token_ids + document.prompt_token_ids,
            num_cached_tokens=query.num_cached_tokens + document.num_cached_tokens,
        )

    def _place(self, role: str, text: str) -> int:
        place = self._known.get((role, text))
        if place is None:
            place = self._known[role, text] = self._new_place(role, text)
        return place

    def _new_place(self, role: str, text: str) -> int:
        pooling, late = self._pooling, self._pooling.late_interaction
        names = [name for name in _PROMPTS_OF_ROLES[role] if name in pooling.prompts]
        name = max(names, key=lambda one: bool(pooling.prompts[one]), default=None)
        key = named_prompt(pooling, text, name), None if late is None else late.length(role)
        return self._places.setdefault(key, len(self._places))

    def _rows(self, role: str, output: RequestOutput) -> np.ndarray:
        """Embedding of a text, or of its tokens without those that scores leave out."""
        rows = pooled_array(output)
        if not self._skipped or role not in self._skipped_in:
            return rows
        return rows[[token_id not in self._skipped for token_id in output.prompt_token_ids]]


def similarity(name: str, first: np.ndarray, second: np.ndarray) -> float:
    """Similarity of two embeddings [D], or of those of a query's tokens [S, D] and of a document's [T, D].

    name: as in `PoolingConfig.similarity`. Computed in float64.
    """
    return _SIMILARITIES[name](first.astype("float64"), second.astype("float64"))


def _cosine(x: np.ndarray, y: np.ndarray) -> float:
    length = float((x @ x) ** 0.5 * (y @ y) ** 0.5)
    return float(x @ y) / length if length else 0.0


def _max_similarities(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Largest product of each of a query's tokens with a document's: [S], or [0] if either has none."""
    best: np.ndarray = (x @ y.T).max(1) if len(y) else x[:0, 0]
    return best


_SIMILARITIES: Mapping[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "cosine": _cosine,
    "dot": lambda x, y: float(x @ y),
    "euclidean": lambda x, y: -float(((x - y) ** 2).sum() ** 0.5),
    "manhattan": lambda x, y: -float(abs(x - y).sum()),
    "maxsim": lambda x, y: float(_max_similarities(x, y).sum()),
    "meanmaxsim": lambda x, y: float(_max_similarities(x, y).sum()) / max(1, len(x)),
}
