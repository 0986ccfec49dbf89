"""Gated DeltaNets in `config.json` and in checkpoints, as their families share them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.layers.recurrence.gated_delta import DeltaSizes
from penstock.models.config_fields import ConfigFields

DEFAULT_NUM_TAPS = 4
_SPLIT_CONVOLUTION = re.compile(r"(.*)\.([qkv])_conv1d\.weight")


def checked(fields: ConfigFields, sizes: DeltaSizes) -> DeltaSizes:
    """Return the sizes. Raises UnsupportedFeature for key heads that do not divide the value heads, and for another
    activation than silu.
    """
    if sizes.num_value_heads % sizes.num_key_heads:
        allowed = f"divisors of {sizes.num_value_heads} value heads"
        raise fields.unsupported("linear_num_key_heads", sizes.num_key_heads, allowed)
    fields.choice("hidden_act", ("silu", "swish"), "silu")
    return sizes


class SplitConvolutions:
    """Convolutions of queries, keys and values that checkpoints have apart, and models as one.

    Transformers cuts them into equal parts when it saves, whatever their channels are.
    """

    def __init__(self) -> None:
        self._parts: dict[str, dict[str, Tensor]] = {}

    def has(self, name: str) -> bool:
        """Whether a tensor of this name is one of three parts."""
        return _SPLIT_CONVOLUTION.fullmatch(name) is not None

    def joined(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A convolution once its three parts were given; any other tensor as it is."""
        found = _SPLIT_CONVOLUTION.fullmatch(name)
        if found is None:
            yield name, tensor
            return
        layer, projection = found.groups()
        parts = self._parts.setdefault(layer, {})
        parts[projection] = tensor.clone()  # small, and its memory may be another one's by then
        if len(parts) == 3:
            del self._parts[layer]
            yield f"{layer}.conv1d.weight", torch.cat([parts[one] for one in "qkv"])
