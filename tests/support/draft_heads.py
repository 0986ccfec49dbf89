"""Random checkpoints of draft heads in their published formats, and their reference in plain torch.

Suffixes: S tokens of a sequence, D hidden size, H query heads, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from penstock.attention import NO_CONTEXT
from penstock.models.causal_lm import CausalLM
from support.checkpoints import VOCAB_SIZE, edit_config, save_checkpoint, tiny_checkpoint, tiny_model

HIDDEN, INNER, HEADS, KV_HEADS, EPS, THETA = 64, 112, 4, 2, 1e-5, 10000.0
HEAD_SIZE = HIDDEN // HEADS
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 32,
    "rms_norm_eps": EPS,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
}


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of a head's target."""

    hidden: int = HIDDEN
    inner: int = INNER
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    vocab: int = VOCAB_SIZE

    def config(self) -> dict[str, Any]:
        """Fields of the head's `config.json`."""
        return {
            **CONFIG,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
        }


_TINY = HeadSizes()


def random_weights(sizes: Mapping[str, Sequence[int]], seed: int) -> dict[str, Tensor]:
    """Random weights, large enough to affect the output."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, size in sizes.items():
        values = torch.randn(*size, generator=generator)
        is_norm = "norm" in name
        made[name] = 1 + 0.3 * values if is_norm else values * (1.5 / size[-1] ** 0.5 if len(size) > 1 else 0.3)
    return made


def layer_sizes(
    prefix: str, *, sizes: HeadSizes = _TINY, input_size: int | None = None, bias: bool = False
) -> dict[str, Sequence[int]]:
    """Weight shapes of a decoder layer without its input norm. input_size: None for the hidden size."""
    hidden, inner, kv_size = sizes.hidden, sizes.inner, sizes.kv_heads * sizes.hidden // sizes.heads
    inputs = input_size or hidden
    shapes: dict[str, Sequence[int]] = {
        "self_attn.q_proj.weight": (hidden, inputs),
        "self_attn.k_proj.weight": (kv_size, inputs),
        "self_attn.v_proj.weight": (kv_size, inputs),
        "self_attn.o_proj.weight": (hidden, hidden),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if bias:
        shapes |= {
            f"self_attn.{name}_proj.bias": (size,) for name, size in (("q", hidden), ("k", kv_size), ("v", kv_size))
        }
    return {prefix + name: shape for name, shape in shapes.items()}


def write_head(folder: Path, weights: Mapping[str, Tensor], sizes: HeadSizes = _TINY, **config: Any) -> Path:
    """Write a checkpoint with these additional `config.json` fields."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**sizes.config(), **config}))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def eagle_weights(
    seed: int = 1, *, sizes: HeadSizes = _TINY, prefix: str = "", has_input_norm: bool = False, bias: bool = False
) -> dict[str, Tensor]:
    hidden = sizes.hidden
    shapes: dict[str, Sequence[int]] = {
        "fc.weight": (hidden, 2 * hidden),
        **layer_sizes("layers.0.", sizes=sizes, bias=bias),
    }
    if bias:
        shapes["fc.bias"] = (hidden,)
    if has_input_norm:
        shapes["layers.0.input_layernorm.weight"] = (hidden,)
    return {prefix + name: tensor for name, tensor in random_weights(shapes, seed).items()}


def eagle3_weights(
    seed: int = 1, *, sizes: HeadSizes = _TINY, layer: str = "midlayer.", num_tokens: int = 40
) -> dict[str, Tensor]:
    hidden = sizes.hidden
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        **layer_sizes(layer, sizes=sizes, input_size=2 * hidden),
        f"{layer}input_layernorm.weight": (hidden,),
        f"{layer}hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (num_tokens, hidden),
    }
    weights = random_weights(shapes, seed)
    ids = torch.randperm(sizes.vocab, generator=torch.Generator().manual_seed(seed))[:num_tokens].sort().values
    weights["d2t"] = ids - torch.arange(num_tokens)
    weights["t2d"] = torch.zeros(sizes.vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return weights


def mtp_weights(seed: int = 1, *, sizes: HeadSizes = _TINY) -> dict[str, Tensor]:
    prefix = "model.mtp_layers.0."
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm")
    shapes = {
        f"{prefix}input_proj.weight": (HIDDEN, 2 * HIDDEN),
        **{f"{prefix}{name}.weight": (HIDDEN,) for name in norms},
        **layer_sizes(prefix, sizes=sizes, bias=True),
    }
    return random_weights(shapes, seed)


def write_mimo(folder: Path, *, num_key_value_heads: int = KV_HEADS, **overrides: Any) -> Path:
    """Write a tiny MiMo: Transformers' Qwen2 with an MTP layer."""
    tiny_checkpoint(folder, "qwen2", num_key_value_heads=num_key_value_heads, **overrides)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {**weights, **mtp_weights(sizes=HeadSizes(kv_heads=num_key_value_heads))},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    edit_config(folder, architectures=["MiMoForCausalLM"], model_type="mimo", num_nextn_predict_layers=1)
    return folder


def eagle_hidden(weights: Mapping[str, Tensor], embed_SD: Tensor, hidden_SD: Tensor) -> Tensor:
    """EAGLE's next hidden states, from those of the target and the tokens after them (section 4.1, figure 6)."""
    x_SD = F.linear(torch.cat([embed_SD, hidden_SD], -1), weights["fc.weight"], weights.get("fc.bias"))
    norm = weights.get("layers.0.input_layernorm.weight")
    normed_SD = x_SD if norm is None else _rms(x_SD, norm)
    x_SD = x_SD + _attention(weights, "layers.0.", normed_SD)
    return x_SD + _mlp(weights, "layers.0.", x_SD)


def eagle3_fused(weights: Mapping[str, Tensor], aux: Sequence[Tensor]) -> Tensor:
    """Fuse low, middle and high features (section 3.1)."""
    return F.linear(torch.cat(list(aux), -1), weights["fc.weight"])


def eagle3_hidden(
    weights: Mapping[str, Tensor],
    embed_SD: Tensor,
    fused_SD: Tensor,
    *,
    layer: str = "midlayer.",
    norm_before_residual: bool = False,
) -> Tensor:
    normed_SD = _rms(fused_SD, weights[f"{layer}hidden_norm.weight"])
    both_SX = torch.cat([_rms(embed_SD, weights[f"{layer}input_layernorm.weight"]), normed_SD], -1)
    x_SD = (normed_SD if norm_before_residual else fused_SD) + _attention(weights, layer, both_SX)
    return x_SD + _mlp(weights, layer, x_SD)


def eagle3_logits(weights: Mapping[str, Tensor], hidden_SD: Tensor) -> Tensor:
    """EAGLE-3 logits in the target's vocabulary."""
    own_SX = F.linear(_rms(hidden_SD, weights["norm.weight"]), weights["lm_head.weight"])
    logits_SV = torch.full((len(own_SX), VOCAB_SIZE), float("-inf"))
    for number, offset in enumerate(weights["d2t"].tolist()):
        logits_SV[:, number + offset] = own_SX[:, number]
    return logits_SV


def mtp_hidden(weights: Mapping[str, Tensor], embed_SD: Tensor, hidden_SD: Tensor) -> Tensor:
    """MiMo's MTP hidden states (section 2.3, figure 3)."""
    prefix = "model.mtp_layers.0."
    token_SD = _rms(embed_SD, weights[f"{prefix}token_layernorm.weight"])
    before_SD = _rms(hidden_SD, weights[f"{prefix}hidden_layernorm.weight"])
    x_SD = F.linear(torch.cat([before_SD, token_SD], -1), weights[f"{prefix}input_proj.weight"])
    x_SD = x_SD + _attention(weights, prefix, _rms(x_SD, weights[f"{prefix}input_layernorm.weight"]))
    x_SD = x_SD + _mlp(weights, prefix, x_SD)
    return _rms(x_SD, weights[f"{prefix}final_layernorm.weight"])


def _rms(x_SD: Tensor, weight_D: Tensor) -> Tensor:
    return x_SD * torch.rsqrt(x_SD.pow(2).mean(-1, keepdim=True) + EPS) * weight_D


def _mlp(weights: Mapping[str, Tensor], prefix: str, x_SD: Tensor) -> Tensor:
    x_SD = _rms(x_SD, weights[f"{prefix}post_attention_layernorm.weight"])
    gate, up = (F.linear(x_SD, weights[f"{prefix}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return F.linear(F.silu(gate) * up, weights[f"{prefix}mlp.down_proj.weight"])


def _attention(weights: Mapping[str, Tensor], prefix: str, x_SX: Tensor) -> Tensor:
    """Causal attention with rotary positions from 0 on."""
    size = len(x_SX)
    query, key, value = (
        F.linear(
            x_SX, weights[f"{prefix}self_attn.{name}_proj.weight"], weights.get(f"{prefix}self_attn.{name}_proj.bias")
        ).view(size, -1, HEAD_SIZE)
        for name in ("q", "k", "v")
    )
    query, key = _turned(query), _turned(key)
    key, value = (heads.repeat_interleave(HEADS // KV_HEADS, 1) for heads in (key, value))
    scores_HSS = torch.einsum("qhd,khd->hqk", query, key) / HEAD_SIZE**0.5
    scores_HSS = scores_HSS.masked_fill(torch.ones(size, size, dtype=torch.bool).triu(1), float("-inf"))
    mixed_SX = torch.einsum("hqk,khd->qhd", scores_HSS.softmax(-1), value).flatten(1)
    return F.linear(mixed_SX, weights[f"{prefix}self_attn.o_proj.weight"])


def _turned(heads_SHD: Tensor) -> Tensor:
    inv_freq = THETA ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
    angles = torch.outer(torch.arange(len(heads_SHD)), inv_freq)[:, None]
    first, second = heads_SHD.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def deepseek_mtp_weights(seed: int = 1) -> dict[str, Tensor]:
    """Weights of the MTP layer of a DeepSeek V3 with two layers, beside those of its block."""
    names = ("enorm", "hnorm", "shared_head.norm")
    sizes = {f"model.layers.2.{name}.weight": (HIDDEN,) for name in names}
    return random_weights({**sizes, "model.layers.2.eh_proj.weight": (HIDDEN, 2 * HIDDEN)}, seed)


def write_deepseek_mtp(folder: Path, **overrides: Any) -> PreTrainedModel:
    """Write a tiny DeepSeek V3 of two layers with an MTP layer; returns it with the MTP layer's block as a third."""
    oracle = tiny_model("deepseek_v3", num_hidden_layers=3, **overrides)
    save_checkpoint(oracle, folder)
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    weights = load_file(folder / "model.safetensors")
    weights |= {f"model.layers.2.{name}.weight": weights[f"{of}.weight"].clone() for name, of in copies.items()}
    save_file({**weights, **deepseek_mtp_weights()}, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, num_hidden_layers=2, num_nextn_predict_layers=1)
    return oracle


def deepseek_mtp_hidden(oracle: PreTrainedModel, embed_SD: Tensor, hidden_SD: Tensor) -> Tensor:
    """DeepSeek V3's MTP hidden states (equations 21 and 22), with Transformers' layer as the block."""
    weights = deepseek_mtp_weights()
    enorm, hnorm, norm = (weights[f"model.layers.2.{name}.weight"] for name in ("enorm", "hnorm", "shared_head.norm"))
    both_SX = torch.cat([_rms(embed_SD, enorm), _rms(hidden_SD, hnorm)], -1)
    x_BSD = F.linear(both_SX, weights["model.layers.2.eh_proj.weight"])[None]
    size = x_BSD.shape[1]
    mask = torch.full((size, size), float("-inf")).triu(1)[None, None]
    turns = oracle.model.rotary_emb(x_BSD, torch.arange(size)[None])
    (x_SD,) = oracle.model.layers[2](x_BSD, position_embeddings=turns, attention_mask=mask)
    return _rms(x_SD, norm)


def logits_of(model: CausalLM) -> Callable[[Tensor], Tensor]:
    """The model's logits of hidden states, without step inputs."""
    return partial(model.compute_logits, context=NO_CONTEXT)
