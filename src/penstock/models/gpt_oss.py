"""gpt-oss (OpenAI 2025, https://arxiv.org/abs/2508.10925)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from penstock.config import ModelConfig
from penstock.kernels.activation import ClampedSwiglu
from penstock.models.config_fields import FULL, SLIDING, ConfigFields, read_layer_kinds, windows_of
from penstock.models.decoder import DECODER_WEIGHTS, DecoderConfig, plain_decoder
from penstock.models.mixtures import ExpertNames, MixtureForCausalLM, mixtures, read_routing
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState

_STACKED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(|_bias|_blocks|_scales)")
# Names of an expert's tensors, by the end of the stacked tensor's name.
_PARAMETERS = {"": "weight", "_bias": "bias", "_blocks": "weight_blocks", "_scales": "weight_scales"}
# Defaults of absent fields.
_DEFAULT_HEAD_SIZE = 64
_DEFAULT_WINDOW = 128
_DEFAULT_ALPHA = 1.702
_DEFAULT_LIMIT = 7.0


class GptOssForCausalLM(MixtureForCausalLM):
    """Experts with biases and a clamped SwiGLU in every layer; attention sinks; a window in every second layer."""

    weight_table: ClassVar[WeightTable] = {
        **DECODER_WEIGHTS,
        "model.layers.*.self_attn": Into("model.layers.*.self_attn.sinks"),
    }
    expert_names: ClassVar[ExpertNames] = ExpertNames(router="router", stacked_router="router")
    gate_up_alternate: ClassVar[bool] = True

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields, default_head_size=_DEFAULT_HEAD_SIZE)
        # The softmax over all experts, normalised over the chosen ones, is the softmax over these.
        routing = read_routing(fields, normalizes=True)
        alternating = [FULL if layer % 2 else SLIDING for layer in range(config.num_layers)]
        kinds = read_layer_kinds(fields, default=alternating)
        layers, bias = list(range(config.num_layers)), fields.flag("attention_bias", default=True)
        activation = ClampedSwiglu(
            float(fields.number("swiglu_alpha", default=_DEFAULT_ALPHA)),
            float(fields.number("swiglu_limit", default=_DEFAULT_LIMIT)),
        )
        model = plain_decoder(
            config,
            parallel,
            qkv_bias=bias,
            output_bias=bias,
            windows=windows_of(fields, kinds, fields.optional_integer("sliding_window", default=_DEFAULT_WINDOW)),
            has_sinks=True,
            moe=mixtures(config, routing, config.intermediate_size, parallel, layers, activation=activation, bias=True),
        )
        super().__init__(config, parallel, model, layers, routing)

    def pieces(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Cut the tensors of all experts: outputs of gate and up alternate, float matrices are [inputs, outputs]."""
        stacked = _STACKED_EXPERTS.fullmatch(name)
        if stacked is None:
            yield from super().pieces(name, tensor)
            return
        prefix, projection, ending = stacked.groups()
        parameter = _PARAMETERS[ending]
        for expert, of_expert in enumerate(tensor):
            by_output = of_expert if ending else of_expert.t()
            if projection == "down_proj":
                yield f"{prefix}.{expert}.down_proj.{parameter}", by_output
                continue
            yield f"{prefix}.{expert}.gate_proj.{parameter}", by_output[::2]
            yield f"{prefix}.{expert}.up_proj.{parameter}", by_output[1::2]
