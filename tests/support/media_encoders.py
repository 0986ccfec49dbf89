"""Small random multimodal models of Transformers, and Penstock's encoders with their weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from penstock.layers.linear import LinearLayer, process_weights_after_loading, restore_weights
from penstock.layers.quantization.method import MethodChoice
from penstock.loader.loader import materialise
from penstock.loader.quantized.assembly import OptionRounding, assemble, linear_weights
from penstock.models.multimodal.interface import MediaEncoder
from penstock.models.multimodal.registry import native_encoder
from penstock.models.weights import load_into_slots

TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def random_model(architecture: str, **config: Any) -> PreTrainedModel:
    """A model of this class with random weights in all of its parameters."""
    model_class = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**config)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        # Norms around 1, and everything else large enough that no part of the result is lost among the others.
        is_scale = parameter.dim() == 1 and name.endswith("weight")
        parameter.normal_(1.0, 0.2) if is_scale else parameter.normal_(0.0, 0.15 if parameter.dim() > 1 else 0.3)
    return model


def full_config(model: PreTrainedModel) -> dict[str, Any]:
    """The configuration with all defaults."""
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


def published_tensors(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """The tensors of the checkpoint that the model saves."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def make_encoder(
    hf_config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype = torch.float32,
    weights_dtype: torch.dtype | None = None,
    choose: MethodChoice | None = None,
    by_layer: bool = False,
) -> MediaEncoder:
    """The native encoder of a configuration with these weights.

    dtype, weights_dtype: as of `materialise`. choose: quantises linear layers; by_layer: while they are loaded.
    """
    with torch.device("meta"):
        encoder = native_encoder(hf_config["architectures"][0], hf_config)
    assert encoder is not None, "no native encoder"
    cpu, late = torch.device("cpu"), linear_weights(encoder) if by_layer else {}
    materialise(encoder, cpu, dtype, weights_dtype, late)
    slots = encoder.checkpoint_slots()
    if by_layer:
        assert choose is not None, "a quantization"
        slots = assemble(slots, late, cpu, dtype, OptionRounding(choose, "").method)
    named = ((encoder.checkpoint_name(name), tensor) for name, tensor in tensors)
    own = ((name, tensor) for name, tensor in named if name is not None)
    load_into_slots(slots, encoder.ignorable, own)
    if weights_dtype is not None:
        for module in encoder.modules():
            if isinstance(module, LinearLayer):
                module.cpu_arithmetic = "auto"
    if not by_layer:
        process_weights_after_loading(encoder, choose)
    return encoder.eval().requires_grad_(False)


def encoder_of(model: PreTrainedModel, **options: Any) -> MediaEncoder:
    """The native encoder with the weights of a model of Transformers."""
    return make_encoder(full_config(model), model.state_dict().items(), **options)


def assert_names_are_complete(model: PreTrainedModel, folder: Path) -> None:
    """Published names and names in Transformers load the same weights."""
    published = make_encoder(full_config(model), published_tensors(model, folder).items())
    encoder = encoder_of(model)
    for one in (published, encoder):
        restore_weights(one)
    slots = published.checkpoint_slots()
    for name, slot in encoder.checkpoint_slots().items():
        assert torch.equal(slot.target, slots[name].target), name
