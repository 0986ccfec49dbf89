"""Target model of the EAGLE-3 head: its logits and auxiliary hidden states.

Shape suffixes: `B` rows of a batch, `T` tokens of a row, `V` vocabulary, `A` hidden states of several layers side by
side.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from penstock.kernels.sampling import draw_tokens

from .head import AUX_LAYERS


class TargetStates(NamedTuple):
    """Auxiliary hidden states that enter `AUX_LAYERS`, concatenated, and next-token logits of every token."""

    aux_BTA: Tensor
    logits_BTV: Tensor


def draw(logits_RV: Tensor, temperature_R: Tensor, seeds_R: Tensor, positions_R: Tensor) -> Tensor:
    """Tokens [R] as Penstock draws them: equal seeds and positions give equal noise. Temperature 0 is greedy."""
    is_greedy_R = temperature_R == 0
    scaled_RV = logits_RV / temperature_R.masked_fill(is_greedy_R, 1.0).unsqueeze(-1)
    drawn_R = draw_tokens(scaled_RV.contiguous(), seeds_R, torch.arange(len(seeds_R)), positions_R).token_ids_R
    return torch.where(is_greedy_R, logits_RV.argmax(dim=-1), drawn_R)


@dataclass
class Target:
    """The model folder as a user would load it, with its bfloat16 weights computed in float32."""

    folder: Path
    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast

    @classmethod
    def load(cls, folder: Path) -> Target:
        """Load the folder through the Auto classes of Transformers."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
        return cls(
            folder, model.eval().requires_grad_(False), AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        )

    @torch.no_grad()
    def states(self, ids_BT: Tensor) -> TargetStates:
        """Auxiliary hidden states and logits of whole rows."""
        output = self.model(ids_BT, output_hidden_states=True, use_cache=False)
        return TargetStates(torch.cat([output.hidden_states[layer] for layer in AUX_LAYERS], dim=-1), output.logits)

    @torch.no_grad()
    def embedded(self, ids_BT: Tensor) -> Tensor:
        """The target's embeddings of tokens, which the head has in common with it."""
        embedded: Tensor = self.model.model.embed_tokens(ids_BT)
        return embedded
