"""What `config.json` says about the classes of Transformers whose layers are known here: sizes, windows, experts.

Where a field is absent, the class of Transformers means something by that, which is said here once more. Needs no
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.config import ModelConfig
from penstock.models.config_fields import ConfigFields
from penstock.models.shape import ModelShape, ReadWindows, read_shape

_ACTIVATION = ("hidden_act", "activation_function", "hidden_activation")
_DEFAULT_ACTIVATION = {
    "GPTNeoXForCausalLM": "gelu",
    "OPTForCausalLM": "relu",
    "PersimmonForCausalLM": "relu2",
    "PhiForCausalLM": "gelu_new",
    "Starcoder2ForCausalLM": "gelu_pytorch_tanh",
}
_ROTATED_SHARE = ("partial_rotary_factor", "rotary_pct")
_DEFAULT_ROTATED_SHARE = {
    "GPTNeoXForCausalLM": 0.25,
    "StableLmForCausalLM": 0.25,
    "PersimmonForCausalLM": 0.5,
    "PhiForCausalLM": 0.5,
    "Glm4ForCausalLM": 0.5,
}
# A rotation of whole heads, of which a share turns by more than nothing.
_TURNS_ALL = "proportional"
# Where each query head has keys and values of its own, whatever fields say.
_ONE_KV_HEAD_EACH = ("GPTNeoXForCausalLM", "OPTForCausalLM", "PersimmonForCausalLM")
_NUM_EXPERTS = ("num_local_experts", "num_experts")


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture in the place of a feed-forward network. num_selected: per token. shared_size: of the network that all
    tokens go through beside it, or 0. num_layers: that have it; the others have one network of the usual size.
    """

    num_experts: int
    num_selected: int
    intermediate_size: int
    shared_size: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class TransformersShape:
    """experts: None for a decoder without. activation: by its name in Transformers.

    other_rotary_dims: of rotations that this model's layers do not use, and that are there for others.
    layer_inputs: values of a token that layers get beside the hidden state, those of all layers together.
    latent_size: of the state that keys and values are made of, with what of the keys turns; 0 without one.
    """

    decoder: ModelShape
    experts: Experts | None
    activation: str
    other_rotary_dims: int = 0
    layer_inputs: int = 0
    latent_size: int = 0


def read_transformers_shape(model_config: ModelConfig) -> TransformersShape:
    """The shape of a model of a class that the tables of `transformers_estimate` have.

    Raises ModelError for a field that is missing or damaged.
    """
    fields, architecture = ConfigFields(model_config), model_config.architecture
    shape = read_shape(model_config, _WINDOWS.get(architecture, _no_windows))
    longest = model_config.longest_context
    windows = [None if window is None or window >= longest else window for window in shape.windows]
    decoder = replace(
        shape,
        num_kv_heads=shape.num_heads if architecture in _ONE_KV_HEAD_EACH else shape.num_kv_heads,
        windows=tuple(windows),
        rotary_dim=int(shape.rotary_dim * read_rotated_share(fields, architecture)),
    )
    read_experts = _EXPERTS.get(architecture)
    return TransformersShape(
        decoder,
        None if read_experts is None else read_experts(fields, decoder),
        read_activation(fields, _DEFAULT_ACTIVATION.get(architecture, "silu")),
    )


def windows_of_class(fields: ConfigFields, num_layers: int) -> list[int | None] | None:
    """Windows by layer, where a class has rules of its own that are said here; None for other classes."""
    read_windows = _WINDOWS.get(fields.model_config.architecture)
    return None if read_windows is None else read_windows(fields, num_layers)


def read_activation(fields: ConfigFields, default: str) -> str:
    """The activation of the networks, by its name in Transformers."""
    return next((str(fields.hf_config[name]) for name in _ACTIVATION if fields.hf_config.get(name)), default)


def read_rotated_share(fields: ConfigFields, architecture: str, layer_type: str = "") -> float:
    """Share of a head's dimensions that turn; in a file of today beside the other parameters of the rotation.

    layer_type: of layers that may have parameters of their own.
    """
    config = fields.hf_config
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and layer_type in rope:
        rope = rope[layer_type]
        if rope is None:
            return 0.0
    rope = rope if isinstance(rope, dict) else {}
    if rope.get("rope_type") == _TURNS_ALL:
        return 1.0
    for place in (rope, config):
        for name in _ROTATED_SHARE:
            if isinstance(place.get(name), (int, float)):
                return float(place[name])
    return _DEFAULT_ROTATED_SHARE.get(architecture, 1.0)


def _no_windows(_fields: ConfigFields, num_layers: int) -> list[int | None]:
    return [None] * num_layers


def _same_window(fields: ConfigFields, num_layers: int) -> list[int | None]:
    return [fields.optional_integer("sliding_window")] * num_layers


def _same_window_if_used(fields: ConfigFields, num_layers: int) -> list[int | None]:
    is_used = fields.flag("use_sliding_window", default=False)
    return [fields.optional_integer("sliding_window", 4096) if is_used else None] * num_layers


def _by_layer_types(
    fields: ConfigFields, num_layers: int, *, window: int | None, default: list[bool]
) -> list[int | None]:
    """default: whether each layer has the window, where `layer_types` is absent."""
    kinds = fields.layer_types(num_layers)
    has_window = default if kinds is None else [kind == "sliding_attention" for kind in kinds]
    return [window if has else None for has in has_window]


def _cohere2_windows(fields: ConfigFields, num_layers: int) -> list[int | None]:
    every = fields.integer("sliding_window_pattern", 4)
    default = [(layer + 1) % every != 0 for layer in range(num_layers)]
    return _by_layer_types(fields, num_layers, window=fields.optional_integer("sliding_window", 4096), default=default)


def _smollm3_windows(fields: ConfigFields, num_layers: int) -> list[int | None]:
    turns = fields.hf_config.get("no_rope_layers")
    every = fields.integer("no_rope_layer_interval", 4)
    if turns is None:
        turns = [(layer + 1) % every != 0 for layer in range(num_layers)]
    # Kinds that are named decide, since masks are made by them, even where `use_sliding_window` is false.
    window = fields.optional_integer("sliding_window")
    is_used = fields.flag("use_sliding_window", default=False)
    default = [is_used and not turned for turned in turns[:num_layers]]
    return _by_layer_types(fields, num_layers, window=window, default=default)


def _qwen2_moe_windows(fields: ConfigFields, num_layers: int) -> list[int | None]:
    is_used = fields.flag("use_sliding_window", default=False)
    window = fields.optional_integer("sliding_window", 4096) if is_used else None
    num_windowed = fields.count("max_window_layers", 28)
    default = [layer % 2 == 0 and layer < num_windowed for layer in range(num_layers)]
    return _by_layer_types(fields, num_layers, window=window, default=default)


def _gemma4_windows(fields: ConfigFields, num_layers: int) -> list[int | None]:
    default = [(layer + 1) % 6 != 0 for layer in range(num_layers)]
    windows = _by_layer_types(
        fields, num_layers, window=fields.optional_integer("sliding_window", 512), default=default
    )
    return [*windows[:-1], None]  # whatever the file says of the last one


def _modernbert_windows(fields: ConfigFields, num_layers: int) -> list[int | None]:
    every = fields.integer("global_attn_every_n_layers", 3)
    default = [layer % every != 0 for layer in range(num_layers)]
    window = fields.integer("local_attention", 128) // 2  # a token sees half of it, the other half was after it
    return _by_layer_types(fields, num_layers, window=window, default=default)


_WINDOWS: dict[str, ReadWindows] = {
    "Cohere2ForCausalLM": _cohere2_windows,
    "Gemma4ForCausalLM": _gemma4_windows,
    "Gemma4UnifiedForCausalLM": _gemma4_windows,
    "MixtralForCausalLM": _same_window,
    "ModernBertDecoderForCausalLM": _modernbert_windows,
    "MoshiForCausalLM": _no_windows,  # whatever the file says of one
    "Qwen2MoeForCausalLM": _qwen2_moe_windows,
    "Qwen3MoeForCausalLM": _same_window_if_used,
    "SmolLM3ForCausalLM": _smollm3_windows,
    "Starcoder2ForCausalLM": _same_window,
}


def _experts_everywhere(fields: ConfigFields, shape: ModelShape) -> Experts:
    """In every layer, each of the size that the only network would have."""
    return Experts(
        num_experts=_first_integer(fields, _NUM_EXPERTS),
        num_selected=fields.integer("num_experts_per_tok"),
        intermediate_size=shape.intermediate_size,
        shared_size=0,
        num_layers=shape.num_layers,
    )


def _qwen_experts(fields: ConfigFields, shape: ModelShape) -> Experts:
    """In some layers, of a size of their own."""
    dense = set(fields.hf_config.get("mlp_only_layers") or ())
    every = fields.integer("decoder_sparse_step", 1)
    is_sparse = [layer not in dense and (layer + 1) % every == 0 for layer in range(shape.num_layers)]
    has_shared = fields.model_config.architecture == "Qwen2MoeForCausalLM"
    return Experts(
        num_experts=_first_integer(fields, _NUM_EXPERTS),
        num_selected=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        shared_size=fields.integer("shared_expert_intermediate_size") if has_shared else 0,
        num_layers=sum(is_sparse),
    )


def _first_integer(fields: ConfigFields, names: tuple[str, ...]) -> int:
    return fields.integer(next((name for name in names if fields.hf_config.get(name) is not None), names[0]))


_EXPERTS: dict[str, Callable[[ConfigFields, ModelShape], Experts]] = {
    "MixtralForCausalLM": _experts_everywhere,
    "OlmoeForCausalLM": _experts_everywhere,
    "Qwen2MoeForCausalLM": _qwen_experts,
    "Qwen3MoeForCausalLM": _qwen_experts,
}
