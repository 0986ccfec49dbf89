"""Small random checkpoints, written by Transformers, whose own model is the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from penstock.config import ModelConfig

VOCAB_SIZE = 97
_TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def tiny_config(family: str, **overrides: Any) -> PretrainedConfig:
    """A configuration of "llama", "mistral", "qwen2" or "qwen3" that runs in milliseconds."""
    config_class = getattr(transformers, f"{_FAMILIES[family]}Config")
    return config_class(**{**_TINY, **overrides})


def tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Transformers' model in float32 with eager attention; all weights random, so that each of them matters."""
    config = tiny_config(family, **overrides)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{_FAMILIES[family]}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random_values(name, parameter, generator))
    return model.eval()


def save_checkpoint(
    model: PreTrainedModel, folder: Path, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB"
) -> ModelConfig:
    """Write `config.json` and safetensors in this dtype; the model itself is left as it is."""
    weights = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=weights, max_shard_size=max_shard_size)
    return load_config(folder)


def tiny_checkpoint(folder: Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> ModelConfig:
    """A saved `tiny_model`, for tests that need some model and do not look at its weights."""
    return save_checkpoint(tiny_model(family, seed=seed, **overrides), folder)


def load_config(folder: Path) -> ModelConfig:
    """The configuration of the model in a folder."""
    return ModelConfig.load(str(folder))


def edit_config(folder: Path, *, remove: tuple[str, ...] = (), **changes: Any) -> ModelConfig:
    """Change fields of a saved `config.json`, as other tools or versions would have written it."""
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps({name: value for name, value in content.items() if name not in remove}))
    return load_config(folder)


def oracle_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """Transformers' float32 logits for a whole sequence: [T, V]."""
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].float()


def _random_values(name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    values = torch.randn(parameter.shape, generator=generator)
    if parameter.ndim > 1:
        return values * 1.5 / parameter.shape[-1] ** 0.5
    return values * 0.3 if name.endswith("bias") else 1 + 0.3 * values
