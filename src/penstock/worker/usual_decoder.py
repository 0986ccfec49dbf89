"""A model of Transformers without a table of its own, taken for a decoder of usual layers where its headers show one.

Every tensor of the checkpoint must be one that such a decoder has, so that nothing is overlooked that would make it
another: attention and networks are as their matrices say, and `config.json` says what those cannot. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.config import ModelConfig
from penstock.errors import ModelError, UnsupportedFeature
from penstock.loader.headers import TensorHeader
from penstock.models.config_fields import ConfigFields
from penstock.models.registry import supported_architectures
from penstock.models.shape import ModelShape, read_shape
from penstock.worker.class_source import ClassSource, read_class_source
from penstock.worker.estimate import is_no_weight
from penstock.worker.transformers_estimate import (
    ACTIVATION_TENSORS,
    NARROW_LIKE_COHERE,
    RMS_NORM,
    WHOLE_HEADS,
    LayerMoments,
    Moment,
)
from penstock.worker.transformers_shape import Experts, TransformersShape, read_activation, read_rotated_share

_LAYER = re.compile(r"(?:\w+\.)*?layers\.(\d+)\.(.+)")
# What the tensors of a layer are, by name. Those that are only allowed, and say nothing, have the role "".
_ROLES = tuple(
    (role, re.compile(pattern))
    for role, pattern in (
        ("query", r"self_attn\.q_proj\.weight"),
        ("key", r"self_attn\.k_proj\.weight"),
        ("value", r"self_attn\.v_proj\.weight"),
        ("joined", r"(self_attn|attention)\.(qkv_proj|query_key_value)\.weight"),
        ("output", r"(self_attn|attention)\.(o_proj|dense|out_proj)\.weight"),
        ("gate", r"mlp\.gate_proj\.weight"),
        ("up", r"mlp\.(up_proj|fc1|c_fc|dense_h_to_4h)\.weight"),
        ("gate and up", r"mlp\.gate_up_proj\.weight"),
        ("down", r"mlp\.(down_proj|fc2|c_proj|dense_4h_to_h)\.weight"),
        ("router", r"(mlp|block_sparse_moe)\.(gate|router|router\.gate|router\.layer)\.weight"),
        (
            "router's bias",
            r"(mlp|block_sparse_moe|moe)\.((gate|router|experts)\.)?(e_score_correction_bias|expert_bias)",
        ),
        ("", r"(mlp|block_sparse_moe)\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight"),
        ("expert", r"(mlp|block_sparse_moe)\.experts\.\d+\.(down_proj|w2)\.weight"),
        ("", r"(mlp|block_sparse_moe)\.(experts\.(gate_up_proj|fc1)(\.weight)?|input_linear\.weight)"),
        ("experts", r"(mlp|block_sparse_moe)\.(experts\.(down_proj|fc2)(\.weight)?|output_linear\.weight)"),
        ("", r"mlp\.shared_(experts?|mlp)\.(gate_proj|up_proj)\.weight"),
        ("shared", r"mlp\.shared_(experts?|mlp)\.down_proj\.weight"),
        ("", r"(self_attn|attention|mlp)\.(\w+_proj|fc[12]|c_\w+|dense\w*|query_key_value)\.bias"),
        ("", r"mlp\.act_fn\.(alpha_n|alpha_p|beta|eps)"),
        ("head norm", r"self_attn\.(q|k|query|key)_(layer)?norm\.(weight|bias)"),
        ("norm before attention", r"(input|attention)_layernorm\.(weight|bias)"),
        ("norm after the network", r"post_feedforward_layernorm\.weight"),
        ("", r"\w*norm\d?\.(weight|bias)"),
    )
)
_EMBEDDING = re.compile(r"(\w+\.)*embed_tokens\.weight")
_BESIDE_LAYERS = re.compile(r"(\w+\.)*(norm|final_layernorm)\.(weight|bias)|lm_head\.(weight|bias)")
_HEAD = "lm_head.weight"
# Where these are set, attention is not causal, or not of the usual kind.
_OTHER_ATTENTION = ("use_bidirectional_attention", "is_encoder_decoder", "add_cross_attention", "alibi")
# Attention whose queries, keys and values are parts of one tensor, which stays while they are copied.
_JOINED: tuple[Moment, ...] = ("3H 4Q 5K",)
# Attention that turns a part of each head.
_PARTS_OF_HEADS: tuple[Moment, ...] = ("3H 3Q 3K", "4H 2Q 2K")
# What turns in float32, where all else is narrower.
_WIDE_ROTATION: dict[str, tuple[Moment, ...]] = {
    "CohereForCausalLM": NARROW_LIKE_COHERE,
    "Cohere2MoeForCausalLM": NARROW_LIKE_COHERE,
    **dict.fromkeys(
        ("Ernie4_5ForCausalLM", "FlexOlmoForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM", "OlmoForCausalLM"),
        ("3H 1Q 2K 3q", "3H 1Q 2K 1q 3k"),
    ),
}


class NotUsual(Exception):
    """Why a model cannot be taken for a decoder of usual layers, as half a sentence."""


@dataclass(frozen=True, slots=True)
class UsualDecoder:
    """scaled_embedding: the name of an embedding that does more than to look rows up, None for a plain one."""

    shape: TransformersShape
    layers: LayerMoments
    scaled_embedding: str | None


def read_usual_decoder(model_config: ModelConfig, headers: Mapping[str, TensorHeader] | None) -> UsualDecoder:
    """Raises NotUsual for what a decoder of usual layers lacks, and for what nothing here says."""
    if headers is None:
        raise NotUsual("there is no checkpoint that shows them")
    source = read_class_source(model_config)
    if source is None:
        raise NotUsual("the source of its class in Transformers does not show what absent fields mean")
    found = _Matrices(headers)
    complete = dataclasses.replace(model_config, hf_config=source.complete(model_config.hf_config))
    try:
        shape = _shape(ConfigFields(complete), found, source)
    except (ModelError, UnsupportedFeature) as error:
        raise NotUsual(f"its configuration is not that of a usual decoder ({error})") from error
    scales = source.scales_embedding
    if scales and model_config.quantization is not None:
        raise NotUsual("its embedding does more than to look rows up, which rounding must know")
    return UsualDecoder(shape, _layers(model_config, shape, found), found.embedding if scales else None)


class _Matrices:
    """The matrices of a checkpoint by what they are. Raises NotUsual for tensors that usual decoders lack."""

    def __init__(self, headers: Mapping[str, TensorHeader]) -> None:
        self.has_head = _HEAD in headers
        self.embedding = ""
        self._shapes: defaultdict[str, dict[int, tuple[int, ...]]] = defaultdict(dict)
        layers = set()
        for name, header in headers.items():
            if is_no_weight(name):
                continue
            in_layer = _LAYER.fullmatch(name)
            if in_layer is not None:
                layers.add(int(in_layer[1]))
                self._note(name, int(in_layer[1]), in_layer[2], header.shape)
            elif _EMBEDDING.fullmatch(name) and not self.embedding:
                self.embedding = name
            elif not _BESIDE_LAYERS.fullmatch(name):
                raise NotUsual(f"the checkpoint has {name}")
        num_layers = len(layers)
        if sorted(layers) != list(range(num_layers)) or not layers or not self.embedding:
            raise NotUsual("the checkpoint does not have all of its layers and an embedding")
        self.num_layers = num_layers
        self.embedded = headers[self.embedding].shape
        networks = self._shapes["up"] or self._shapes["gate and up"]
        self.num_networks = len(networks)
        self.only_first_has_network = list(networks) == [0]
        self.num_mixtures = len(self._shapes["router"])
        attends = self._shapes["output"]
        if len(attends) != num_layers or self.num_networks + self.num_mixtures != num_layers:
            raise NotUsual("some layers lack attention or a network")

    def _note(self, name: str, layer: int, rest: str, shape: tuple[int, ...]) -> None:
        role = next((role for role, pattern in _ROLES if pattern.fullmatch(rest)), None)
        if role is None:
            raise NotUsual(f"the checkpoint has {name}")
        if role:
            self._shapes[role][layer] = shape

    def has(self, role: str) -> bool:
        return bool(self._shapes.get(role))

    def of(self, role: str) -> tuple[int, ...]:
        """The shape that this matrix has in all layers that have it."""
        shapes = set(self._shapes[role].values())
        if len(shapes) != 1:
            raise NotUsual(f"the layers differ in the sizes of their {role} projections")
        return next(iter(shapes))


def _shape(fields: ConfigFields, found: _Matrices, source: ClassSource) -> TransformersShape:
    config = fields.model_config
    for name in _OTHER_ATTENTION:
        if fields.hf_config.get(name):
            raise NotUsual(f"config.json has {name}={fields.hf_config[name]!r}")
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if found.embedded != (config.vocab_size, hidden_size):
        raise NotUsual(f"the embedding has the shape {list(found.embedded)}")
    if found.num_layers != fields.integer("num_hidden_layers"):
        raise NotUsual(f"the checkpoint has {found.num_layers} layers")
    head_size, num_kv_heads = _heads(found, num_heads)
    decoder = ModelShape(
        vocab_size=config.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=found.of("down")[1] if found.num_networks else 0,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        windows=_windows(fields, found.num_layers, source),
        rotary_dim=int(head_size * read_rotated_share(fields, config.architecture)),
        ties_embeddings=not found.has_head or fields.flag("tie_word_embeddings", default=False),
    )
    activation = read_activation(fields, "")
    if activation not in ACTIVATION_TENSORS:
        raise NotUsual(f"the activation {activation!r} is not known beforehand")
    return TransformersShape(decoder, _experts(fields, found, hidden_size), activation)


def _heads(found: _Matrices, num_heads: int) -> tuple[int, int]:
    """The size of heads, and how many there are of keys."""
    head_size, rest = divmod(found.of("output")[1], num_heads)
    if found.has("joined"):
        num_values = found.of("joined")[0] - num_heads * head_size
        num_kv_heads, odd = divmod(num_values, 2 * head_size)
        is_usual = not found.has("query")
    else:
        (num_queries, _), (num_keys, _) = found.of("query"), found.of("key")
        num_kv_heads, odd = divmod(num_keys, head_size)
        is_usual = num_queries == num_heads * head_size and found.of("value") == found.of("key")
    if rest or odd or not is_usual:
        raise NotUsual("the sizes of its attention's projections are not those of plain attention")
    return head_size, num_kv_heads


def _experts(fields: ConfigFields, found: _Matrices, hidden_size: int) -> Experts | None:
    if not found.num_mixtures:
        return None
    num_experts = found.of("router")[0]
    if found.has("expert"):
        intermediate_size = found.of("expert")[1]
    elif found.has("experts"):  # of some classes transposed
        _, *sides = found.of("experts")
        intermediate_size = sides[0] * sides[1] // hidden_size
    else:
        raise NotUsual("the checkpoint has no experts beside its routers")
    return Experts(
        num_experts=num_experts,
        num_selected=fields.integer("num_experts_per_tok" if "num_experts_per_tok" in fields.hf_config else "moe_topk"),
        intermediate_size=intermediate_size,
        shared_size=found.of("shared")[1] if found.has("shared") else 0,
        num_layers=found.num_mixtures,
    )


def _windows(fields: ConfigFields, num_layers: int, source: ClassSource) -> tuple[int | None, ...]:
    config = fields.model_config
    if config.architecture in supported_architectures():
        windows = list(read_shape(config).windows)
    else:
        windows = _windows_of_fields(fields, num_layers, source)
    longest = config.longest_context
    return tuple(None if window is None or window >= longest else window for window in windows)


def _windows_of_fields(fields: ConfigFields, num_layers: int, source: ClassSource) -> list[int | None]:
    window, kinds = fields.optional_integer("sliding_window"), fields.layer_types(num_layers)
    is_used = fields.flag("use_sliding_window", default=True)
    if kinds is None:
        if window is None or not is_used:
            return [None] * num_layers
        if "layer_types" in source.defaults:  # which its class makes by a rule of its own
            raise NotUsual("config.json has a window and does not say in which layers")
        return [window] * num_layers
    has_window = [kind == "sliding_attention" for kind in kinds]
    if set(kinds) - {"sliding_attention", "full_attention"} or (any(has_window) and (window is None or not is_used)):
        raise NotUsual(f"config.json has layer_types of {', '.join(sorted(set(kinds)))}")
    return [window if has else None for has in has_window]


def _layers(model_config: ModelConfig, shape: TransformersShape, found: _Matrices) -> LayerMoments:
    is_partial = shape.decoder.rotary_dim < shape.decoder.head_size
    turned = _PARTS_OF_HEADS if is_partial else WHOLE_HEADS
    if found.has("joined") and (is_partial or found.has("head norm")):
        raise NotUsual("its attention takes joined projections apart in a way of its own")
    narrow = _WIDE_ROTATION.get(model_config.architecture, ("3H 3Q 2K 1n", *RMS_NORM))
    attention = (*turned, *_JOINED) if found.has("joined") else turned
    layers = LayerMoments(
        attention,
        (*turned, *narrow),
        gate=_gate(found),
        has_wide_routing=found.has("router's bias"),
        shares_last=True,
        kept_beside_dense=3 if found.only_first_has_network else None,  # no layer before it has returned anything
    )
    if found.has("norm after the network") and not found.has("norm before attention"):
        return _without_normalised_input(layers)
    return layers


def _gate(found: _Matrices) -> str | None:
    if found.has("gate and up"):
        return "together"
    if not found.has("up"):
        return "apart"
    num_inner = found.of("down")[1]
    if found.of("up")[0] == 2 * num_inner:
        return "together"
    if found.of("up")[0] != num_inner:
        raise NotUsual("the sizes of its networks' projections do not fit each other")
    return "apart" if found.has("gate") else None


def _without_normalised_input(layers: LayerMoments) -> LayerMoments:
    """Where only what attention and the network return is normalised, their input is the residual stream itself."""
    attention, narrow = (
        tuple(re.sub(r"^\d+", lambda count: str(int(count[0]) - 1), moment) for moment in moments)
        for moments in (layers.attention, layers.narrow)
    )
    return dataclasses.replace(layers, attention=attention, narrow=narrow, kept=layers.kept - 1)
