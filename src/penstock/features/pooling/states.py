"""Pooling by slot: the parameters of each request, and what later chunks of its prompt need of earlier ones.

Suffixes: T tokens of a request in a step, D hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from penstock.config.pooling import TOKEN_TASKS
from penstock.contract import NewRequestData, PoolingParams
from penstock.errors import InvalidRequest
from penstock.models.pooling import PoolingModel
from penstock.runner.slot_owner import SlotOwner
from penstock.worker.feature import WorkerServices


class Pooled(ABC):
    """Hidden states of one prompt, taken in chunk by chunk.

    needs_all: whether it needs the hidden states of all tokens; otherwise those of each chunk's last one are enough.
    """

    needs_all = True

    @abstractmethod
    def add(self, rows_TD: Tensor) -> None:
        """Take in a chunk's hidden states, or its last one."""

    @abstractmethod
    def result(self) -> Tensor:
        """[D], or [T, D] for all tokens, once the prompt is complete."""


class LastToken(Pooled):
    """Hidden state of the last token."""

    needs_all = False

    def add(self, rows_TD: Tensor) -> None:
        self._last = rows_TD[-1]

    def result(self) -> Tensor:
        return self._last


class FirstToken(Pooled):
    """Hidden state of the first token ("cls")."""

    def __init__(self) -> None:
        self._first: Tensor | None = None

    def add(self, rows_TD: Tensor) -> None:
        if self._first is None:
            self._first = rows_TD[0].clone()

    def result(self) -> Tensor:
        assert self._first is not None, "a prompt has tokens"
        return self._first


class Mean(Pooled):
    """Mean over all tokens, added up one by one in 64 bits, so that chunks make no difference."""

    def __init__(self) -> None:
        self._sum: np.ndarray | Tensor | None = None
        self._count = 0

    def add(self, rows_TD: Tensor) -> None:
        self._count += len(rows_TD)
        rows_TD = rows_TD.to(torch.float64)
        if rows_TD.is_cpu:
            # numpy adds rows in order; torch's order depends on their number.
            rows = rows_TD.numpy()
            rows = rows if self._sum is None else np.concatenate((np.asarray(self._sum)[None], rows))
            self._sum = np.add.reduce(rows, axis=0)
        else:
            self._sum = rows_TD.sum(0) if self._sum is None else self._sum + rows_TD.sum(0)

    def result(self) -> Tensor:
        assert self._sum is not None, "a prompt has tokens"
        return torch.as_tensor(self._sum / self._count).to(torch.float32)


class Maximum(Pooled):
    """Largest value of each dimension over all tokens."""

    def __init__(self) -> None:
        self._largest: Tensor | None = None

    def add(self, rows_TD: Tensor) -> None:
        largest = rows_TD.amax(0)
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)

    def result(self) -> Tensor:
        assert self._largest is not None, "a prompt has tokens"
        return self._largest


class AllTokens(Pooled):
    """Hidden states of all tokens."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []

    def add(self, rows_TD: Tensor) -> None:
        self._chunks.append(rows_TD.clone())

    def result(self) -> Tensor:
        return self._chunks[0] if len(self._chunks) == 1 else torch.cat(self._chunks)


_KINDS: dict[str, type[Pooled]] = {"last": LastToken, "cls": FirstToken, "mean": Mean, "max": Maximum}


class PoolingStates(SlotOwner):
    """Parameters and pooled hidden states of requests. pooling: of the model (`PoolingConfig.pooling`)."""

    def __init__(self, pooling: str) -> None:
        self._pooling = pooling
        self.params: dict[int, PoolingParams] = {}
        self.pooled: dict[int, Pooled] = {}
        self.prompt_token_ids: dict[int, list[int]] = {}

    def add(self, slot: int, request: NewRequestData) -> None:
        params = request.pooling_params
        if params is None or params.task is None:
            raise InvalidRequest("A request of a pooling model has pooling_params with a task.")
        kind = AllTokens if params.task in TOKEN_TASKS else _KINDS[self._pooling]
        if request.num_computed_tokens and kind is not LastToken:
            raise InvalidRequest(
                f"{params.task} with pooling {self._pooling!r} needs the whole text, but {request.num_computed_tokens} "
                "tokens come from the prefix cache."
            )
        self.params[slot], self.pooled[slot] = params, kind()
        self.prompt_token_ids[slot] = request.prompt_token_ids

    def remove(self, slot: int) -> None:
        self.params.pop(slot, None)
        self.pooled.pop(slot, None)
        self.prompt_token_ids.pop(slot, None)


def pooling_states(services: WorkerServices) -> PoolingStates | None:
    """States of a pooling model; None for others."""
    model = services.model
    return PoolingStates(model.pooling.pooling) if isinstance(model, PoolingModel) else None
