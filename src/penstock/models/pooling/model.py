"""A backbone with the layers after pooling.

Suffixes: T tokens, L rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.contract import PoolingParams
from penstock.layers.weights import Shard, WeightSlot
from penstock.models.causal_lm import CausalLM, StackedParameter
from penstock.models.pooling.backbones import Backbone, make_backbone
from penstock.models.pooling.classifier_tokens import ClassifierTokens
from penstock.models.pooling.head_layers import dense_weights, head_layers
from penstock.parallel import ParallelState

# Modules of checkpoints that are not used where a model has no such head.
_HEADS = ("lm_head", "cls", "score", "classifier", "qa_outputs", "head", "decoder")


class PoolingModel(CausalLM):
    """Backbone whose hidden states are pooled by the output head, and finished here.

    pooling: its configuration. encoder: of images; None for a model of texts.
    """

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        super().__init__()
        assert model_config.pooling is not None, "the registry makes pooling models of such configurations"
        self.pooling = pooling = model_config.pooling
        self._folder = model_config.folder
        self._vocab_size = model_config.vocab_size
        made: Backbone = make_backbone(model_config, parallel)
        self.backbone: CausalLM = made.model
        self.encoder: nn.Module | None = getattr(made.model, "image_encoder", None)
        self.features = made.model.features
        self._prefix = made.prefix
        layers = head_layers(model_config, pooling, made.hidden_size, is_logits=made.is_logits)
        self.head = nn.ModuleList(layers)
        self._layers = tuple(layers)
        self._tokens = ClassifierTokens.of(model_config, made.head_weight) if pooling.classifier_from_token else None

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext, *given: Tensor) -> Tensor:
        return self.backbone(input_ids_T, positions_T, context, *given)  # type: ignore[no-any-return]

    def take_embeddings(self) -> int:
        return self.backbone.take_embeddings()

    def compute_logits(self, hidden_LD: Tensor, context: ForwardContext) -> Tensor:
        """Zeros, for dummy steps: no token is sampled."""
        return hidden_LD.new_zeros(hidden_LD.shape[0], self._vocab_size, dtype=torch.float32)

    def finish(self, pooled: Tensor, params: PoolingParams) -> Tensor:
        """Make the result from a text's vector [D], or from those of its tokens [T, D]: dense layers or classifier,
        `dimensions`, and the activation.
        """
        x = pooled.to(torch.float32)
        for layer in self._layers:
            x = layer(x.unsqueeze(0))[0] if x.dim() == 1 else layer(x)
        if self.pooling.has_classes:
            if params.returned_token_ids is not None:
                x = x[..., list(params.returned_token_ids)]
            return _activated(x, self.pooling.activation if params.use_activation is not False else "identity")
        if params.dimensions is not None:
            x = x[..., : params.dimensions]
        normalizes = self.pooling.normalize if params.use_activation is None else params.use_activation
        return F.normalize(x, dim=-1) if normalizes else x

    def modules_by_name(self) -> Mapping[str, tuple[nn.Module | None, Shard | None]]:
        """As `CausalLM`: those of the backbone, which has no LM head."""
        modules = self.backbone.modules_by_name()
        return {name: module for name, module in modules.items() if name != "lm_head"}

    def stacked_parameters(self) -> Mapping[str, Sequence[StackedParameter]]:
        return self.backbone.stacked_parameters()

    def module_name(self, name: str) -> str:
        """See `CausalLM`. The names may be of the model with its head, or of the backbone alone."""
        name = name if name.startswith(self._prefix) else self._prefix + name
        return self.backbone.module_name(name)

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        slots = {self._own_name(name): slot for name, slot in self.backbone.checkpoint_slots().items()}
        for layer in self._layers:
            slots |= layer.slots()
        return slots

    def names_elsewhere(self) -> Sequence[str]:
        return self.backbone.names_elsewhere()

    @property
    def ignorable(self) -> tuple[str, ...]:  # type: ignore[override]
        """Heads that are not used, beside what the backbone ignores."""
        known = {name.split(".")[0] for layer in self._layers for name in layer.slots()}
        heads = [head for head in _HEADS if head not in known]
        own = tuple(_without_prefix(pattern, self._prefix) for pattern in self.backbone.ignorable)
        return (*self.backbone.ignorable, *own, *(rf"{head}\..*" for head in heads))

    def is_scattered(self, num_tokens: int) -> bool:
        return bool(self.backbone.is_scattered(num_tokens))

    def checkpoint_name(self, name: str) -> str:
        if any(name in layer.slots() for layer in self._layers):
            return name
        known = self._backbone_names
        for candidate in (name, f"{self._prefix}{name}", self.backbone.checkpoint_name(name)):
            if candidate in known:
                return self._own_name(candidate)
        return name

    def pieces(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """As `CausalLM`: those of the backbone, for its tensors."""
        whole = name if name.startswith(self._prefix) else f"{self._prefix}{name}"
        found = list(self.backbone.pieces(whole, tensor))
        if all(piece in self._backbone_names for piece, _ in found):
            yield from ((self._own_name(piece), part) for piece, part in found)
        else:
            yield self.checkpoint_name(name), tensor

    @cached_property
    def _backbone_names(self) -> frozenset[str]:
        return frozenset(self.backbone.checkpoint_slots())

    def load_weights(
        self, weights: Iterable[tuple[str, Tensor]], slots: Mapping[str, WeightSlot] | None = None
    ) -> None:
        if self._tokens is not None:
            weights = self._tokens.beside(weights)
        super().load_weights(self._with_dense(weights), slots)

    def _with_dense(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        yield from weights
        names = [] if self.pooling.has_classes else self.pooling.dense
        device = next(self.parameters()).device
        for name, tensor in dense_weights(self._folder, names):
            yield name, tensor.to(device) if device.type == "meta" else tensor

    def _own_name(self, name: str) -> str:
        """A backbone's tensor by its name in this checkpoint: classes without a head lack the prefix."""
        has_prefix = self.pooling.architecture.has_prefix
        return name if has_prefix or not self._prefix else name.removeprefix(self._prefix)


def _activated(logits: Tensor, activation: str) -> Tensor:
    if activation == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if activation == "sigmoid" else logits


def _without_prefix(pattern: str, prefix: str) -> str:
    escaped = prefix.replace(".", r"\.")
    return pattern.removeprefix(escaped) if prefix else pattern
