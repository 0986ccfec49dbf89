"""Logits from hidden states by the model's own code, including scaling and caps.

Suffixes: T tokens, L logits rows, D hidden size, V vocabulary, _1… a batch of one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.models.transformers_fallback.interface import CannotRun


class GivenHiddenStates(nn.Module):
    """Replaces the backbone; returns given hidden states as its output."""

    def __init__(self, output_type: type) -> None:
        super().__init__()
        self._output_type = output_type

    def forward(self, *_arguments: Any, inputs_embeds: Tensor, **_more: Any) -> Any:
        return self._output_type(last_hidden_state=inputs_embeds)


class LogitsHead(nn.Module):
    """A causal language model without its backbone: applies the LM head, with the model's own scaling and caps."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, hidden_LD: Tensor) -> Tensor:
        """float32 logits: [L, V]."""
        logits_1LV = self.model(inputs_embeds=hidden_LD.unsqueeze(0), use_cache=False).logits
        return logits_1LV[0].to(torch.float32)  # type: ignore[no-any-return]


def take_backbone(
    model: PreTrainedModel, name: str, output_type: type, hidden_size: int, vocab_size: int
) -> tuple[nn.Module, LogitsHead]:
    """Split the model into its backbone, the submodule of that name, and the rest as a head.

    Raises CannotRun when the rest cannot compute logits from hidden states.
    """
    backbone = model.get_submodule(name)
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, GivenHiddenStates(output_type))
    head = LogitsHead(model)
    with torch.no_grad():
        try:
            logits = head(torch.empty(2, hidden_size, device="meta"))
        except Exception as error:
            raise CannotRun(f"its logits cannot be computed from hidden states alone ({error})") from error
    if logits.shape != (2, vocab_size):
        raise CannotRun(f"two hidden states give logits of the shape {list(logits.shape)}, not [2, {vocab_size}]")
    return backbone, head
