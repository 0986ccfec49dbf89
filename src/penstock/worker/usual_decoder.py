"""A model of Transformers without a table of its own, taken for a decoder of usual layers where its headers show one.

Every tensor of the checkpoint must be one that such a decoder has, so that nothing is overlooked that would make it
another: attention and networks are as their matrices say, and `config.json` says what those cannot. Layers may differ:
those that are alike are one kind, and the kind that takes the most decides. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.config import ModelConfig
from penstock.errors import ModelError, UnsupportedFeature
from penstock.loader.headers import TensorHeader
from penstock.models.config_fields import ConfigFields
from penstock.models.registry import supported_architectures
from penstock.models.shape import ModelShape, read_shape
from penstock.worker.class_source import ClassSource, read_class_source
from penstock.worker.estimate import FLOAT_BYTES
from penstock.worker.transformers_estimate import (
    ACTIVATION_TENSORS,
    NARROW_LIKE_COHERE,
    RMS_NORM,
    WHOLE_HEADS,
    LayerKind,
    LayerMoments,
    Moment,
)
from penstock.worker.transformers_shape import (
    Experts,
    TransformersShape,
    read_activation,
    read_rotated_share,
    windows_of_class,
)
from penstock.worker.usual_matrices import (
    LayerMatrices,
    NotUsual,
    UsualMatrices,
    is_matrix_of_layer,
    is_of_layer,
    read_usual_matrices,
)

# Where these are set, attention is not causal, or not of the usual kind.
_OTHER_ATTENTION = (
    "use_bidirectional_attention",
    "is_encoder_decoder",
    "add_cross_attention",
    "alibi",
    "num_kv_shared_layers",
)
# Of which texts are not concerned.
_ONLY_FOR_IMAGES = ("use_bidirectional_attention", "vision")
_NUM_SELECTED = ("num_experts_per_tok", "moe_topk", "top_k_experts")
# Attention whose queries, keys and values are parts of one tensor, which stays while they are copied.
_JOINED: tuple[Moment, ...] = ("3H 4Q 5K",)
# Attention that turns a part of each head.
_PARTS_OF_HEADS: tuple[Moment, ...] = ("3H 3Q 3K", "4H 2Q 2K")
# Attention whose keys and values are made together, of a latent state.
_LATENT = LayerMoments(("3H 9Q 2C", "4H 6Q 2C"), ("4H 6Q 2C", *RMS_NORM))
# What norms of heads, of attention's result and of inner states hold where all else is narrower.
_NARROW_HEAD_NORM: tuple[Moment, ...] = ("3H 1Q 2K 2q 2n", "3H 3Q 2K 1q 1n")
_NARROW_RESULT_NORM: tuple[Moment, ...] = ("3H 2Q 2K 2q", "3H 4Q 2K 1q")
_NARROW_INNER_NORM: tuple[Moment, ...] = ("4H 1I 2i", "4H 3I 1i")
# What turns or is normalised in float32, where all else is narrower.
_WIDE_ROTATION: dict[str, tuple[Moment, ...]] = {
    "AfmoeForCausalLM": ("3H 2Q 2K 2q 1n", *RMS_NORM),
    "CohereForCausalLM": NARROW_LIKE_COHERE,
    "Cohere2MoeForCausalLM": NARROW_LIKE_COHERE,
    **dict.fromkeys(
        ("Ernie4_5ForCausalLM", "FlexOlmoForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM", "OlmoForCausalLM"),
        ("3H 1Q 2K 3q", "3H 1Q 2K 1q 3k"),
    ),
}
# Queries are ready, and what made them gone, before there are keys.
_QUERIES_FIRST = LayerMoments(
    ("3H 4Q", "3H 1Q 5K", "4H 2Q 2K", "1H 3P"),
    ("3H 4Q", "3H 1Q 5K", "4H 2Q 2K", "3H 1Q 2q 2n", "3H 1Q 2K 2k", "4H 2h", "1H 1P 2p"),
    has_wide_routing=True,
)
# Whose attention is their own: without rotary embedding, with joined queries, in another order.
_OWN_LAYERS = {
    "BeamForCausalLM": LayerMoments(
        WHOLE_HEADS, ("3H 1Q 2K 3q", "3H 1Q 2K 1q 3k"), has_wide_networks=True, has_wide_routing=True
    ),
    "BioGptForCausalLM": LayerMoments(("9H",), ("9H 1n",)),
    "CTRLLMHeadModel": LayerMoments(("9H",), ("9H 1n",), kept=7),
    "Gemma4ForCausalLM": _QUERIES_FIRST,
    "Gemma4UnifiedForCausalLM": _QUERIES_FIRST,
    "GPT2LMHeadModel": LayerMoments(("11H",), ("9H",), kept=6),
    "GPTBigCodeForCausalLM": LayerMoments(("8H", "6H 1Q 4K"), ("8H", "6H 1Q 2K"), kept=6),
    "ModernBertDecoderForCausalLM": LayerMoments(("4H 4Q 2K",), ("7H 4q", "6H 2Q 2q"), kept=5),
}
# Gates on attention's result that are made after it, when what turned the heads is gone: their moments in float32, and
# in less. Others are there throughout.
_LATE_GATE: dict[str, tuple[tuple[Moment, ...], tuple[Moment, ...]]] = {
    "BeamForCausalLM": (("3H 5Q 2K",), ("3H 2Q 2K 2q",)),
    "LagunaForCausalLM": (("3H 4Q 2K", "4H 3Q 2K"), ("3H 2Q 2K 2q",)),
}
# Whose gate is made of other operators than the activation that the configuration names.
_OWN_ACTIVATION = {"CTRLLMHeadModel": "relu", "MiniMaxM3VLForCausalLM": "swigluoai"}
# Whose routing has a bias, and gives weights in the dtype of the hidden state all the same.
_NARROW_ROUTING = ("LagunaForCausalLM",)

# Rows that an embedding has beside those of the vocabulary.
_EXTRA_TOKENS = {"MoshiForCausalLM": 1}

# Which make a causal mask of all positions as they are built, a byte for each pair, and keep it.
_KEEP_MASK = ("GPTBigCodeForCausalLM",)
# Which make a table of positions that is no weight, in float32, and keep it.
_KEEP_POSITIONS = ("CTRLLMHeadModel",)


@dataclass(frozen=True, slots=True)
class UsualDecoder:
    """headers: of what is loaded. kinds: of layers. scaled_embeddings: the names of embeddings that do more than to
    look rows up. transposed: of matrices that the class multiplies by itself. buffer_bytes: of what the model keeps
    beside its weights.
    """

    headers: Mapping[str, TensorHeader]
    kinds: tuple[LayerKind, ...]
    scaled_embeddings: frozenset[str]
    transposed: frozenset[str]
    buffer_bytes: int


def read_usual_decoder(model_config: ModelConfig, headers: Mapping[str, TensorHeader] | None) -> UsualDecoder:
    """Raises NotUsual for what a decoder of usual layers lacks, and for what nothing here says."""
    if headers is None:
        raise NotUsual("there is no checkpoint that shows them")
    source = read_class_source(model_config)
    if source is None:
        raise NotUsual("the source of its class in Transformers does not show what absent fields mean")
    fields = ConfigFields(dataclasses.replace(model_config, hf_config=source.complete(model_config.hf_config)))
    try:
        headers = _without_ignorable(headers, source.ignorable, fields.integer("num_hidden_layers"))
        found = read_usual_matrices(headers, are_transposed=source.has_transposed)
        kinds = _kinds(fields, found, source)
    except (ModelError, UnsupportedFeature) as error:
        raise NotUsual(f"its configuration is not that of a usual decoder ({error})") from error
    scaled = {found.embedding} if source.scales_embedding else set()
    if found.layer_inputs:
        scaled.add(found.layer_inputs)
    transposed = frozenset(filter(is_matrix_of_layer, headers) if source.has_transposed else ())
    return UsualDecoder(headers, kinds, frozenset(scaled), transposed, _buffer_bytes(fields))


def _buffer_bytes(fields: ConfigFields) -> int:
    model_config = fields.model_config
    if model_config.architecture in _KEEP_MASK:
        return model_config.longest_context**2
    if model_config.architecture in _KEEP_POSITIONS:
        return model_config.longest_context * fields.integer("hidden_size") * FLOAT_BYTES
    return 0


def _without_ignorable(
    headers: Mapping[str, TensorHeader], patterns: tuple[str, ...], num_layers: int
) -> dict[str, TensorHeader]:
    """Without what the class ignores where it lacks it; the layers that it has are no part of that."""
    ignorable = [re.compile(pattern) for pattern in patterns]
    return {
        name: header
        for name, header in headers.items()
        if is_of_layer(name, num_layers) or not any(pattern.search(name) for pattern in ignorable)
    }


def _kinds(fields: ConfigFields, found: UsualMatrices, source: ClassSource) -> tuple[LayerKind, ...]:
    _refuse_others(fields, found)
    num_layers = len(found.layers)
    windows = _windows(fields, num_layers, source)
    types = fields.layer_types(num_layers) or [_type_of(window) for window in windows]
    num_heads = fields.hf_config.get("num_attention_heads_per_layer")
    if num_heads is None:
        num_heads = [fields.integer("num_attention_heads")] * num_layers
    if not isinstance(num_heads, list) or len(num_heads) != num_layers:
        raise NotUsual(f"config.json has num_attention_heads_per_layer={num_heads!r}")
    kinds = []
    for numbers, layer in found.kinds(list(zip(types, num_heads, strict=True))):
        shape = _shape(fields, found, layer, [windows[number] for number in numbers], num_heads[numbers[0]])
        if layer.has("latent"):
            shape = _turned(shape, layer.num_turned)
        elif source.has_rotary:
            share = read_rotated_share(fields, fields.model_config.architecture, types[numbers[0]])
            shape = _turned(shape, int(shape.decoder.head_size * share))
        moments = _moments(fields.model_config.architecture, shape, layer, source)
        if numbers == (0,) and num_layers > 1:  # no layer before it has returned anything
            moments = dataclasses.replace(moments, kept=moments.kept - 1)
        kinds.append(LayerKind(numbers, shape, moments))
    return _with_all_rotations(fields, kinds, types)


def _refuse_others(fields: ConfigFields, found: UsualMatrices) -> None:
    config = fields.hf_config
    for name in _OTHER_ATTENTION:
        if config.get(name) and (name, config[name]) != _ONLY_FOR_IMAGES:
            raise NotUsual(f"config.json has {name}={config[name]!r}")
    num_tokens = fields.model_config.vocab_size + _EXTRA_TOKENS.get(fields.model_config.architecture, 0)
    if found.embedded != (num_tokens, fields.integer("hidden_size")):
        raise NotUsual(f"the embedding has the shape {list(found.embedded)}")
    if len(found.layers) != fields.integer("num_hidden_layers"):
        raise NotUsual(f"the checkpoint has {len(found.layers)} layers")


def _shape(
    fields: ConfigFields, found: UsualMatrices, layer: LayerMatrices, windows: list[int | None], num_heads: int
) -> TransformersShape:
    """Of a kind of layers, before it is known what turns."""
    config = fields.model_config
    hidden_size, intermediate_size = fields.integer("hidden_size"), layer.of("down")[1] if layer.has_network else 0
    head_size, num_kv_heads = _heads(fields, layer, num_heads)
    decoder = ModelShape(
        vocab_size=config.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        windows=tuple(None if window is None or window >= config.longest_context else window for window in windows),
        rotary_dim=0,
        ties_embeddings=not found.has_head or fields.flag("tie_word_embeddings", default=False),
    )
    activation = _OWN_ACTIVATION.get(config.architecture) or read_activation(fields, "")
    if activation not in ACTIVATION_TENSORS:
        raise NotUsual(f"the activation {activation!r} is not known beforehand")
    experts = _experts(fields, layer, decoder) if layer.has("router") else None
    latent_size = layer.of("latent")[0] if layer.has("latent") else 0
    return TransformersShape(
        decoder, experts, activation, layer_inputs=found.layer_inputs_size, latent_size=latent_size
    )


def _heads(fields: ConfigFields, layer: LayerMatrices, num_heads: int) -> tuple[int, int]:
    """The size of heads, and how many there are of keys."""
    head_size, rest = divmod(layer.of("output")[1], num_heads)
    if layer.has("latent"):
        num_kv_heads, odd = num_heads, 0
        is_usual = layer.of("query")[0] == num_heads * head_size
        is_usual = is_usual and layer.of("of latent")[0] == num_heads * (2 * head_size - layer.num_turned)
    elif layer.has("joined"):
        num_values = layer.of("joined")[0] - num_heads * head_size
        num_kv_heads, odd = divmod(num_values, 2 * head_size)
        is_usual = not layer.has("query")
    else:
        (num_queries, _), (num_keys, _) = layer.of("query"), layer.of("key")
        num_kv_heads, odd = divmod(num_keys, head_size)
        is_usual = num_queries == num_heads * head_size
        if layer.has("value") or not fields.hf_config.get("attention_k_eq_v"):
            is_usual = is_usual and layer.of("value") == layer.of("key")
    if rest or odd or num_kv_heads < 1 or not is_usual:
        raise NotUsual("the sizes of its attention's projections are not those of plain attention")
    return head_size, num_kv_heads


def _experts(fields: ConfigFields, layer: LayerMatrices, decoder: ModelShape) -> Experts:
    if layer.has("expert"):
        intermediate_size = layer.of("expert")[1]
    elif layer.has("experts"):  # of some classes transposed
        _, *sides = layer.of("experts")
        intermediate_size = sides[0] * sides[1] // decoder.hidden_size
    else:
        raise NotUsual("the checkpoint has no experts beside its routers")
    # A network of the usual size beside experts is one that all tokens go through.
    return Experts(
        num_experts=layer.of("router")[0],
        num_selected=_num_selected(fields),
        intermediate_size=intermediate_size,
        shared_size=layer.of("shared")[1] if layer.has("shared") else decoder.intermediate_size,
        num_layers=decoder.num_layers,
    )


def _num_selected(fields: ConfigFields) -> int:
    """Experts of a token. Some say it by layer; where these differ, that is not known here."""
    name = next((name for name in _NUM_SELECTED if fields.hf_config.get(name) is not None), _NUM_SELECTED[0])
    value = fields.hf_config.get(name)
    if isinstance(value, list) and value and all(type(one) is int and one == value[0] > 0 for one in value):
        return int(value[0])
    return fields.integer(name)


def _turned(shape: TransformersShape, rotary_dim: int) -> TransformersShape:
    return dataclasses.replace(shape, decoder=dataclasses.replace(shape.decoder, rotary_dim=rotary_dim))


def _with_all_rotations(fields: ConfigFields, kinds: list[LayerKind], types: list[str]) -> tuple[LayerKind, ...]:
    """With the rotations that are there for other types of layers, where types have their own."""
    dims = {types[kind.numbers[0]]: kind.shape.decoder.rotary_dim for kind in kinds}
    rope = fields.hf_config.get("rope_parameters")
    if len(set(dims.values())) == 1 and not (isinstance(rope, dict) and set(dims) & set(rope)):
        return tuple(kinds)
    total = sum(dims.values())
    return tuple(
        dataclasses.replace(
            kind, shape=dataclasses.replace(kind.shape, other_rotary_dims=total - dims[types[kind.numbers[0]]])
        )
        for kind in kinds
    )


def _windows(fields: ConfigFields, num_layers: int, source: ClassSource) -> list[int | None]:
    architecture, types = fields.model_config.architecture, fields.layer_types(num_layers)
    if architecture in supported_architectures():
        return list(read_shape(fields.model_config).windows)
    types = types or source.layer_types(fields.hf_config)
    if types is not None and set(types) - {"sliding_attention", "full_attention"}:
        raise NotUsual(f"its layer_types are {', '.join(sorted(set(types)))}")
    windows = windows_of_class(fields, num_layers)
    return _windows_of_fields(fields, types, num_layers, source) if windows is None else windows


def _windows_of_fields(
    fields: ConfigFields, types: list[str] | None, num_layers: int, source: ClassSource
) -> list[int | None]:
    window, is_used = fields.optional_integer("sliding_window"), fields.flag("use_sliding_window", default=True)
    if types is None:
        if window is None or not is_used:
            return [None] * num_layers
        if "layer_types" in source.defaults:  # which its class makes by a rule of its own
            raise NotUsual("config.json has a window and does not say in which layers")
        return [window] * num_layers
    has_window = [kind == "sliding_attention" for kind in types]
    if any(has_window) and (window is None or not is_used):
        raise NotUsual("some of its layers have a window, and config.json names none")
    return [window if has else None for has in has_window]


def _type_of(window: int | None) -> str:
    return "full_attention" if window is None else "sliding_attention"


def _moments(architecture: str, shape: TransformersShape, layer: LayerMatrices, source: ClassSource) -> LayerMoments:
    moments = _OWN_LAYERS.get(architecture) or _attention(architecture, shape, layer)
    if layer.has("output gate") and layer.of("output gate")[0] == shape.decoder.num_heads * shape.decoder.head_size:
        moments = _gated(architecture, moments)
    if layer.has("norm after the network") and not layer.has("norm before attention"):
        # Only what attention and the network return is normalised, so their input is the residual stream itself.
        moments = _with_each(dataclasses.replace(moments, kept=moments.kept - 1), "-1H")
    if layer.has("inner norm"):
        moments = dataclasses.replace(moments, narrow=(*moments.narrow, *_NARROW_INNER_NORM))
    return dataclasses.replace(
        moments,
        kept=moments.kept + layer.has("router's scales"),  # a norm of its own before experts
        gate=_gate(layer),
        shared_gate="together" if layer.has("shared gate and up") else "apart",
        has_wide_routing=moments.has_wide_routing
        or (layer.has("router's bias") and architecture not in _NARROW_ROUTING),
        shares_last=source.shares_last and layer.has("shared"),
        joins_heads=layer.has("joined"),
    )


def _attention(architecture: str, shape: TransformersShape, layer: LayerMatrices) -> LayerMoments:
    if shape.latent_size:
        return _LATENT
    is_partial = shape.decoder.rotary_dim < shape.decoder.head_size
    turned = _PARTS_OF_HEADS if is_partial else WHOLE_HEADS
    if layer.has("joined") and (is_partial or layer.has("head norm")):
        raise NotUsual("its attention takes joined projections apart in a way of its own")
    usual: tuple[Moment, ...] = ("3H 3Q 2K 1n", *RMS_NORM)
    usual += _NARROW_HEAD_NORM if layer.has("head norm") else ()
    usual += _NARROW_RESULT_NORM if layer.has("result norm") else ()
    narrow = _WIDE_ROTATION.get(architecture, usual)
    return LayerMoments((*turned, *_JOINED) if layer.has("joined") else turned, (*turned, *narrow))


def _gated(architecture: str, moments: LayerMoments) -> LayerMoments:
    """With the gate on attention's result, which is as wide as the queries."""
    if architecture not in _LATE_GATE:
        return _with_each(moments, "1Q")
    attention, narrow = _LATE_GATE[architecture]
    return dataclasses.replace(moments, attention=(*moments.attention, *attention), narrow=(*moments.narrow, *narrow))


def _gate(layer: LayerMatrices) -> str | None:
    if layer.has("gate and up"):
        return "together"
    if not layer.has("up"):
        return "apart"
    num_inner = layer.of("down")[1]
    if layer.of("up")[0] == 2 * num_inner:
        return "together"
    if layer.of("up")[0] != num_inner:
        raise NotUsual("the sizes of its networks' projections do not fit each other")
    return "apart" if layer.has("gate") else None


def _with_each(moments: LayerMoments, term: str) -> LayerMoments:
    """With a tensor more in each moment, or one less."""
    attention, narrow = (tuple(f"{moment} {term}" for moment in which) for which in (moments.attention, moments.narrow))
    return dataclasses.replace(moments, attention=attention, narrow=narrow)
