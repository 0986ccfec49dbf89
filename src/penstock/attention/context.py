"""What a model's forward pass is told about the step it belongs to."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.attention.base import AttentionBackend, AttentionMetadata, HeadNorm, LayerAttention
from penstock.kernels.rotary import Rotation


@dataclass(frozen=True, slots=True)
class BoundLayer:
    """One layer's cache, the KV-cache group it belongs to, and the backend of that group."""

    group: int
    backend: AttentionBackend
    kv_cache: Tensor


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Passed to the model with every call.

    layers: by layer name; the same in every step.
    metadata: by KV-cache group; this step's.
    programs: what models record for these layers and for their weights as they are, each under itself; None where
    nothing is to be recorded.
    """

    layers: Mapping[str, BoundLayer]
    metadata: Sequence[AttentionMetadata]
    programs: MutableMapping[Hashable, Any] | None = None

    def attend(self, layer: LayerAttention, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor) -> Tensor:
        """Attention of one layer over this step: [T, H, D] from its queries, keys [T, K, D] and values [T, K, D]."""
        bound = self.layers[layer.name]
        return bound.backend.forward(layer, query_THD, key_TKD, value_TKD, bound.kv_cache, self.metadata[bound.group])

    def attend_projected(
        self, layer: LayerAttention, qkv_TX: Tensor, norm: HeadNorm | None, rotation: Rotation
    ) -> Tensor:
        """`attend` from the output of the projections, [T, (H + 2 * K) * D], which it overwrites: [T, H * D]."""
        bound = self.layers[layer.name]
        return bound.backend.forward_projected(
            layer, qkv_TX, norm, rotation, bound.kv_cache, self.metadata[bound.group]
        )
