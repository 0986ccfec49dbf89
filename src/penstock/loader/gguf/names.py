"""Names of a GGUF file's tensors in the checkpoints of Transformers, and the changes to their values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penstock.checkpoints.gguf.container import TensorInfo
from penstock.checkpoints.gguf.fields import Metadata
from penstock.checkpoints.gguf.recurrent_fields import is_bamba, num_target_layers
from penstock.checkpoints.json_file import clipped
from penstock.errors import CheckpointError, UnsupportedModel
from penstock.loader.gguf.changes import (
    UNCHANGED,
    ByKeyHead,
    Change,
    GroupedHeads,
    InTurn,
    Join,
    LogOfNegative,
    MinusOne,
    PairsInHalves,
    Transposed,
    concatenated,
    latent_projection,
)

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
# A star stands for the number of an expert: tensors of all experts have it as their first dimension.
_EXPERTS = {
    **_DECODER,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_GPT_OSS = {
    **_EXPERTS,
    "ffn_gate_inp": "mlp.router",
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
}
_QWEN2_MOE = {
    **_EXPERTS,
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_DEEPSEEK2 = {
    **_EXPERTS,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj",
    "attn_v_b": "self_attn.kv_b_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
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
_LFM2 = {
    **_DECODER,
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.embedding_norm",
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.*.w1",
    "ffn_up_exps": "feed_forward.experts.*.w3",
    "ffn_down_exps": "feed_forward.experts.*.w2",
}


def _state_space(module: str) -> dict[str, str]:
    """State-space layers, as a module of their layer with this name."""
    return {
        "ssm_in": f"{module}.in_proj",
        "ssm_conv1d": f"{module}.conv1d",
        "ssm_dt.bias": f"{module}.dt_bias",
        "ssm_a": f"{module}.A_log",
        "ssm_d": f"{module}.D",
        "ssm_norm": f"{module}.norm",
        "ssm_out": f"{module}.out_proj",
    }


def _selective(module: str) -> dict[str, str]:
    """Layers of Mamba, likewise."""
    return {**_state_space(module), "ssm_x": f"{module}.x_proj", "ssm_dt": f"{module}.dt_proj"} | {
        "ssm_dt.bias": f"{module}.dt_proj.bias"
    }


_FALCON_H1 = {
    **_DECODER,
    **_state_space("mamba"),
    "output_norm": "model.final_layernorm",
    # This norm alone is stored without the kind of its tensor.
    "ffn_norm": "pre_ff_layernorm.weight",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
_BACKBONE = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
    "attn_norm": "norm",
}
# Layers of Bamba and Jamba.
_COMMON = {
    **_DECODER,
    "output_norm": "model.final_layernorm",
    "ffn_norm": "pre_ff_layernorm",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
_BAMBA = {**_COMMON, **_state_space("mamba")}
_JAMBA = {
    **_COMMON,
    **_selective("mamba"),
    "ssm_dt_norm": "mamba.dt_layernorm",
    "ssm_b_norm": "mamba.b_layernorm",
    "ssm_c_norm": "mamba.c_layernorm",
    "ffn_gate_inp": "feed_forward.router",
    "ffn_gate_exps": "feed_forward.experts.*.gate_proj",
    "ffn_up_exps": "feed_forward.experts.*.up_proj",
    "ffn_down_exps": "feed_forward.experts.*.down_proj",
}
_NEMOTRON_H = {
    **_state_space("mixer"),
    "token_embd": "model.embeddings",
    "output_norm": "model.norm_f",
    "output": "lm_head",
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.*.up_proj",
    "ffn_down_exps": "mixer.experts.*.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_DELTA = {
    **_QWEN2_MOE,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
# Files of some months have the two parts of the projection as one, in the order of checkpoints.
_DELTA_BY_KEY_HEAD = {
    **_DELTA,
    **dict.fromkeys(("attn_qkv", "attn_gate", "ssm_in"), "linear_attn.in_proj_qkvz"),
    "ssm_ba": "linear_attn.in_proj_ba",
}
# The layer for more tokens of Qwen3.5.
_MTP = {
    **{part: f"mtp.layers.0.{module}" for part, module in _QWEN2_MOE.items()},
    "post_attention_norm": "mtp.layers.0.post_attention_layernorm",
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
}
# Norms of Qwen3-Next and Qwen3.5 that are stored less one in checkpoints.
_NORMS = r"(?!.*\.ssm_norm).*norm\.weight"
_RECURRENT = {
    "falcon-h1": _FALCON_H1,
    "jamba": _JAMBA,
    "lfm2": _LFM2,
    "lfm2moe": _LFM2,
    "mamba": {**_BACKBONE, **_selective("mixer")},
    "mamba2": {**_BACKBONE, **_state_space("mixer")},
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
}
_LAYERS = dict.fromkeys(("mamba", "mamba2"), "backbone.layers")
# Files have the pairs of queries and keys side by side, as Llama's: in both alike, and nothing rotates them.
_GRANITE_HYBRID = {
    **_DECODER,
    **_state_space("mamba"),
    # The two halves of one matrix.
    "ffn_gate": "shared_mlp.input_linear",
    "ffn_up": "shared_mlp.input_linear",
    "ffn_down": "shared_mlp.output_linear",
    "ffn_gate_shexp": "shared_mlp.input_linear",
    "ffn_up_shexp": "shared_mlp.input_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.experts.*.gate_proj",
    "ffn_up_exps": "block_sparse_moe.experts.*.up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.*.down_proj",
}
_CONVOLUTION = re.compile(r".*\.(ssm_conv1d|shortconv\.conv)\.weight")
_COLUMN, _GROUPED = re.compile(r".*\.ssm_[ad]"), re.compile(r".*\.ssm_norm\.weight")
_ONE_ROW = ".ffn_gate_inp_shexp.weight"
_MIXTURES = {"qwen2moe": _QWEN2_MOE, "qwen3moe": _EXPERTS, "gpt-oss": _GPT_OSS, "deepseek2": _DEEPSEEK2}
_LAYER = re.compile(r"(?P<tower>v\.)?blk\.(?P<layer>\d+)\.(?P<part>.+)")
# Beginnings of the names of an encoder's tensors.
_OF_ENCODERS = ("v.", "mm.", "model.image_newline")
# Factors of rotary frequencies, which are in the configuration.
_NOT_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names and changes of one architecture. parts: by module name in GGUF, or by that of a tensor.

    layers: prefix of a layer's modules; empty for parts with whole names. changes: by regular expression for names
    in GGUF. repeated: regular expression for tensors whose values are in others too. joins: by regular expression for
    names in Transformers, what makes such a tensor of several in the file. A name with a star is of a tensor for each
    index of the first dimension.
    encoder: names of the tensors of an encoder of images beside the language model. drafting: of those of a layer for
    more tokens (MTP), and its number.
    """

    parts: Mapping[str, str]
    layers: str = "model.layers"
    changes: Mapping[str, Change] = field(default_factory=dict)
    repeated: str = r"(?!)"
    joins: Mapping[str, Join] = field(default_factory=lambda: {r".*\.kv_b_proj\.weight": latent_projection})
    encoder: TensorNames | None = None
    drafting: tuple[int, TensorNames] | None = None

    def of(self, stored: str) -> TensorNames:
        """The names that have a tensor: these, the encoder's, or those of a layer for more tokens."""
        if self.encoder is not None and stored.startswith(_OF_ENCODERS):
            return self.encoder
        if self.drafting is not None and stored.startswith(f"blk.{self.drafting[0]}."):
            return self.drafting[1]
        return self

    def shaped(self, tensor: TensorInfo) -> TensorInfo:
        """The tensor's description in the shape of Transformers.

        Files may have a matrix of one output as a vector, and convolutions without the dimension of their one input.
        Parameters of heads may be matrices in files.
        """
        if len(tensor.shape) == 1 and tensor.name.endswith(_ONE_ROW):
            return replace(tensor, shape=(1, *tensor.shape))
        if len(tensor.shape) != 2:
            return tensor
        if _CONVOLUTION.fullmatch(tensor.name):
            return replace(tensor, shape=(tensor.shape[0], 1, tensor.shape[1]))
        is_column = _COLUMN.fullmatch(tensor.name) is not None and tensor.shape[1] == 1
        is_vector = is_column or _GROUPED.fullmatch(tensor.name) is not None
        return replace(tensor, shape=(math.prod(tensor.shape),)) if is_vector else tensor

    def name(self, stored: str) -> str | None:
        """Name in Transformers; None for a tensor that is no weight, `stored` itself for an unknown one."""
        if stored in _NOT_WEIGHTS or re.fullmatch(self.repeated, stored):
            return None
        match = _LAYER.fullmatch(stored)
        tensor = _part_of(stored)
        module, _, kind = tensor.rpartition(".")
        if module not in self.parts and tensor not in self.parts:
            return stored
        prefix = f"{self.layers}.{match['layer']}." if match and self.layers else ""
        return prefix + self.parts.get(tensor, f"{self.parts.get(module)}.{kind}")

    def change(self, stored: str) -> Change:
        """Change of a tensor's values and shape."""
        return next((change for pattern, change in self.changes.items() if re.fullmatch(pattern, stored)), UNCHANGED)

    def join(self, name: str) -> Join:
        """Function that joins the parts of a tensor, by its name in Transformers.

        Raises CheckpointError for a tensor that has no parts.
        """
        found = next((join for pattern, join in self.joins.items() if re.fullmatch(pattern, name)), None)
        if found is None:
            raise CheckpointError(f"The files have {clipped(name)} several times. Download them again.")
        return found

    def order(self, stored: str) -> int:
        """Place of a tensor among those that are joined."""
        part = _part_of(stored)
        return list(self.parts).index(part if part in self.parts else part.rpartition(".")[0])


def _part_of(stored: str) -> str:
    """Name of a tensor without its layer."""
    match = _LAYER.fullmatch(stored)
    return stored if match is None else (match["tower"] or "") + match["part"]


def names_of(metadata: Metadata) -> TensorNames:
    """Return the names of a file's architecture. Raises UnsupportedModel for one without names here."""
    architecture = metadata.architecture
    if architecture in ("qwen2", "qwen2vl", "qwen3"):
        return TensorNames(_DECODER)
    if architecture in _MIXTURES:
        # Files of some months have the latents' projection whole and in two parts.
        is_whole = "blk.0.attn_kv_b.weight" in metadata.tensors
        return TensorNames(_MIXTURES[architecture], repeated=r"blk\.\d+\.attn_[kv]_b\.weight" if is_whole else r"(?!)")
    if architecture in _RECURRENT:
        changes = {r"blk\.\d+\.ssm_a": LogOfNegative()}
        return TensorNames(_RECURRENT[architecture], layers=_LAYERS.get(architecture, "model.layers"), changes=changes)
    if architecture == "granitehybrid" and is_bamba(metadata):
        of_bamba = {r"blk\.\d+\.ssm_a": LogOfNegative(), **_pairs(metadata, metadata.size(".embedding_length"))}
        return TensorNames(_BAMBA, changes=of_bamba)
    if architecture == "granitehybrid":
        of_hybrid: dict[str, Change] = {r"blk\.\d+\.ssm_a": LogOfNegative()}
        return TensorNames(_GRANITE_HYBRID, changes=of_hybrid, joins={r".*\.input_linear\.weight": concatenated})
    if architecture == "qwen3next":
        join = ByKeyHead(metadata.size(".ssm.group_count"), metadata.size(".ssm.state_size"))
        of_delta: dict[str, Change] = {_NORMS: MinusOne(), r"blk\.\d+\.ssm_a": LogOfNegative()}
        joins = {r".*\.in_proj_qkvz\.weight": join}
        return _with_drafting(metadata, TensorNames(_DELTA_BY_KEY_HEAD, changes=of_delta, joins=joins))
    if architecture in ("qwen35", "qwen35moe"):
        return _with_drafting(metadata, TensorNames(_DELTA, changes=_changes_of_heads(metadata)))
    if architecture == "olmo2":
        return TensorNames(_FOUR_NORMS)
    if architecture == "llama":
        return TensorNames(_DECODER, changes=_pairs(metadata, metadata.num_rows("blk.0.attn_q.weight")))
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


def _with_drafting(metadata: Metadata, names: TensorNames) -> TensorNames:
    """Names of a model with those of its layer for more tokens, which has the same changes."""
    return replace(names, drafting=(num_target_layers(metadata), replace(names, parts=_MTP, layers="")))


def _pairs(metadata: Metadata, num_features: int) -> dict[str, Change]:
    """Changes of queries and keys of Llama. num_features: of all query heads."""
    of_queries = num_features // metadata.size(".attention.head_count")
    head_size = metadata.size(".attention.key_length", max(of_queries, 1))
    return {r"blk\.\d+\.attn_[qk]\..*": PairsInHalves(head_size)}


def _changes_of_heads(metadata: Metadata) -> dict[str, Change]:
    """Changes of Qwen3.5."""
    num_keys, num_heads = metadata.size(".ssm.group_count"), metadata.size(".ssm.time_step_rank")
    rows, size = 2 * num_keys * metadata.size(".ssm.state_size"), metadata.size(".ssm.inner_size") // num_heads
    heads = GroupedHeads(num_keys, num_heads // num_keys, 1)
    features = replace(heads, size=size)
    layer = r"blk\.\d+\."
    return {
        _NORMS: MinusOne(),
        rf"{layer}ssm_a": InTurn(LogOfNegative(), heads),
        rf"{layer}(ssm_dt\.bias|ssm_(alpha|beta)\.weight)": heads,
        rf"{layer}attn_gate\.weight": features,
        rf"{layer}(attn_qkv|ssm_conv1d)\.weight": replace(features, first=rows),
        rf"{layer}ssm_out\.weight": replace(features, dim=1),
    }
