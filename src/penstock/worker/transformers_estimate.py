"""What a model that runs through Transformers will need, from `config.json` and the headers alone.

Its classes have forward passes of their own, so each that is known here has a table of its fullest moments: which
tensors are alive then, per token. They were read off runs in which every tensor was recorded, and
`tests/worker/test_transformers_estimate.py` compares with such runs. Needs no torch. All sizes are bytes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.config import ModelConfig
from penstock.contract import FullAttentionSpec, SlidingWindowSpec
from penstock.contract.kv_cache import DTYPE_BYTES
from penstock.device.dtypes import DtypeChoice
from penstock.loader.headers import TensorHeader
from penstock.worker.estimate import FLOAT_BYTES, INPUT_BYTES, WORKSPACE_BYTES, weights_of
from penstock.worker.quantized_estimate import PlainProducts
from penstock.worker.transformers_shape import TransformersShape, read_transformers_shape

# Values of a token, alive at one moment: a number of tensors, and of what size.
#   H hidden state    Q queries of all heads    R what of the queries turns    N one value per query head
#   I inner state     K keys of all heads       S what of the keys turns
#   X hidden and Y inner states of its experts together    Z inner state of the shared expert
#   P inputs of its own that each layer has, of all layers together    C state that keys and values are made of
# Small letters are float32 beside a narrower dtype.
Moment = str
_TERM = re.compile(r"(-?\d+)([A-Za-z])")

# Attention that turns whole heads, by the rotation of queries, of keys, and by the copies that attention takes.
WHOLE_HEADS = ("3H 4Q 2K", "3H 2Q 5K", "3H 3Q 3K", "4H 2Q 2K")
# Attention that turns a part of each head and joins it with the rest.
_PARTS_OF_HEADS = ("7H 4K 1R 1S", "5H 5K 1R 1S")
RMS_NORM = ("3H 2h", "4H 1h")
# Attention that turns pairs of neighbours in float32, and norms of the same.
NARROW_LIKE_COHERE = ("3H 1Q 2K 4q 1k", "3H 1Q 2K 2q 4k", "3H 1Q 2K 3q 2k", "3H 2Q 3K 2q 2k", "2H 3h")


@dataclass(frozen=True, slots=True)
class LayerMoments:
    """attention: its moments where all is float32. narrow: those that a lower precision has instead.
    kept: hidden states that are alive beside the feed-forward network. gate: how that makes its two projections, None
    with one. shared_gate: the same of the network that all tokens go through beside experts.
    has_wide_networks: both projections meet in float32. has_wide_routing: experts' outputs meet weights in float32.
    shares_last: that network runs after the experts, not before. joins_heads: queries, keys and values are one
    projection.
    """

    attention: tuple[Moment, ...]
    narrow: tuple[Moment, ...]
    kept: int = 4
    gate: str | None = "apart"
    shared_gate: str = "apart"
    has_wide_networks: bool = False
    has_wide_routing: bool = False
    shares_last: bool = False
    joins_heads: bool = False


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers of a model that are alike. numbers: which. shape: of a model that had only these."""

    numbers: tuple[int, ...]
    shape: TransformersShape
    moments: LayerMoments


_LIKE_LLAMA = LayerMoments(WHOLE_HEADS, (*WHOLE_HEADS, "3H 3Q 2K 1n", *RMS_NORM))
_MOMENTS = {
    "Cohere2ForCausalLM": LayerMoments(WHOLE_HEADS, NARROW_LIKE_COHERE),
    "GPTNeoXForCausalLM": LayerMoments(("12H",), ("10H 1n",), gate=None, joins_heads=True),
    "Glm4ForCausalLM": LayerMoments(
        ("3H 3Q 3K", "4H 2Q 2K"), ("3H 3Q 2K 1n", "4H 2Q 2K", "4H 2h", "6H 1h"), gate="together"
    ),
    "GraniteForCausalLM": _LIKE_LLAMA,
    "MixtralForCausalLM": replace(_LIKE_LLAMA, has_wide_routing=True),
    "OPTForCausalLM": LayerMoments(("9H",), ("9H 1n",), gate=None),
    "OlmoeForCausalLM": _LIKE_LLAMA,
    "PersimmonForCausalLM": LayerMoments(("14H 1R 1S",), ("12H 1R 1S",), gate=None, joins_heads=True),
    "PhiForCausalLM": LayerMoments(_PARTS_OF_HEADS, ("7H 3K 1R 1S 1n", "5H 5K 1R 1S"), gate=None),
    "Qwen2MoeForCausalLM": _LIKE_LLAMA,
    "Qwen3MoeForCausalLM": _LIKE_LLAMA,
    "SmolLM3ForCausalLM": _LIKE_LLAMA,
    "StableLmForCausalLM": LayerMoments(_PARTS_OF_HEADS, ("7H 3K 1R 1S 1n", "5H 5K 1R 1S")),
    "Starcoder2ForCausalLM": LayerMoments(WHOLE_HEADS, (*WHOLE_HEADS, "3H 3Q 2K 1n"), gate=None),
}
# Inner states that an activation has alive, its input and its result among them. Those of Transformers in plain torch
# hold what they add up.
ACTIVATION_TENSORS = {
    "gelu": 2,
    "gelu_10": 3,
    "gelu_accurate": 4,
    "gelu_fast": 5,
    "gelu_new": 4,
    "gelu_python": 4,
    "gelu_python_tanh": 4,
    "gelu_pytorch_tanh": 2,
    "hardswish": 2,
    "laplace": 4,
    "leaky_relu": 2,
    "linear": 1,
    "mish": 2,
    "quick_gelu": 3,
    "relu": 2,
    "relu2": 3,
    "relu6": 2,
    "sigmoid": 2,
    "silu": 2,
    "sqrtsoftplus": 3,
    "swigluoai": 6,
    "swish": 2,
    "tanh": 2,
    "xielu": 5,
}
# Per chosen expert of a token: places, the same in order, their numbers, weights and weights in order.
_ROUTE_BYTES = 4 * 8 + 3 * 4
# Kept in the compute dtype although they are matrices: Transformers multiplies by them itself, or looks rows up.
_AS_COMPUTED = re.compile(
    r".*\.(experts\..*|embed_positions\.weight|"
    r"(mlp|block_sparse_moe)\.(gate|router|router\.gate|router\.layer|input_linear|output_linear)\.weight)"
)
# Rows that OPT's table of positions has beside its positions.
_EXTRA_POSITIONS = 2


def has_table(model_config: ModelConfig) -> bool:
    """Whether the layers of the model's class are known here."""
    return model_config.architecture in _MOMENTS


def why_not_derived(model_config: ModelConfig) -> str | None:
    """Why the table of a class does not say what this model needs, or None where it does."""
    activation = read_transformers_shape(model_config).activation
    if activation not in ACTIVATION_TENSORS:
        return f"the activation {activation!r} is not known beforehand"
    return None


def is_kept_as_computed(name: str) -> bool:
    """Whether a checkpoint's matrix of this name stays in the compute dtype, and is never quantised."""
    return _AS_COMPUTED.fullmatch(name) is not None


def estimate_transformers_weights(
    headers: Mapping[str, TensorHeader],
    shape: TransformersShape,
    dtype: DtypeChoice,
    as_computed_too: Collection[str] = (),
) -> int:
    """Parameters: matrices as they are kept, the rest in the compute dtype, and so those of these names."""
    narrow = as_computed = 0
    for name, count in weights_of(headers, shape.decoder).items():
        if len(headers[name].shape) < 2 or is_kept_as_computed(name) or name in as_computed_too:
            as_computed += count
        else:
            narrow += count
    return narrow * DTYPE_BYTES[dtype.weights] + as_computed * DTYPE_BYTES[dtype.name]


def layers_of_class(model_config: ModelConfig) -> LayerMoments:
    """The table of a class for which `why_not_derived` says None."""
    architecture, hf_config = model_config.architecture, model_config.hf_config
    layers = _MOMENTS[architecture]
    if architecture == "StableLmForCausalLM" and not hf_config.get("use_parallel_residual", False):
        return replace(layers, kept=6)
    if architecture == "OPTForCausalLM" and not hf_config.get("do_layer_norm_before", True):
        return replace(layers, attention=("8H",), narrow=("8H 1n",))
    return layers


def specs_of_kinds(
    kinds: Sequence[LayerKind], block_size: int, dtype: str
) -> dict[str, FullAttentionSpec | SlidingWindowSpec]:
    """What each layer stores, in the order of the layers. dtype: of the cache, by name."""
    specs = {
        number: spec
        for kind in kinds
        for number, spec in zip(
            kind.numbers, kind.shape.decoder.kv_cache_specs(block_size, dtype).values(), strict=True
        )
    }
    return {f"layer {number}": specs[number] for number in sorted(specs)}


def transformers_weights_of_shape(model_config: ModelConfig, shape: TransformersShape) -> dict[str, TensorHeader]:
    """The tensors of a model with random weights, which has no checkpoint. Biases are left out."""
    decoder, experts = shape.decoder, shape.experts
    hidden, layers = decoder.hidden_size, decoder.num_layers
    num_projections = 3 if _MOMENTS[model_config.architecture].gate else 2
    num_sparse = 0 if experts is None else experts.num_layers
    embedded = model_config.hf_config.get("word_embed_proj_dim") or hidden
    has_positions = model_config.architecture == "OPTForCausalLM"
    positions = model_config.longest_context + _EXTRA_POSITIONS if has_positions else 0
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (decoder.vocab_size, embedded),
        "model.embed_positions.weight": (positions, hidden),
        "model.projections_in_and_out": (0 if embedded == hidden else 2 * embedded, hidden),
        "model.qkv_proj": (layers, decoder.qkv_size, hidden),
        "model.o_proj": (layers, hidden, decoder.num_heads * decoder.head_size),
        "model.mlp": (layers - num_sparse, num_projections * decoder.intermediate_size, hidden),
        "model.norms": (2 * layers + 1, hidden),
        "lm_head.weight": (decoder.vocab_size, embedded),
    }
    if experts is not None:
        sizes |= {
            "model.mlp.experts.all": (num_sparse, experts.num_experts, 3 * experts.intermediate_size, hidden),
            "model.mlp.gate.weight": (num_sparse, experts.num_experts, hidden),
            "model.mlp.shared": (num_sparse, 3 * experts.shared_size, hidden),
        }
    return {name: TensorHeader("F32", size) for name, size in sizes.items()}


def estimate_transformers_activations(
    layers: LayerMoments,
    shape: TransformersShape,
    *,
    num_tokens: int,
    dtype: str,
    device: str,
    products: PlainProducts | None = None,
) -> int:
    """The tensors of a step of `num_tokens` through the layers. products: as in `estimate_step`."""
    value = DTYPE_BYTES[dtype]
    rotation = 2 * (shape.decoder.rotary_dim + shape.other_rotary_dims) * value
    fullest = max(_moment_bytes(moment, shape, value) for moment in _moments(layers, shape, is_narrow=value < 4))
    routing = 0
    if shape.experts is not None:
        routing = shape.experts.num_selected * _ROUTE_BYTES + shape.experts.num_experts * FLOAT_BYTES
    beside = INPUT_BYTES + rotation + shape.layer_inputs * value
    tensors = num_tokens * (beside + fullest + routing)
    if products is not None:
        tensors = max(
            tensors,
            num_tokens * beside + max(_product_moments(layers, shape, products, num_tokens, value)),
        )
    return WORKSPACE_BYTES[device] + tensors


def _product_moments(
    layers: LayerMoments, shape: TransformersShape, products: PlainProducts, num_tokens: int, value: int
) -> list[int]:
    """What there is in attention's products, and in those of the network that is no expert: the layer's moment, and
    what the product works with."""
    sizes = _sizes(shape)
    heads = sizes["Q"] + (2 * sizes["K"] if layers.joins_heads else 0)
    moments = [("3H 1Q 2K", sizes["H"], heads), ("4H 1Q", sizes["Q"], sizes["H"])]
    networks = {"I": layers.gate} if _has_dense_layers(shape) else {}
    for what, gate in {**networks, "Z": layers.shared_gate}.items():
        if inner := sizes[what]:
            joined = 2 * inner if gate == "together" else inner
            moments += [(f"{layers.kept}H {2 if gate else 1}{what}", sizes["H"], joined)]
            moments += [(f"{layers.kept + 1}H 1{what}", inner, sizes["H"])]
    return [
        num_tokens * _moment_bytes(moment, shape, value)
        + products.working_bytes(num_tokens, num_inputs, num_outputs, value)
        for moment, num_inputs, num_outputs in moments
    ]


def _moments(layers: LayerMoments, shape: TransformersShape, *, is_narrow: bool) -> list[Moment]:
    moments = [*(layers.narrow if is_narrow else layers.attention)]
    if _has_dense_layers(shape):
        if layers.has_wide_networks:
            moments += [f"{layers.kept}H 2I 3i"] if is_narrow else [f"{layers.kept}H 4I", f"{layers.kept + 1}H 3I"]
        else:
            moments += _network_moments(layers.kept, "I", ACTIVATION_TENSORS[shape.activation], layers.gate)
    if shape.experts is not None:
        moments += _expert_moments(layers, shape, is_narrow=is_narrow)
    return moments


def _has_dense_layers(shape: TransformersShape) -> bool:
    return shape.experts is None or shape.experts.num_layers < shape.decoder.num_layers


def _network_moments(kept: int, inner: str, num_activation: int, gate: str | None) -> list[Moment]:
    if gate == "together":
        return [f"{kept}H {max(4, 1 + num_activation)}{inner}", f"{kept + 1}H 3{inner}"]
    num_inner = num_activation if gate is None else max(3, num_activation)
    return [f"{kept}H {num_inner}{inner}", f"{kept + 1}H 1{inner}"]


def _expert_moments(layers: LayerMoments, shape: TransformersShape, *, is_narrow: bool) -> list[Moment]:
    """Both projections of all chosen experts lie side by side, as do their outputs before they are added up."""
    assert shape.experts is not None
    num_activation, kept = ACTIVATION_TENSORS[shape.activation], layers.kept
    shared = []
    if shape.experts.shared_size:
        shared = _network_moments(kept + 1 if layers.shares_last else kept, "Z", num_activation, layers.shared_gate)
        kept += 0 if layers.shares_last else 1
    weighted = [f"{kept}H 4X", f"{kept + 1}H 3X"]
    if is_narrow and layers.has_wide_routing:
        weighted = [f"{kept}H 2X 2x", f"{kept + 1}H 2X 1x 1h"]
    inner = "2Y 3y" if is_narrow and layers.has_wide_networks else f"{max(4, 1 + num_activation)}Y"
    return [f"{kept}H 1X {inner}", f"{kept}H 2X 1Y", *weighted, *shared]


def _moment_bytes(moment: Moment, shape: TransformersShape, value: int) -> int:
    sizes = _sizes(shape)
    return sum(
        int(count) * sizes[what.upper()] * (value if what.isupper() else FLOAT_BYTES)
        for count, what in _TERM.findall(moment)
    )


def _sizes(shape: TransformersShape) -> dict[str, int]:
    decoder, experts = shape.decoder, shape.experts
    num_selected = 0 if experts is None else experts.num_selected
    return {
        "H": decoder.hidden_size,
        "I": decoder.intermediate_size,
        "Q": decoder.num_heads * decoder.head_size,
        "K": decoder.num_kv_heads * decoder.head_size,
        "R": decoder.num_heads * decoder.rotary_dim,
        "S": decoder.num_kv_heads * decoder.rotary_dim,
        "N": decoder.num_heads,
        "X": num_selected * decoder.hidden_size,
        "Y": 0 if experts is None else num_selected * experts.intermediate_size,
        "Z": 0 if experts is None else experts.shared_size,
        "P": shape.layer_inputs,
        "C": shape.latent_size,
    }
