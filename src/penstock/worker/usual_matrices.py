"""What the tensors of a checkpoint are in a decoder of usual layers, by their names. Needs no torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from penstock.loader.headers import TensorHeader
from penstock.worker.estimate import HEADS, is_no_weight

_LAYER = re.compile(r"(?:\w+\.)*?(?:layers|h)\.(\d+)\.(.+)")
_ATTENTION = r"(self_attn|attention|attn|multi_head_attention)"
_MIXTURE = r"((mlp|block_sparse_moe)\.)?"
# What the tensors of a layer are, by name. Those that are only allowed, and say nothing, have the role "".
_ROLES = tuple(
    (role, re.compile(pattern))
    for role, pattern in (
        ("query", rf"{_ATTENTION}\.(q_proj|q_proj\.linear|q_b_proj|Wq)\.weight"),
        ("key", rf"{_ATTENTION}\.(k_proj|k_proj\.linear|Wk)\.weight"),
        ("value", rf"{_ATTENTION}\.(v_proj|v_proj\.linear|Wv)\.weight"),
        ("latent", rf"{_ATTENTION}\.kv_a_proj_with_mqa\.weight"),
        ("of latent", rf"{_ATTENTION}\.kv_b_proj\.weight"),
        ("", rf"{_ATTENTION}\.(q_a_proj\.(weight|bias)|kv_a_proj_with_mqa\.bias|(q_a|kv_a)_layernorm\.weight)"),
        ("joined", rf"{_ATTENTION}\.(qkv_proj|query_key_value|c_attn)\.weight"),
        ("output", rf"{_ATTENTION}\.(o_proj|o_proj\.linear|dense|out_proj|c_proj|Wo)\.weight"),
        ("output gate", rf"{_ATTENTION}\.(gate_proj|g_proj)\.weight"),
        ("", rf"{_ATTENTION}\.gate_bias"),
        ("gate", r"mlp\.gate_proj\.weight"),
        ("up", r"(mlp\.)?(up_proj|fc1|c_fc|dense_h_to_4h|Wi|ffn\.0)\.weight"),
        ("gate and up", r"mlp\.gate_up_proj\.weight"),
        ("down", r"(mlp\.)?(down_proj|fc2|c_proj|dense_4h_to_h|Wo|ffn\.2)\.weight"),
        ("router", rf"{_MIXTURE}(gate|gate\.wg|router|router\.(gate|layer|proj))\.weight"),
        (
            "router's bias",
            r"(mlp|block_sparse_moe|moe)\.((gate|router|experts)\.)?(e_score_correction_bias|expert_bias)",
        ),
        ("router's scales", r"router\.per_expert_scale"),
        ("", r"router\.scale"),
        ("", rf"{_MIXTURE}experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight"),
        ("expert", rf"{_MIXTURE}experts\.\d+\.(down_proj|w2)\.weight"),
        ("", rf"{_MIXTURE}(experts\.(gate_up_proj|fc1)(\.weight)?|input_linear\.weight)"),
        ("experts", rf"{_MIXTURE}(experts\.(down_proj|fc2)(\.weight)?|output_linear\.weight)"),
        ("", r"mlp\.shared_(experts?|mlp)\.(gate_proj|up_proj)\.weight"),
        ("shared gate and up", r"mlp\.shared_(experts?|mlp)\.gate_up_proj\.weight"),
        ("shared", r"mlp\.shared_(experts?|mlp)\.down_proj\.weight"),
        ("", rf"({_ATTENTION}\.|mlp\.)?(\w+_proj|fc[12]|c_\w+|dense\w*|query_key_value|W[ioqkv]|ffn\.[02])\.bias"),
        ("", r"mlp\.act_fn\.(alpha_n|alpha_p|beta|eps)"),
        ("head norm", r"self_attn\.(q|k|query|key)_(layer)?norm\.(weight|bias)"),
        ("result norm", r"self_attn\.attn_sub_norm\.weight"),
        ("inner norm", r"mlp\.ffn_sub_norm\.weight"),
        ("norm before attention", r"(input|attention)_layernorm\.(weight|bias)"),
        ("norm after the network", r"post_feedforward_layernorm\.weight"),
        ("", r"\w*norm\d?(_[12])?\.(weight|bias)|ln_[12]\.(weight|bias)"),
        ("", r"layer_scalar|per_layer_(input_gate|projection)\.weight"),
    )
)
_EMBEDDING = re.compile(r"(\w+\.)*(embed_tokens|tok_embeddings|wte|w)\.weight")
_LAYER_INPUTS = re.compile(r"(\w+\.)*embed_tokens_per_layer\.weight")
_BESIDE_LAYERS = re.compile(
    r"(\w+\.)*(norm|final_norm|final_layernorm|layer_?norm|ln_f|per_layer_projection_norm)\.(weight|bias)|"
    r"(\w+\.)*(embed_positions|wpe|per_layer_model_projection)\.weight|"
    r"(lm_head|output_projection|decoder)\.(weight|bias)|lm_head\.dense\.(weight|bias)"
)


class NotUsual(Exception):
    """Why a model cannot be taken for a decoder of usual layers, as half a sentence."""


@dataclass(slots=True)
class LayerMatrices:
    """The matrices of a layer by what they are, some of which it may have several times."""

    _shapes: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)

    def note(self, role: str, shape: tuple[int, ...]) -> None:
        self._shapes.setdefault(role, set()).add(shape)

    def has(self, role: str) -> bool:
        return role in self._shapes

    def of(self, role: str) -> tuple[int, ...]:
        """The shape of this matrix. Raises NotUsual where there is none, or several differ."""
        shapes = self._shapes.get(role, set())
        if len(shapes) != 1:
            raise NotUsual(f"the sizes of its {role} projections do not show")
        return next(iter(shapes))

    @property
    def num_turned(self) -> int:
        """Dimensions of a head that turn, where keys and values are made of a latent state."""
        return self.of("latent")[0] - self.of("of latent")[1]

    @property
    def has_network(self) -> bool:
        return self.has("up") or self.has("gate and up")


@dataclass(frozen=True, slots=True)
class UsualMatrices:
    """layers: by number. embedding: the name of that of tokens. embedded: its shape. layer_inputs: the name of an
    embedding that layers get parts of, or "", and its width. has_head: whether the head is another matrix.
    """

    layers: tuple[LayerMatrices, ...]
    embedding: str
    embedded: tuple[int, ...]
    layer_inputs: str
    layer_inputs_size: int
    has_head: bool

    def kinds(self, differ: list[tuple[object, ...]]) -> Iterator[tuple[tuple[int, ...], LayerMatrices]]:
        """Numbers of layers whose matrices are alike, and these. differ: by layer, what else must be the same."""
        alike: list[tuple[tuple[object, ...], LayerMatrices, list[int]]] = []
        for number, layer in enumerate(self.layers):
            for others, first, numbers in alike:
                if others == differ[number] and first == layer:
                    numbers.append(number)
                    break
            else:
                alike.append((differ[number], layer, [number]))
        for _, layer, numbers in alike:
            yield tuple(numbers), layer


def read_usual_matrices(headers: Mapping[str, TensorHeader], *, are_transposed: bool = False) -> UsualMatrices:
    """are_transposed: the matrices of layers are stored as [inputs, outputs].

    Raises NotUsual for a tensor that usual decoders lack, and for layers that lack one.
    """
    layers: defaultdict[int, LayerMatrices] = defaultdict(LayerMatrices)
    embedding = layer_inputs = ""
    for name, header in headers.items():
        if is_no_weight(name):
            continue
        in_layer = _LAYER.fullmatch(name)
        if in_layer is not None:
            role = _role(in_layer[2])
            if role is None:
                raise NotUsual(f"the checkpoint has {name}")
            layers[int(in_layer[1])].note(role, header.shape[::-1] if are_transposed else header.shape)
        elif _EMBEDDING.fullmatch(name) and not embedding:
            embedding = name
        elif _LAYER_INPUTS.fullmatch(name):
            layer_inputs = name
        elif not _BESIDE_LAYERS.fullmatch(name):
            raise NotUsual(f"the checkpoint has {name}")
    if sorted(layers) != list(range(len(layers))) or not layers or not embedding:
        raise NotUsual("the checkpoint does not have all of its layers and an embedding")
    for layer in layers.values():
        # A network beside experts is known only of one kind of routers.
        if not layer.has("output") or layer.has_network + layer.has("router") != 1 + layer.has("router's scales"):
            raise NotUsual("some layers lack attention or a network")
    return UsualMatrices(
        tuple(layers[number] for number in sorted(layers)),
        embedding,
        headers[embedding].shape,
        layer_inputs,
        layer_inputs_size=headers[layer_inputs].shape[-1] if layer_inputs else 0,
        has_head=any(name in headers for name in HEADS),
    )


def is_of_layer(name: str, num_layers: int) -> bool:
    """Whether the tensor belongs to one of the first `num_layers` layers."""
    in_layer = _LAYER.fullmatch(name)
    return in_layer is not None and int(in_layer[1]) < num_layers


def is_matrix_of_layer(name: str) -> bool:
    """Whether the tensor is one of a linear layer, in a layer."""
    in_layer = _LAYER.fullmatch(name)
    return in_layer is not None and _role(in_layer[2]) in ("joined", "output", "up", "down")


@cache  # layers have the same names, and those with an expert to each tensor have thousands
def _role(rest: str) -> str | None:
    return next((role for role, pattern in _ROLES if pattern.fullmatch(rest)), None)
