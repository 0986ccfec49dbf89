"""A Llama some of whose layers mix tokens by a state-space recurrence instead of attention.

Suffixes: T tokens, D hidden size, X columns of projections.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.plugins import write_checkpoint
from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.kernels.recurrence import ScanParameters, ScanRule
from penstock.kernels.rotary import Rotation
from penstock.layers.parallel_linear import QKVParallelLinear, RowParallelLinear, rows_of_rank
from penstock.layers.recurrence.modules import CausalConvolution, GatedNorm
from penstock.layers.recurrence.operations import scan
from penstock.layers.recurrence.state import RecurrentMixer, RecurrentState, output_rows
from penstock.layers.weights import WeightSlot, new_parameter
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, DecoderForCausalLM, DecoderLayer, DecoderModel, SelfAttention
from penstock.models.registry import register_model
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState, heads_of_rank

# Layers that mix by a recurrence, by architecture.
ARCHITECTURES = {"MixerFirstForCausalLM": (0,), "MixerLastForCausalLM": (1,), "MixersOnlyForCausalLM": (0, 1)}


class Mixer(RecurrentMixer):
    """Values, steps and gates are the projection to queries; keys and queries are those to keys and values."""

    def __init__(self, config: DecoderConfig, index: int, parallel: ParallelState) -> None:
        super().__init__()
        size, hidden_size = config.head_size, config.hidden_size
        self.qkv_proj = QKVParallelLinear(
            hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=size,
            bias=False,
            parallel=parallel,
        )
        heads, groups = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        columns = heads * size, groups * size, groups * size
        self.convolution = CausalConvolution(list(self.qkv_proj.output_shares.values()), 4, bias=True)
        self.norm = GatedNorm(
            self.qkv_proj.output_shares["q"],
            config.norm_eps,
            group_size=size,
            gates_first=False,
            group=parallel.tensor,
            is_shared=True,
        )
        self.rule = ScanRule(
            num_groups=groups,
            values=0,
            keys=columns[0],
            queries=columns[0] + columns[1],
            steps=0,
            step_size="value",
            scales_values=True,
            has_unit_keys=True,
            query_scale=size**-0.5,
        )
        self.A_log = new_parameter(heads)
        self._heads, _ = heads_of_rank(config.num_heads, config.num_kv_heads, parallel.tensor)
        self.o_proj = RowParallelLinear(config.num_heads * size, hidden_size, bias=False, parallel=parallel)
        self.layer = RecurrentState(
            name=f"model.layers.{index}.self_attn",
            convolution=self.convolution.state,
            scan=(heads, size, size),
        )

    def slots(self) -> dict[str, WeightSlot]:
        return {"A_log": rows_of_rank(self.A_log, self._heads)}

    def forward(self, hidden_TD: Tensor, _: Rotation, context: ForwardContext) -> Tensor:
        rows_TX = self.qkv_proj(context.whole(hidden_TD), context.of_all_tokens())
        mixed_TX = self.convolution(self.layer, rows_TX, context)
        y_TX = scan(self.layer, mixed_TX, rows_TX, context, self.rule, ScanParameters(self.A_log))
        y_TX, rows_TX = output_rows(y_TX, context), output_rows(rows_TX, context)
        return self.o_proj(self.norm(y_TX, rows_TX, context), context)  # type: ignore[no-any-return]


class MixerForCausalLM(DecoderForCausalLM):
    weights_of_kinds: ClassVar[Mapping[str, WeightTable]] = {
        "mixer": {
            "model.layers.*.self_attn": Into("model.layers.*.self_attn"),
            "model.layers.*.self_attn.conv1d": Into("model.layers.*.self_attn.convolution"),
            "model.layers.*.self_attn.norm": Into("model.layers.*.self_attn.norm"),
        }
    }

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields)
        mixers = ARCHITECTURES[fields.hf_config["architectures"][0]]

        def layer(index: int) -> DecoderLayer:
            if index in mixers:
                return DecoderLayer(config, Mixer(config, index, parallel), parallel)
            attention = SelfAttention(config, index, parallel, qkv_bias=False, output_bias=False)
            return DecoderLayer(config, attention, parallel)

        super().__init__(config, parallel, DecoderModel(config, parallel, layer))
        self.layer_kinds = ["mixer" if index in mixers else "attention" for index in range(config.num_layers)]


def write_mixer_checkpoint(folder: Path, architecture: str) -> Path:
    """A tiny Llama with the weights of its mixers."""
    write_checkpoint(folder, architecture)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    generator = torch.Generator().manual_seed(2)
    for index in ARCHITECTURES[architecture]:
        prefix = f"model.layers.{index}.self_attn"
        num_channels = sum(len(weights[f"{prefix}.{name}_proj.weight"]) for name in "qkv")
        weights |= {
            f"{prefix}.A_log": torch.randn(4, generator=generator),
            f"{prefix}.conv1d.weight": torch.randn(num_channels, 1, 4, generator=generator),
            f"{prefix}.conv1d.bias": torch.randn(num_channels, generator=generator),
            f"{prefix}.norm.weight": torch.rand(16, generator=generator),
        }
    save_file(weights, file, {"format": "pt"})
    return folder


def register() -> None:
    for architecture in ARCHITECTURES:
        register_model(architecture, MixerForCausalLM)
