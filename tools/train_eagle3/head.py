"""An EAGLE-3 head in plain torch: one layer that drafts tokens from the target's hidden states.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (2025),
arXiv:2503.01840. Modules are called as the tensors of such checkpoints are.

Shape suffixes: `B` rows of a batch, `T` tokens of a row, `A` hidden states of several layers side by side, `E` hidden
size, `H` heads, `D` head dim, `N` draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tools.train_demo.model import INIT_STD, RMSNorm
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

AUX_LAYERS = (2, 4, 5)
UNSURE = 0.25
Cache = list[tuple[Tensor, Tensor]]
Rotation = tuple[Tensor, Tensor]


class SelfAttention(nn.Module):
    """Grouped-query attention of the next token's embedding and the hidden state, side by side.

    Drafts are made at many places of a row at once. Each step of drafting adds a key and a value to each place; a place
    sees those of the first step, which come from the target's hidden states, up to itself, and of later steps its own:
    exactly what it would see if the row ended there.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_groups = config.num_attention_heads // config.num_key_value_heads
        self.head_dim = config.head_dim
        query_size, kv_size = (
            heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = nn.Linear(2 * config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def forward(self, x_BTE: Tensor, places_T: Tensor, rotation: Rotation, cache: Cache) -> Tensor:
        q, k, v = (
            projected(x_BTE).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projected in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (_rotated(heads, rotation) for heads in (q, k))
        cache.append((self._for_each_query(k), self._for_each_query(v)))
        mixed_BHTD = _attend(q * self.head_dim**-0.5, places_T, cache)
        out_BTE: Tensor = self.o_proj(mixed_BHTD.transpose(1, 2).flatten(2))
        return out_BTE

    def _for_each_query(self, heads: Tensor) -> Tensor:
        return heads.repeat_interleave(self.num_groups, dim=1)


def _rotated(x_BHTD: Tensor, rotation: Rotation) -> Tensor:
    cos_TD, sin_TD = rotation
    first, second = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * cos_TD + torch.cat((-second, first), dim=-1) * sin_TD


def _attend(q_BHTD: Tensor, places_T: Tensor, cache: Cache) -> Tensor:
    (first_k, first_v), *own = cache
    if not own:
        return F.scaled_dot_product_attention(q_BHTD, first_k, first_v, is_causal=True, scale=1.0)
    length = first_k.shape[2]
    is_later = torch.arange(length) > places_T.unsqueeze(-1)
    scores = [(q_BHTD @ first_k.mT).masked_fill(is_later, float("-inf"))]
    scores += [(q_BHTD * k).sum(-1, keepdim=True) for k, _ in own]
    weights = torch.cat(scores, dim=-1).softmax(dim=-1)
    mixed_BHTD = weights[..., :length] @ first_v
    for step, (_, v) in enumerate(own):
        mixed_BHTD = mixed_BHTD + weights[..., length + step].unsqueeze(-1) * v
    return mixed_BHTD


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BTE: Tensor) -> Tensor:
        down_BTE: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTE)) * self.up_proj(x_BTE))
        return down_BTE


class Midlayer(nn.Module):
    """The decoder layer: the residual stream is the hidden state; the embedding only enters through attention."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, embedded_BTE: Tensor, hidden_BTE: Tensor, places_T: Tensor, rotation: Rotation, cache: Cache
    ) -> Tensor:
        x = torch.cat((self.input_layernorm(embedded_BTE), self.hidden_norm(hidden_BTE)), dim=-1)
        attended_BTE = hidden_BTE + self.self_attn(x, places_T, rotation, cache)
        changed_BTE: Tensor = attended_BTE + self.mlp(self.post_attention_layernorm(attended_BTE))
        return changed_BTE


class Eagle3Head(nn.Module):
    """The head of a Llama. `target_ids` names the tokens that it can draft, in ascending order."""

    cos_TD: Tensor
    sin_TD: Tensor

    def __init__(self, config: LlamaConfig, target_ids: Sequence[int]) -> None:
        super().__init__()
        self.config = config
        self.target_ids = torch.tensor(target_ids)
        self.fc = nn.Linear(len(AUX_LAYERS) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Midlayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, len(target_ids), bias=False)
        theta = config.rope_parameters["rope_theta"]
        frequencies = theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles_TD = torch.outer(torch.arange(config.max_position_embeddings), frequencies).repeat(1, 2)
        self.register_buffer("cos_TD", angles_TD.cos(), persistent=False)
        self.register_buffer("sin_TD", angles_TD.sin(), persistent=False)

    def rollout(self, aux_BTA: Tensor, embedded_BUE: Tensor, num_steps: int, chosen_P: Tensor) -> Iterator[Tensor]:
        """The head's hidden states after each step of drafting: [B, T, E] at all places, then [B, P, E] at chosen ones.

        aux_BTA: the hidden states that enter the target's `AUX_LAYERS`. embedded_BUE: embeddings of the tokens from
        the second one on, U = T + num_steps - 1: a step takes the tokens that its drafts would be were they accepted.
        """
        places_T = torch.arange(aux_BTA.shape[1])
        hidden: Tensor = self.fc(aux_BTA)
        cache: Cache = []
        for step in range(num_steps):
            taken = places_T + step
            rotation = self.cos_TD[taken], self.sin_TD[taken]
            hidden = self.midlayer(embedded_BUE[:, taken], hidden, places_T, rotation, cache)
            yield hidden
            if step == 0:
                hidden, places_T = hidden[:, chosen_P], chosen_P

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the draft vocabulary, [..., N], from hidden states [..., E]."""
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits


def warm_head(target: LlamaForCausalLM, target_ids: Sequence[int]) -> Eagle3Head:
    """A head that starts from the target's last layer and output matrix, which it learns quicker from than from noise.

    Its first guesses are made unsure, since the layer is given what it has never seen.
    """
    head = Eagle3Head(target.config, target_ids)
    last = target.model.layers[-1]
    midlayer, size = head.midlayer, target.config.hidden_size
    with torch.no_grad():
        head.fc.weight.normal_(std=INIT_STD)
        midlayer.hidden_norm.weight.copy_(last.input_layernorm.weight)
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(midlayer.self_attn, name).weight.zero_()[:, size:] = getattr(last.self_attn, name).weight
        midlayer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
        midlayer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        midlayer.mlp.load_state_dict(last.mlp.state_dict())
        head.norm.weight.copy_(target.model.norm.weight * UNSURE)
        head.lm_head.weight.copy_(target.lm_head.weight[head.target_ids])
    return head


def export(head: Eagle3Head, folder: Path) -> None:
    """Write the head as a bfloat16 checkpoint of the kind that vLLM and SGLang load."""
    config = head.config
    weights = {name: weight.detach().to(torch.bfloat16) for name, weight in head.state_dict().items()}
    weights["d2t"] = head.target_ids - torch.arange(len(head.target_ids))
    weights["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, head.target_ids, True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    copied = (
        "attention_bias bos_token_id eos_token_id pad_token_id head_dim hidden_act hidden_size initializer_range "
        "intermediate_size max_position_embeddings mlp_bias model_type num_attention_heads num_key_value_heads "
        "rms_norm_eps rope_parameters vocab_size"
    )
    description = {name: getattr(config, name) for name in copied.split()} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(head.target_ids),
        "dtype": "bfloat16",
        # vLLM counts the layers that hidden states enter, SGLang those that they leave.
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in AUX_LAYERS],
            "use_aux_hidden_state": True,
        },
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "use_cache": True,
    }
    (folder / "config.json").write_text(json.dumps(description, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_head(folder: Path, config: LlamaConfig) -> Eagle3Head:
    """The head of a folder, in float32. config: the target's."""
    weights = load_file(folder / "model.safetensors")
    d2t = weights.pop("d2t")
    del weights["t2d"]
    head = Eagle3Head(config, (torch.arange(len(d2t)) + d2t).tolist())
    head.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return head.eval()
