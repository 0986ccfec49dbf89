"""Names of the tensors of an encoder of images in a GGUF file (mmproj), in the checkpoints of Transformers."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.checkpoints.gguf.encoder_fields import has_old_names, heads_of, kind_of, tiles_of
from penstock.checkpoints.gguf.fields import Metadata
from penstock.loader.gguf.changes import MinusOne, PairsInHalves, concatenated, kernel_of_frames
from penstock.loader.gguf.names import TensorNames

_VISUAL, _TOWER, _PROJECTOR = "model.visual.", "model.vision_tower.", "model.multi_modal_projector."
_IDEFICS3 = "model.vision_model."
# Feed-forward networks without gate; both matrices have each other's names in old files.
_PLAIN, _PLAIN_OLD = ("mlp.fc1", "mlp.fc2"), ("mlp.fc2", "mlp.fc1")
# A tower's last norm, where a projector takes what is before it, and embeddings of tokens that the language model has.
_UNUSED_NORM = r"v\.post_ln\..*"
_UNUSED = rf"{_UNUSED_NORM}|v\.token_embd\.img_break|(model|v)\.image_newline"


def _in_layers(parts: Mapping[str, str]) -> dict[str, str]:
    return {f"v.{part}": name for part, name in parts.items()}


def _siglip(prefix: str, feed_forward: tuple[str, str]) -> dict[str, str]:
    return {
        "v.patch_embd": f"{prefix}embeddings.patch_embedding",
        "v.position_embd": f"{prefix}embeddings.position_embedding",
        "v.class_embd": f"{prefix}embeddings.class_embedding",
        "v.pre_ln": f"{prefix}pre_layrnorm",
        "v.post_ln": f"{prefix}post_layernorm",
        **_in_layers(
            {
                "attn_q": "self_attn.q_proj",
                "attn_k": "self_attn.k_proj",
                "attn_v": "self_attn.v_proj",
                "attn_out": "self_attn.out_proj",
                "ln1": "layer_norm1",
                "ln2": "layer_norm2",
                "ffn_up": feed_forward[0],
                "ffn_down": feed_forward[1],
            }
        ),
    }


def _pixtral(head_size: int) -> TensorNames:
    parts = {
        "v.patch_embd": f"{_TOWER}patch_conv",
        "v.pre_ln": f"{_TOWER}ln_pre",
        **_in_layers(
            {
                "attn_q": "attention.q_proj",
                "attn_k": "attention.k_proj",
                "attn_v": "attention.v_proj",
                "attn_out": "attention.o_proj",
                "ln1": "attention_norm",
                "ln2": "ffn_norm",
                "ffn_gate": "feed_forward.gate_proj",
                "ffn_up": "feed_forward.up_proj",
                "ffn_down": "feed_forward.down_proj",
            }
        ),
        "mm.1": f"{_PROJECTOR}linear_1",
        "mm.2": f"{_PROJECTOR}linear_2",
        "mm.input_norm": f"{_PROJECTOR}norm",
        "mm.patch_merger": f"{_PROJECTOR}patch_merger.merging_layer",
    }
    changes = {r"v\.blk\.\d+\.attn_[qk]\..*": PairsInHalves(head_size)}
    return TensorNames(parts, f"{_TOWER}transformer.layers", changes, repeated=_UNUSED)


def _qwen(feed_forward: tuple[str, str]) -> TensorNames:
    parts = {
        "v.patch_embd.weight": f"{_VISUAL}patch_embed.proj.weight",
        "v.patch_embd.weight.1": f"{_VISUAL}patch_embed.proj.weight",
        **_in_layers(
            {
                "attn_q": "attn.qkv",
                "attn_k": "attn.qkv",
                "attn_v": "attn.qkv",
                "attn_out": "attn.proj",
                "ln1": "norm1",
                "ln2": "norm2",
                "ffn_gate": "mlp.gate_proj",
                "ffn_up": feed_forward[0],
                "ffn_down": feed_forward[1],
            }
        ),
        "v.post_ln": f"{_VISUAL}merger.ln_q",
        "mm.0": f"{_VISUAL}merger.mlp.0",
        "mm.2": f"{_VISUAL}merger.mlp.2",
    }
    joins = {r".*\.patch_embed\.proj\.weight": kernel_of_frames, r".*\.attn\.qkv\..*": concatenated}
    return TensorNames(parts, f"{_VISUAL}blocks", joins=joins)


def encoder_names_of(encoder: Metadata) -> TensorNames:
    """Names of an encoder's tensors. Raises UnsupportedModel for a kind of projector that does not run."""
    kind = kind_of(encoder)
    feed_forward = _PLAIN_OLD if has_old_names(encoder) else _PLAIN
    if kind == "pixtral":
        return _pixtral(encoder.size(".vision.embedding_length") // heads_of(encoder))
    if kind == "qwen2vl_merger":
        return _qwen(feed_forward)
    if kind == "qwen2.5vl_merger":
        return _qwen(("mlp.up_proj", "mlp.down_proj"))
    if kind == "idefics3":
        projector = {"mm.model.fc": "model.connector.modality_projection.proj"}
        return TensorNames({**_siglip(_IDEFICS3, feed_forward), **projector}, f"{_IDEFICS3}encoder.layers")
    tower, layers = _siglip(_TOWER, feed_forward), f"{_TOWER}encoder.layers"
    if kind == "gemma3":
        projector = {
            "mm.input_projection.weight": f"{_PROJECTOR}mm_input_projection_weight",
            "mm.soft_emb_norm": f"{_PROJECTOR}mm_soft_emb_norm",
        }
        return TensorNames({**tower, **projector}, layers, {r"mm\.soft_emb_norm\.weight": MinusOne()})
    projector = {
        "mm.0": f"{_PROJECTOR}linear_1",
        "mm.2": f"{_PROJECTOR}linear_2",
    }
    if tiles_of(encoder):
        newlines = dict.fromkeys(("model.image_newline", "v.image_newline"), "model.image_newline")
        return TensorNames({**tower, **projector, **newlines}, layers, repeated=_UNUSED_NORM)
    return TensorNames({**tower, **projector}, layers, repeated=_UNUSED)
