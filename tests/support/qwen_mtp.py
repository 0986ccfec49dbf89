"""Tiny Qwen3-Next and Qwen3.5 models with an MTP layer, whose block is a layer of Transformers.

Suffixes: S tokens of a sequence, D hidden size.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from support.checkpoints import edit_config, save_checkpoint, tiny_model
from support.draft_heads import random_weights

_NUM_LAYERS = 4
# Makes embeddings a large part of the residual stream.
_EMBEDDING_SCALE = 8.0


def write_qwen_mtp(folder: Path, family: str, *, are_stacked: bool = False, **overrides: Any) -> PreTrainedModel:
    """Write a tiny model with an MTP layer; returns it with the MTP layer's block as a fifth.

    are_stacked: the experts of a layer lie in one tensor.
    """
    kinds = ["linear_attention", "full_attention"] * 2 + ["full_attention"]
    oracle = tiny_model(family, num_hidden_layers=_NUM_LAYERS + 1, layer_types=kinds, **overrides)
    save_checkpoint(oracle, folder)
    block, weights = f"model.layers.{_NUM_LAYERS}.", load_file(folder / "model.safetensors")
    named = {name.replace(block, "mtp.layers.0."): tensor for name, tensor in weights.items()}
    named |= qwen_mtp_weights(oracle.config.hidden_size)
    save_file(stacked_experts(named) if are_stacked else named, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, num_hidden_layers=_NUM_LAYERS, layer_types=kinds[:-1])
    return oracle


def write_agreeing_mtp(folder: Path, family: str, **overrides: Any) -> None:
    """Write a tiny model with an MTP layer, both of which mostly go on from the last token alone.

    family: also "qwen3.5", the language model of a multimodal checkpoint.
    """
    if family == "qwen3.5":
        write_agreeing_mtp(folder, "qwen3_5")
        make_multimodal(folder)
        return
    write_qwen_mtp(folder, family, **overrides)
    path = folder / "model.safetensors"
    weights = load_file(path)
    size = weights["model.norm.weight"].shape[0]
    weights["model.embed_tokens.weight"] *= _EMBEDDING_SCALE
    weights["mtp.fc.weight"] = torch.cat((_EMBEDDING_SCALE * torch.eye(size), torch.zeros(size, size)), 1)
    weights["mtp.pre_fc_norm_embedding.weight"] = torch.zeros(size)
    weights["mtp.norm.weight"] = weights["model.norm.weight"].clone()
    save_file(weights, path, {"format": "pt"})


def make_multimodal(folder: Path) -> None:
    """Rename a Qwen3.5 as the language model of a multimodal checkpoint, without the encoder's weights."""
    path = folder / "model.safetensors"
    named = {name.replace("model.", "model.language_model."): tensor for name, tensor in load_file(path).items()}
    save_file(named, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "vision_config": {}}
    (folder / "config.json").write_text(json.dumps({**whole, "text_config": config}))


def stacked_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the experts of each layer, gate and up side by side, as Qwen3.5 is published."""
    of_experts: dict[str, dict[str, list[Tensor]]] = {}
    kept = {}
    for name, tensor in sorted(
        weights.items(), key=lambda item: [int(x) if x.isdigit() else 0 for x in item[0].split(".")]
    ):
        found = re.fullmatch(r"(.*\.experts)\.\d+\.(gate|up|down)_proj\.weight", name)
        if found is None:
            kept[name] = tensor
        else:
            of_experts.setdefault(found[1], {}).setdefault(found[2], []).append(tensor)
    for prefix, parts in of_experts.items():
        gate, up, down = (torch.stack(parts[name]) for name in ("gate", "up", "down"))
        kept |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.down_proj": down}
    return kept


def qwen_mtp_weights(size: int, seed: int = 1) -> dict[str, Tensor]:
    """Weights of the MTP layer beside those of its block; norms are stored less one."""
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    weights = random_weights({f"mtp.{name}.weight": (size,) for name in norms}, seed)
    return {name: tensor - 1 for name, tensor in weights.items()} | random_weights(
        {"mtp.fc.weight": (size, 2 * size)}, seed
    )


def qwen_mtp_hidden(oracle: PreTrainedModel, embed_SD: Tensor, hidden_SD: Tensor) -> Tensor:
    """MTP hidden states of a sequence: fc([token, hidden]), a layer with attention, and a norm."""
    weights, model = qwen_mtp_weights(embed_SD.shape[1]), oracle.model
    norms = (f"mtp.{name}.weight" for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"))
    of_token, of_hidden, last = (weights[name] + 1 for name in norms)
    eps = oracle.config.rms_norm_eps

    def norm(x_SD: Tensor, weight_D: Tensor) -> Tensor:
        return x_SD * torch.rsqrt(x_SD.pow(2).mean(-1, keepdim=True) + eps) * weight_D

    both_SX = torch.cat([norm(embed_SD, of_token), norm(hidden_SD, of_hidden)], -1)
    x_BSD = F.linear(both_SX, weights["mtp.fc.weight"])[None]
    size = x_BSD.shape[1]
    mask = torch.full((size, size), float("-inf")).triu(1)[None, None]
    turns = model.rotary_emb(x_BSD, torch.arange(size)[None])
    x_BSD = model.layers[_NUM_LAYERS](x_BSD, position_embeddings=turns, attention_mask=mask)
    return norm(x_BSD[0], last)
