"""State-space layers in `config.json`: settings of Mamba 2 under the names of its hybrids, and kinds of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.checkpoints.json_file import decode_floats
from penstock.errors import ModelError
from penstock.layers.recurrence.state_space import StateSpace
from penstock.models.config_fields import FULL, ConfigFields
from penstock.models.weights import Into, WeightTable

STATE_SPACE = "linear_attention"
_LAYER_NAMES = {"mamba": STATE_SPACE, "attention": FULL, STATE_SPACE: STATE_SPACE, FULL: FULL}
_ACTIVATIONS = "silu", "swish"


def read_state_space(
    fields: ConfigFields, hidden_size: int, norm_eps: float, inner_size: int | None = None
) -> StateSpace:
    """Settings of the layers in the fields `mamba_…` (Granite, Bamba, Falcon-H1).

    inner_size: features of all heads; None for `mamba_expand` times the hidden size.
    Raises ModelError for sizes that contradict each other, UnsupportedFeature for other activations.
    """
    fields.choice("hidden_act", _ACTIVATIONS, "silu")
    num_heads = fields.integer("mamba_n_heads", default=128)
    inner_size = inner_size or fields.integer("mamba_expand", default=2) * hidden_size
    head_size = fields.hf_config.get("mamba_d_head") or "auto"
    min_step, max_step = read_step_limits(fields)
    return checked(
        fields,
        inner_size,
        StateSpace(
            num_heads=num_heads,
            head_size=inner_size // num_heads if head_size == "auto" else fields.integer("mamba_d_head"),
            num_groups=fields.integer("mamba_n_groups", default=1),
            state_size=fields.integer("mamba_d_state", default=256),
            kernel_size=fields.integer("mamba_d_conv", default=4),
            min_step=min_step,
            max_step=max_step,
            bias=fields.flag("mamba_proj_bias", default=False),
            output_bias=fields.flag("mamba_proj_bias", default=False),
            convolution_bias=fields.flag("mamba_conv_bias", default=True),
            norm_eps=norm_eps,
        ),
    )


def checked(fields: ConfigFields, inner_size: int, sizes: StateSpace) -> StateSpace:
    """Return the settings. Raises ModelError where heads are not `inner_size`, or groups do not divide them."""
    if sizes.inner_size != inner_size or sizes.num_heads % sizes.num_groups:
        raise ModelError(
            f"{fields.source} has state-space layers of {sizes.num_heads} heads of {sizes.head_size} in "
            f"{sizes.num_groups} groups. They must have {inner_size} features together, in groups that divide them."
        )
    return sizes


def read_step_limits(fields: ConfigFields) -> tuple[float, float]:
    """Smallest and largest time step, of `time_step_limit`."""
    limits = decode_floats(fields.hf_config.get("time_step_limit"))
    if limits is None:
        return 0.0, float("inf")
    if not isinstance(limits, Sequence) or len(limits) != 2 or not all(isinstance(one, (int, float)) for one in limits):
        raise fields.unsupported("time_step_limit", limits, "a list of the smallest and the largest time step")
    return float(limits[0]), float(limits[1])


def read_hybrid_kinds(
    fields: ConfigFields, num_layers: int, names: Mapping[str, str] = _LAYER_NAMES
) -> list[str] | None:
    """Kind of each layer, of `layer_types` or `layers_block_type`; None where there is neither.

    names: of kinds in configurations. Raises UnsupportedFeature for another one.
    """
    field = "layer_types" if fields.hf_config.get("layer_types") is not None else "layers_block_type"
    kinds: Any = fields.hf_config.get(field)
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= set(names):
        raise fields.unsupported(field, kinds, f"a list of num_hidden_layers={num_layers} of {', '.join(names)}")
    return [names[kind] for kind in kinds]


def state_space_weights(theirs: str, ours: str) -> WeightTable:
    """Weights of a Mamba 2 layer with these names in the checkpoint and in the model."""
    parts = ("in_proj", "conv1d", "norm", "out_proj")
    return {theirs: Into(ours), **{f"{theirs}.{part}": Into(f"{ours}.{part}") for part in parts}}


def read_step_rank(fields: ConfigFields, name: str, hidden_size: int) -> int:
    """Features that time steps of Mamba are made of: of this field, by default a 16th of the hidden size."""
    return -(-hidden_size // 16) if fields.hf_config.get(name, "auto") == "auto" else fields.integer(name)


def selective_weights(theirs: str, ours: str) -> WeightTable:
    """Weights of a Mamba layer with these names in the checkpoint and in the model."""
    parts = ("in_proj", "conv1d", "x_proj", "dt_proj", "out_proj")
    return {theirs: Into(ours), **{f"{theirs}.{part}": Into(f"{ours}.{part}") for part in parts}}
