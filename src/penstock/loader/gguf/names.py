"""Names of a GGUF file's tensors in the checkpoints of Transformers, and the changes to their values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.config.gguf.fields import Metadata
from penstock.errors import UnsupportedModel
from penstock.loader.gguf.changes import UNCHANGED, Change, MinusOne, PairsInHalves, Transposed

_DECODER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FOUR_NORMS = {
    **_DECODER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_LAYER = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>.+)")
# Factors of rotary frequencies, which are in the configuration.
_NOT_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names and changes of one architecture. parts: by module name in GGUF. layers: prefix of a layer's modules.

    changes: by regular expression for names in GGUF.
    """

    parts: Mapping[str, str]
    layers: str = "model.layers"
    changes: Mapping[str, Change] = field(default_factory=dict)

    def name(self, stored: str) -> str | None:
        """Name in Transformers; None for a tensor that is no weight, `stored` itself for an unknown one."""
        if stored in _NOT_WEIGHTS:
            return None
        match = _LAYER.fullmatch(stored)
        module, _, kind = (match["part"] if match else stored).rpartition(".")
        if module not in self.parts:
            return stored
        prefix = f"{self.layers}.{match['layer']}." if match else ""
        return f"{prefix}{self.parts[module]}.{kind}"

    def change(self, stored: str) -> Change:
        """Change of a tensor's values and shape."""
        return next((change for pattern, change in self.changes.items() if re.fullmatch(pattern, stored)), UNCHANGED)


def names_of(metadata: Metadata) -> TensorNames:
    """Return the names of a file's architecture. Raises UnsupportedModel for one without names here."""
    architecture = metadata.architecture
    if architecture in ("qwen2", "qwen3"):
        return TensorNames(_DECODER)
    if architecture == "olmo2":
        return TensorNames(_FOUR_NORMS)
    if architecture == "llama":
        heads = metadata.required(".attention.head_count", int)
        of_queries = metadata.shape("blk.0.attn_q.weight")[0] // max(heads, 1)
        head_size = metadata.get(".attention.key_length", int, of_queries)
        return TensorNames(_DECODER, changes={r"blk\.\d+\.attn_[qk]\..*": PairsInHalves(head_size)})
    if architecture == "phi3":
        return TensorNames({**_DECODER, "ffn_up": "mlp.gate_up_proj"})
    if architecture == "starcoder2":
        return TensorNames({**_DECODER, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"})
    if architecture == "gpt2":
        matrices = r"blk\.\d+\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight"
        return TensorNames(_GPT2, layers="transformer.h", changes={matrices: Transposed()})
    if architecture in ("gemma2", "gemma3"):
        return TensorNames(_FOUR_NORMS, changes={r".*norm\.weight": MinusOne()})
    raise UnsupportedModel(
        f"{metadata.name} has general.architecture={architecture!r}, whose tensors have no names here. Take the "
        "safetensors of the model."
    )
