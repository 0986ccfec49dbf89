"""Attention layer of an encoder: in both directions, over whole texts, without a KV cache.

Suffixes: T tokens, H query heads, K KV heads, D head size, X concatenated heads.
"""

from __future__ import annotations

from torch import Tensor, nn

from penstock.attention import ForwardContext, HeadNorm, LayerAttention
from penstock.attention.whole_texts import attend_texts
from penstock.kernels.rotary import Rotation, TableRotation
from penstock.layers.attention import Attention


class EncoderAttention(nn.Module):
    """Attention to all tokens of a text, or to those in `sliding_window` on either side.

    description: of the heads. It is not named `layer`, by which layers with a KV cache are found.
    """

    def __init__(self, description: LayerAttention) -> None:
        super().__init__()
        self.description = description

    def forward(self, qkv_TX: Tensor, positions_T: Tensor, context: ForwardContext) -> Tensor:
        """[T, H * D] from the output of the QKV projection; [R, H * D] where the context is narrowed."""
        return context.asked_for(attend_texts(self.description, qkv_TX, positions_T, None, None, context))

    def from_projection(
        self, qkv_TX: Tensor, norm: HeadNorm | None, rotation: Rotation, context: ForwardContext
    ) -> Tensor:
        """See `Attention.from_projection`. Raises TypeError for a rotation without a table of positions."""
        if not isinstance(rotation, TableRotation):
            raise TypeError(f"attention in both directions takes rotary tables, not {type(rotation).__name__}")
        mixed_TX = attend_texts(self.description, qkv_TX, rotation.positions_T, norm, rotation, context)
        return context.asked_for(mixed_TX)


def attend_in_both_directions(model: nn.Module) -> None:
    """Replace a decoder's attention layers by `EncoderAttention`."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Attention):
                setattr(module, name, EncoderAttention(child.layer))
