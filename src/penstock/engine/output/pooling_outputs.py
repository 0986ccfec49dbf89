"""Outputs of pooling requests, as callers get them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from penstock.engine.output.outputs import RequestOutput
from penstock.errors import RequestFailed

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

_Output = TypeVar("_Output")


class PoolingOutput(msgspec.Struct):
    """data: float32 tensor, [D] for a text, [T, D] for its tokens."""

    data: Tensor


class EmbeddingOutput(msgspec.Struct):
    """embedding: of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


class ClassificationOutput(msgspec.Struct):
    """probs: one per class, or logits with use_activation=False."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


class ScoringOutput(msgspec.Struct):
    """score: of a pair of texts."""

    score: float


class PoolingRequestOutput(msgspec.Struct, Generic[_Output], kw_only=True):
    """Output of one text. prompt_token_ids: its tokens after truncation. num_cached_tokens: from the prefix cache."""

    request_id: str
    outputs: _Output
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput], kw_only=True):
    """Embedding of one text."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput], kw_only=True):
    """Classes of one text."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput], kw_only=True):
    """Score of one pair."""


def pooled_array(output: RequestOutput) -> np.ndarray:
    """Pooled vectors of a finished request. Raises RequestFailed, with the reason, for one that failed."""
    if output.pooled_data is None:
        reason = output.error or f"it ended with {output.outputs[0].finish_reason!r}"
        raise RequestFailed(f"Request {output.request_id} has no result: {reason}")
    return output.pooled_data.to_numpy()


def as_pooling(output: RequestOutput) -> PoolingRequestOutput[PoolingOutput]:
    import torch

    return PoolingRequestOutput(outputs=PoolingOutput(torch.tensor(pooled_array(output))), **_common(output))


def as_embedding(output: RequestOutput) -> EmbeddingRequestOutput:
    return EmbeddingRequestOutput(outputs=EmbeddingOutput(pooled_array(output).tolist()), **_common(output))


def as_classification(output: RequestOutput) -> ClassificationRequestOutput:
    outputs = ClassificationOutput(pooled_array(output).tolist())
    return ClassificationRequestOutput(outputs=outputs, **_common(output))


def as_score(output: RequestOutput) -> ScoringRequestOutput:
    return ScoringRequestOutput(outputs=ScoringOutput(float(pooled_array(output)[0])), **_common(output))


def _common(output: RequestOutput) -> dict[str, Any]:
    return {
        "request_id": output.request_id,
        "prompt_token_ids": output.prompt_token_ids,
        "num_cached_tokens": output.num_cached_tokens,
    }
