"""A bias per request inside the MLP: a vector that is added to its activated features, chosen by an id in the message.

Suffixes: T tokens of the step, B biases, D hidden size, I activated features of this rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.contract import NewRequestData, Part, part_of
from penstock.contract.feature import Feature, register_feature
from penstock.kernels.embedding import embedding
from penstock.kernels.rows import sum_rows
from penstock.layers.mlp import GatedMLP
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, DecoderForCausalLM, DecoderLayer, DecoderModel, SelfAttention
from penstock.models.registry import register_model
from penstock.parallel import ParallelState
from penstock.runner.slot_owner import SlotOwner
from penstock.step.inputs import StepInput
from penstock.worker.feature import WorkerServices

if TYPE_CHECKING:
    from penstock.step.frame import Frame

ARCHITECTURE = "BiasedLlamaForCausalLM"
INPUT = "mlp_bias_rows"
NUM_BIASES = 4


class BiasPart(Part, frozen=True, kw_only=True):
    """The bias of a request; cached prefixes are shared by requests of the same one only."""

    feature = "mlp_bias"
    bias_id: int

    def block_keys(self) -> tuple[str, ...]:
        return (str(self.bias_id),)


class BiasRows(SlotOwner):
    """The bias of each slot; 0 stands for none."""

    step_inputs = (StepInput(INPUT, torch.int32),)

    def __init__(self, num_slots: int, model: BiasedLlamaForCausalLM) -> None:
        self._bias_ids = np.zeros(num_slots, dtype=np.int32)
        for module in model.modules():
            if isinstance(module, BiasedMLP):
                module.load_biases()

    def add(self, slot: int, request: NewRequestData) -> None:
        part = part_of(request.parts, BiasPart)
        self._bias_ids[slot] = 0 if part is None else part.bias_id

    def remove(self, slot: int) -> None:
        self._bias_ids[slot] = 0

    def has_work(self, frame: Frame) -> bool:
        return bool(self._bias_ids[frame.batch.layout.slots_np].any())

    def fill(self, frame: Frame) -> None:
        layout = frame.batch.layout
        rows = np.repeat(self._bias_ids[layout.slots_np], layout.counts_np)
        frame.inputs.named[INPUT][: len(rows)].copy_(torch.from_numpy(rows))


class BiasedMLP(GatedMLP):
    """down(activation(gate(x)) * up(x) + bias of the row's request)."""

    def __init__(self, config: DecoderConfig, index: int, parallel: ParallelState) -> None:
        sizes = config.hidden_size, config.intermediate_size
        super().__init__(*sizes, activation=config.activation, bias=False, parallel=parallel)
        self._size, self._index, self._rank = config.intermediate_size, index, parallel.tensor.rank

    def load_biases(self) -> None:
        """Fill the table, [B, I]; its first row stands for no bias."""
        generator = torch.Generator().manual_seed(self._index)
        values_BX = torch.randn(NUM_BIASES, self._size, generator=generator) * 0.3
        values_BX[0] = 0
        size = self.down_proj.input_size
        own_BI = values_BX[:, self._rank * size :][:, :size]
        self.biases_BI = own_BI.contiguous().to(next(self.parameters()).device)

    def activated(self, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        features_TI, rows_T = super().activated(hidden_TD, context), context.input(INPUT)
        if rows_T is None:
            return features_TI
        return sum_rows(features_TI, embedding(rows_T, self.biases_BI, features_TI.dtype))


class BiasedLayer(DecoderLayer):
    def __init__(self, config: DecoderConfig, index: int, parallel: ParallelState) -> None:
        attention = SelfAttention(config, index, parallel, qkv_bias=False, output_bias=False)
        super().__init__(config, attention, parallel)
        self.mlp = BiasedMLP(config, index, parallel)


class BiasedLlamaForCausalLM(DecoderForCausalLM):
    """Llama with a bias per request."""

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        config = DecoderConfig.read(ConfigFields(model_config))
        model = DecoderModel(config, parallel, lambda index: BiasedLayer(config, index, parallel))
        super().__init__(config, parallel, model)


def make_bias_rows(services: WorkerServices) -> BiasRows | None:
    """The owner for a model with biases."""
    model = services.model
    return BiasRows(services.num_slots, model) if isinstance(model, BiasedLlamaForCausalLM) else None


def register() -> None:
    register_model(ARCHITECTURE, BiasedLlamaForCausalLM)
    register_feature(Feature(name="mlp_bias", parts=(BiasPart,), worker_side=make_bias_rows))
