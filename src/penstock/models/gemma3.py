"""Gemma 3, the text model (Gemma team 2025, https://arxiv.org/abs/2503.19786)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from penstock.config import ModelConfig
from penstock.errors import ModelError
from penstock.layers.norm import RoundedLastQueryKeyNorm
from penstock.layers.rope_scaling import RopeParameters, read_rope_parameters
from penstock.models.config_fields import ConfigFields
from penstock.models.gemma_decoder import NORM_WEIGHT_OFFSET, GemmaForCausalLM, read_gemma_config
from penstock.models.layer_kinds import FULL, SLIDING, read_layer_kinds
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState

# Default of an absent field.
_DEFAULT_PATTERN = 6
# Old field of the rotary base and its default, by attention type.
_THETA = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}


class Gemma3ForCausalLM(GemmaForCausalLM):
    """Gemma's decoder with query and key norms, and two attention types.

    Most layers have a sliding window and a small rotary base; every sixth has full attention and a large base.
    """

    weight_table: ClassVar[WeightTable] = {
        **GemmaForCausalLM.weight_table,
        "model.layers.*.self_attn.q_norm": Into("model.layers.*.self_attn.query_key_norm", shard="q"),
        "model.layers.*.self_attn.k_norm": Into("model.layers.*.self_attn.query_key_norm", shard="k"),
    }

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = read_gemma_config(fields, rope=lambda head_size: _read_rope(fields, FULL, head_size))
        pattern = fields.integer("sliding_window_pattern", default=_DEFAULT_PATTERN)
        patterned = [SLIDING if (layer + 1) % pattern else FULL for layer in range(config.num_layers)]
        kinds = read_layer_kinds(fields, default=patterned)
        ropes = {FULL: config.rope, SLIDING: _read_rope(fields, SLIDING, config.head_size)}
        if fields.optional_number("attn_logit_softcapping") is not None:
            raise fields.unsupported(
                "attn_logit_softcapping", fields.hf_config["attn_logit_softcapping"], "null, as in all Gemma 3 models"
            )

        super().__init__(
            fields,
            config,
            parallel,
            kinds,
            query_key_norm=partial(RoundedLastQueryKeyNorm, weight_offset=NORM_WEIGHT_OFFSET),
            logits_soft_cap=fields.optional_number("final_logit_softcapping"),
            ropes=[ropes[kind] for kind in kinds],
        )


def _read_rope(fields: ConfigFields, kind: str, head_size: int) -> RopeParameters:
    """Read the rotary embedding of one attention type.

    Transformers 5 has `rope_parameters` with an object for each type. Older files have two bases, and `rope_scaling`
    for full attention only.
    """
    by_kind = _object(fields, "rope_parameters")
    if not set(by_kind) <= set(_THETA) or not all(isinstance(value, Mapping | None) for value in by_kind.values()):
        raise ModelError(
            f"config.json of {fields.model_config.model} has rope_parameters={by_kind!r}. "
            f"It must have an object for each kind of layer: {', '.join(_THETA)}."
        )
    settings = dict(by_kind.get(kind) or {})
    if kind == FULL:
        settings.update(_object(fields, "rope_scaling"))
    old_field, default = _THETA[kind]
    settings.setdefault("rope_theta", fields.number(old_field, default=default))
    others = ("rope_parameters", "rope_scaling", "rope_theta")
    content = {name: value for name, value in fields.hf_config.items() if name not in others}
    return read_rope_parameters(
        {**content, "rope_parameters": settings}, head_size=head_size, num_positions=fields.num_positions
    )


def _object(fields: ConfigFields, name: str) -> Mapping[str, Any]:
    value = fields.hf_config.get(name) or {}
    if not isinstance(value, Mapping):
        raise ModelError(f"config.json of {fields.model_config.model} has {name}={value!r}. It must be an object.")
    return value
