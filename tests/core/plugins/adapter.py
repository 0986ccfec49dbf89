"""An adapter per request: a vector that is added to the output of every attention, chosen by an id in the message.

Suffixes: T tokens of the step, A adapters, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.contract import NewRequestData, Part, part_of
from penstock.contract.feature import Feature, register_feature
from penstock.kernels.embedding import embedding
from penstock.kernels.rotary import Rotation
from penstock.kernels.rows import sum_rows
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, DecoderForCausalLM, DecoderLayer, DecoderModel, SelfAttention
from penstock.models.registry import register_model
from penstock.parallel import ParallelState
from penstock.runner.slot_owner import SlotOwner
from penstock.step.inputs import StepInput
from penstock.worker.feature import WorkerServices

if TYPE_CHECKING:
    from penstock.step.frame import Frame

ARCHITECTURE = "AdaptedLlamaForCausalLM"
INPUT = "adapter_rows"
NUM_ADAPTERS = 4


class AdapterPart(Part, frozen=True, kw_only=True):
    """The adapter of a request; cached prefixes are shared by requests of the same one only."""

    feature = "adapter"
    adapter_id: int

    def block_keys(self) -> tuple[str, ...]:
        return (str(self.adapter_id),)


class AdapterRows(SlotOwner):
    """The adapter of each slot; 0 stands for none."""

    step_inputs = (StepInput(INPUT, torch.int32),)

    def __init__(self, num_slots: int, model: AdaptedLlamaForCausalLM) -> None:
        self._adapter_ids = np.zeros(num_slots, dtype=np.int32)
        for module in model.modules():
            if isinstance(module, AdaptedAttention):
                module.load_adapters()

    def add(self, slot: int, request: NewRequestData) -> None:
        part = part_of(request.parts, AdapterPart)
        if part is not None and not 0 < part.adapter_id < NUM_ADAPTERS:
            raise ValueError(f"adapter_id={part.adapter_id} is not loaded. Loaded: 1 to {NUM_ADAPTERS - 1}.")
        self._adapter_ids[slot] = 0 if part is None else part.adapter_id

    def remove(self, slot: int) -> None:
        self._adapter_ids[slot] = 0

    def has_work(self, frame: Frame) -> bool:
        return bool(self._adapter_ids[frame.batch.layout.slots_np].any())

    def fill(self, frame: Frame) -> None:
        layout = frame.batch.layout
        rows = np.repeat(self._adapter_ids[layout.slots_np], layout.counts_np)
        frame.inputs.named[INPUT][: len(rows)].copy_(torch.from_numpy(rows))


class AdaptedAttention(SelfAttention):
    """Attention whose output, summed over ranks, gets the vector of each token's adapter."""

    def __init__(self, config: DecoderConfig, index: int, parallel: ParallelState) -> None:
        super().__init__(config, index, parallel, qkv_bias=False, output_bias=False)
        self.size, self.index = config.hidden_size, index

    def load_adapters(self) -> None:
        """Fill the table, [A, D]; its first row stands for no adapter."""
        generator = torch.Generator().manual_seed(self.index)
        values = torch.randn(NUM_ADAPTERS, self.size, generator=generator) * 0.3
        self.adapters = values.to(next(self.parameters()).device)
        self.adapters[0] = 0

    def forward(self, hidden_TD: Tensor, rotation: Rotation, context: ForwardContext) -> Tensor:
        out_TD = super().forward(hidden_TD, rotation, context)
        rows_T = context.input(INPUT)
        if rows_T is None:
            return out_TD
        return sum_rows(out_TD, embedding(rows_T, self.adapters, out_TD.dtype))


class AdaptedLlamaForCausalLM(DecoderForCausalLM):
    """Llama with adapters."""

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        config = DecoderConfig.read(ConfigFields(model_config))

        def layer(index: int) -> DecoderLayer:
            return DecoderLayer(config, AdaptedAttention(config, index, parallel), parallel)

        super().__init__(config, parallel, DecoderModel(config, parallel, layer))


def make_adapter_rows(services: WorkerServices) -> AdapterRows | None:
    """The owner for a model with adapters."""
    model = services.model
    return AdapterRows(services.num_slots, model) if isinstance(model, AdaptedLlamaForCausalLM) else None


def scale_adapters(model: nn.Module, factor: float) -> None:
    """Multiply all adapters, in place."""
    for module in model.modules():
        if isinstance(module, AdaptedAttention):
            module.adapters.mul_(factor)


def register() -> None:
    register_model(ARCHITECTURE, AdaptedLlamaForCausalLM)
    register_feature(Feature(name="adapter", parts=(AdapterPart,), worker_side=make_adapter_rows))
