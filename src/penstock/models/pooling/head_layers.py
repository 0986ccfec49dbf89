"""Layers after pooling: dense layers of sentence-transformers, and classifiers.

They run in float32, one text at a time, so that a text's result has the same bits in any batch.
Suffixes: I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.checkpoints.architectures import MODERN_BERT, Use
from penstock.checkpoints.json_file import read_json_object, typed_field
from penstock.checkpoints.pooling import PoolingConfig
from penstock.config import ModelConfig
from penstock.config.checks import is_positive_float32
from penstock.errors import ModelError, UnsupportedModel
from penstock.layers.weights import WeightSlot, new_parameter

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}
# Of sentence-transformers' dense layers, where a file does not say.
_DENSE_ACTIVATION = "tanh"
# Families whose reward models have two layers as their head.
_REWARD_FAMILIES = ("Qwen2",)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """name: of its tensors in the checkpoint. activation: of its output."""

    name: str
    num_outputs: int
    activation: str = "identity"
    has_bias: bool = True


class HeadLayer(nn.Module):
    """activation(weight x + bias)."""

    def __init__(self, num_inputs: int, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = new_parameter(shape.num_outputs, num_inputs)
        self.bias = new_parameter(shape.num_outputs) if shape.has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(torch.float32)
        product = F.linear(x.to(torch.float32), self.weight.to(torch.float32), bias)
        return _ACTIVATIONS[self.shape.activation](product)

    def slots(self) -> dict[str, WeightSlot]:
        """Slots by the names of the checkpoint's tensors."""
        return _slots(self, self.shape.name)


@dataclass(frozen=True, slots=True)
class NormShape:
    """A layer norm. name: of its tensors in the checkpoint."""

    name: str
    eps: float
    has_bias: bool


class HeadNorm(nn.Module):
    """Layer norm between the layers of a head."""

    def __init__(self, size: int, shape: NormShape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = new_parameter(size)
        self.bias = new_parameter(size) if shape.has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (None if one is None else one.to(torch.float32) for one in (self.weight, self.bias))
        return F.layer_norm(x.to(torch.float32), (x.shape[-1],), weight, bias, self.shape.eps)

    def slots(self) -> dict[str, WeightSlot]:
        """Slots by the names of the checkpoint's tensors."""
        return _slots(self, self.shape.name)


def _slots(module: nn.Module, name: str) -> dict[str, WeightSlot]:
    return {
        f"{name}.{parameter}": WeightSlot(tuple(tensor.shape), tensor)
        for parameter, tensor in module.named_parameters(recurse=False)
    }


def head_layers(
    model: ModelConfig, pooling: PoolingConfig, hidden_size: int, *, is_logits: bool
) -> list[HeadLayer | HeadNorm]:
    """Layers after pooling. is_logits: the backbone's rows are the classes' logits already."""
    if is_logits:
        return []
    shapes = _classifier(model, pooling, hidden_size) if pooling.has_classes else _dense(model.folder, pooling.dense)
    layers: list[HeadLayer | HeadNorm] = []
    for shape in shapes:
        if isinstance(shape, NormShape):
            layers.append(HeadNorm(hidden_size, shape))
        else:
            layers.append(HeadLayer(hidden_size, shape))
            hidden_size = shape.num_outputs
    return layers


def _classifier(model: ModelConfig, pooling: PoolingConfig, hidden_size: int) -> Sequence[LayerShape | NormShape]:
    architecture, num_labels = pooling.architecture, len(pooling.labels)
    if pooling.classifier_from_token:
        return [LayerShape("score", num_labels, has_bias=False)]
    of_texts = "classify" in pooling.tasks
    if architecture.encoder == "bert":
        pooler = [LayerShape("bert.pooler.dense", hidden_size, "tanh")] if of_texts else []
        return [*pooler, LayerShape("classifier", num_labels)]
    if architecture.encoder == "roberta" and of_texts:
        return [LayerShape("classifier.dense", hidden_size, "tanh"), LayerShape("classifier.out_proj", num_labels)]
    if architecture.encoder == "roberta":
        return [LayerShape("classifier", num_labels)]
    if architecture.encoder == MODERN_BERT:
        return [*_prediction_head(model, hidden_size), LayerShape("classifier", num_labels)]
    if architecture.use is Use.REWARD:
        if architecture.family not in _REWARD_FAMILIES:
            known = ", ".join(f"{family}ForRewardModel" for family in _REWARD_FAMILIES)
            raise UnsupportedModel(
                f"{architecture.name} is a reward model whose head is not known. Supported: {known}, "
                "…ForProcessRewardModel of these, and …ForSequenceClassification and …ForTokenClassification of all "
                "native decoder families."
            )
        return [LayerShape("score.0", hidden_size, "relu"), LayerShape("score.2", num_labels)]
    return [LayerShape("score", num_labels, has_bias=not of_texts)]


def _prediction_head(model: ModelConfig, hidden_size: int) -> list[LayerShape | NormShape]:
    """ModernBERT's layers before its classifier."""
    hf_config = model.hf_config
    activation, eps = hf_config.get("classifier_activation", "gelu"), hf_config.get("norm_eps", 1e-5)
    if activation not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"{model.config_source} has classifier_activation={activation!r}. Supported: {', '.join(_ACTIVATIONS)}."
        )
    if not is_positive_float32(eps):
        raise ModelError(f"{model.config_source} has norm_eps={eps!r}. It must be a positive number.")
    return [
        LayerShape("head.dense", hidden_size, activation, has_bias=bool(hf_config.get("classifier_bias"))),
        NormShape("head.norm", eps, has_bias=bool(hf_config.get("norm_bias"))),
    ]


def _dense(folder: Path, names: Sequence[str]) -> Sequence[LayerShape]:
    shapes = []
    for name in names:
        path = folder / name / "config.json"
        content = read_json_object(path, ModelError)
        named = typed_field(content, "activation_function", (str,), path, ModelError) or _DENSE_ACTIVATION
        activation = named.rsplit(".", 1)[-1].lower()
        is_residual = typed_field(content, "use_residual", (bool,), path, ModelError)
        if activation not in _ACTIVATIONS or is_residual:
            what = "use_residual" if is_residual else f"activation_function={activation!r}"
            raise UnsupportedModel(f"{path} has {what}, which is not supported. Supported: {', '.join(_ACTIVATIONS)}.")
        size = content.get("out_features")
        if type(size) is not int or size < 1:
            raise ModelError(f"{path} has out_features={size!r}. It must be a positive integer.")
        has_bias = typed_field(content, "bias", (bool,), path, ModelError)
        shapes.append(LayerShape(f"{name}.linear", size, activation, has_bias=has_bias is not False))
    return shapes


def dense_weights(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of sentence-transformers' dense layers, by the names of their slots."""
    for name in names:
        file: dict[str, Any]
        if (folder / name / "model.safetensors").is_file():
            from safetensors.torch import load_file

            file = load_file(folder / name / "model.safetensors")
        else:
            file = torch.load(folder / name / "pytorch_model.bin", map_location="cpu", weights_only=True)
        for parameter, tensor in file.items():
            yield f"{name}.{parameter}", tensor
