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

from penstock.config import ModelConfig
from penstock.config.json_file import read_json_object
from penstock.config.pooling import PoolingConfig
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
        return {
            f"{self.shape.name}.{name}": WeightSlot(tuple(parameter.shape), parameter)
            for name, parameter in self.named_parameters(recurse=False)
        }


def head_layers(model: ModelConfig, pooling: PoolingConfig, hidden_size: int, *, is_logits: bool) -> list[HeadLayer]:
    """Layers after pooling. is_logits: the backbone's rows are the classes' logits already."""
    if is_logits:
        return []
    shapes = _classifier(pooling, hidden_size) if pooling.has_classes else _dense(model.folder, pooling.dense)
    layers = []
    for shape in shapes:
        layers.append(HeadLayer(hidden_size, shape))
        hidden_size = shape.num_outputs
    return layers


def _classifier(pooling: PoolingConfig, hidden_size: int) -> list[LayerShape]:
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
    if architecture.suffix == "ForRewardModel":
        return [LayerShape("score.0", hidden_size, "relu"), LayerShape("score.2", num_labels)]
    return [LayerShape("score", num_labels, has_bias=not of_texts)]


def _dense(folder: Path, names: Sequence[str]) -> list[LayerShape]:
    shapes = []
    for name in names:
        path = folder / name / "config.json"
        content = read_json_object(path, ModelError)
        activation = str(content.get("activation_function", "identity")).rsplit(".", 1)[-1].lower()
        if activation not in _ACTIVATIONS or content.get("use_residual"):
            what = "use_residual" if content.get("use_residual") else f"activation_function={activation!r}"
            raise UnsupportedModel(f"{path} has {what}, which is not supported. Supported: {', '.join(_ACTIVATIONS)}.")
        size = content.get("out_features")
        if type(size) is not int or size < 1:
            raise ModelError(f"{path} has out_features={size!r}. It must be a positive integer.")
        shapes.append(LayerShape(f"{name}.linear", size, activation, has_bias=content.get("bias") is not False))
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
