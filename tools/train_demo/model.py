"""The Llama architecture in a page of plain torch, fast to train on a CPU, and its export to Transformers.

Shape suffixes: `B` rows of a batch, `T` tokens of a row, `H` query heads, `K` KV heads, `D` head dim, `E` hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

INIT_STD = 0.02


@dataclass(frozen=True)
class ModelShape:
    """The sizes of the model, with Llama's meanings."""

    vocab_size: int
    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 6
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    max_length: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learnt scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x_BTE: Tensor) -> Tensor:
        return F.rms_norm(x_BTE, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions; query, key and value come from one matrix."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        self.head_dim = shape.head_dim
        self.qkv = nn.Linear(shape.hidden_size, sum(self.heads) * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, x_BTE: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        num_heads, num_kv_heads, _ = self.heads
        qkv = self.qkv(x_BTE).unflatten(-1, (sum(self.heads), self.head_dim)).transpose(1, 2)
        qk, v = qkv.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
        first, second = qk.chunk(2, dim=-1)
        qk = qk * cos_TD + torch.cat((-second, first), dim=-1) * sin_TD
        q, k = qk.split([num_heads, num_kv_heads], dim=1)
        mixed_BHTD = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out_BTE: Tensor = self.out(mixed_BHTD.transpose(1, 2).flatten(2))
        return out_BTE


class MLP(nn.Module):
    """SwiGLU; gate and up come from one matrix."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_up = nn.Linear(shape.hidden_size, 2 * shape.intermediate_size, bias=False)
        self.down = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x_BTE: Tensor) -> Tensor:
        gate, up = self.gate_up(x_BTE).chunk(2, dim=-1)
        down_BTE: Tensor = self.down(F.silu(gate) * up)
        return down_BTE


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.attention = Attention(shape)
        self.mlp_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x_BTE: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        attended_BTE = x_BTE + self.attention(self.attention_norm(x_BTE), cos_TD, sin_TD)
        changed_BTE: Tensor = attended_BTE + self.mlp(self.mlp_norm(attended_BTE))
        return changed_BTE


class TrainingLlama(nn.Module):
    """A Llama whose output matrix is its embedding matrix."""

    cos_TD: Tensor
    sin_TD: Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles_TD = torch.outer(torch.arange(shape.max_length), frequencies).repeat(1, 2)
        self.register_buffer("cos_TD", angles_TD.cos(), persistent=False)
        self.register_buffer("sin_TD", angles_TD.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=INIT_STD / (2 * shape.num_layers) ** 0.5 if residual else INIT_STD)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Final hidden states, [B, T, E], before the output matrix."""
        cos_TD, sin_TD = self.cos_TD[: ids_BT.shape[1]], self.sin_TD[: ids_BT.shape[1]]
        x_BTE: Tensor = self.embedding(ids_BT)
        for layer in self.layers:
            x_BTE = layer(x_BTE, cos_TD, sin_TD)
        hidden_BTE: Tensor = self.norm(x_BTE)
        return hidden_BTE

    def losses(self, ids_BT: Tensor, targets_BT: Tensor, wanted_BT: Tensor) -> Tensor:
        """Cross-entropy in nats of each wanted token, [number of wanted tokens], row by row."""
        logits_NV = F.linear(self(ids_BT)[wanted_BT], self.embedding.weight)
        return F.cross_entropy(logits_NV, targets_BT[wanted_BT], reduction="none")


def export(model: TrainingLlama, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The same model as a bfloat16 `LlamaForCausalLM`, ready for `save_pretrained`."""
    shape = model.shape
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_length,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        rms_norm_eps=shape.norm_eps,
        initializer_range=INIT_STD,
        tie_word_embeddings=True,
        **special,
    )
    exported = LlamaForCausalLM(config)
    exported.load_state_dict(_transformers_weights(model), strict=True)
    exported.generation_config = GenerationConfig(**special)
    return exported.to(torch.bfloat16).eval()


def _transformers_weights(model: TrainingLlama) -> dict[str, Tensor]:
    """The weights under the names that Transformers uses, with the fused matrices taken apart."""
    shape = model.shape
    head_rows = [heads * shape.head_dim for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
    weights = {
        "model.embed_tokens.weight": model.embedding.weight,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.embedding.weight,
    }
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        q, k, v = layer.attention.qkv.weight.split(head_rows)
        gate, up = layer.mlp.gate_up.weight.chunk(2)
        of_layer = {
            "input_layernorm": layer.attention_norm.weight,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.attention.out.weight,
            "post_attention_layernorm": layer.mlp_norm.weight,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.mlp.down.weight,
        }
        weights |= {f"model.layers.{index}.{name}.weight": weight for name, weight in of_layer.items()}
    return {name: weight.detach().clone() for name, weight in weights.items()}
