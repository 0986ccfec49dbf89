"""Classifier from rows of a language model's head: a reranker that answers "yes" or "no"."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from penstock.config import ModelConfig
from penstock.errors import ModelError

# Name of the classifier's weight among the checkpoint's.
SCORE = "score.weight"


@dataclass(frozen=True, slots=True)
class ClassifierTokens:
    """head_weight: name of the head's weight in the checkpoint. token_ids: of the tokens that become classes."""

    head_weight: str
    token_ids: tuple[int, ...]

    @classmethod
    def of(cls, model: ModelConfig, head_weight: str) -> ClassifierTokens:
        """Raises ModelError for a text that is no token."""
        assert model.pooling is not None, "a pooling model's configuration"
        path = model.tokenizer_folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"classifier_from_token needs {path}, which is missing.")
        tokenizer, ids = Tokenizer.from_file(str(path)), []
        for text in model.pooling.classifier_from_token:
            token_id = tokenizer.token_to_id(text)
            if token_id is None:
                raise ModelError(f"classifier_from_token has {text!r}, which is no token of {path}.")
            ids.append(token_id)
        return cls(head_weight, tuple(ids))

    def beside(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights, and the classifier's beside the head's: of two tokens, the second's row minus the first's,
        whose sigmoid is the softmax of both.
        """
        for name, tensor in weights:
            if name == SCORE:
                continue
            if name in (self.head_weight, self.head_weight.removeprefix("model.")):
                rows = tensor[list(self.token_ids)].to(torch.float32)
                yield SCORE, rows[1:] - rows[:1] if len(self.token_ids) == 2 else rows
            yield name, tensor
