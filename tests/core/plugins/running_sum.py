"""A recurrent layer between attention layers: a decaying sum of each request's hidden states, of 1 MiB.

Its state lies in pages of its own size. A request has one for each position that drafts may take back, and goes on from
a snapshot where it shares a prefix. The ranks of a tensor-parallel group keep an equal part each.
Suffixes: N pages, K rows and C columns of a state, R requests, T tokens, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.attention import CacheBackend, ForwardContext, StepGeometry
from penstock.config import ModelConfig
from penstock.contract import RecurrentStateSpec
from penstock.kernels.recurrent_state import state_pages
from penstock.kernels.rotary import Rotation
from penstock.kernels.rows import sum_rows
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, DecoderForCausalLM, DecoderLayer, DecoderModel, SelfAttention
from penstock.models.registry import register_model
from penstock.parallel import ParallelState

ARCHITECTURE = "RunningSumForCausalLM"
NUM_ROWS = NUM_COLUMNS = 512


class RunningSumBackend(CacheBackend):
    """Backend whose metadata has tensors only."""

    name = "running_sum"
    keeps_metadata = True
    is_capturable = True

    def view_pages(self, pages_NX: Tensor, spec: RecurrentStateSpec) -> Tensor:
        return pages_NX.view(torch.float32).unflatten(1, (NUM_ROWS, -1))

    def make_metadata(self, geometry: StepGeometry) -> StepGeometry:
        return geometry


@dataclass(frozen=True, slots=True)
class RunningSumLayer:
    name: str

    def make_backend(self, device: torch.device) -> CacheBackend:
        return RunningSumBackend()


class RunningSum(nn.Module):
    """Sums the hidden states of a request's tokens, in rows of different weight, of which each token reads one."""

    def __init__(self, index: int, parallel: ParallelState) -> None:
        super().__init__()
        self.layer = RunningSumLayer(f"model.layers.{index}.running_sum")
        self._group = parallel.tensor

    def get_kv_cache_spec(self, block_size: int, dtype: str) -> RecurrentStateSpec:
        state_bytes = NUM_ROWS * NUM_COLUMNS * 4 // self._group.size
        return RecurrentStateSpec(state_bytes=state_bytes, block_size=block_size, rolls_back=True)

    def forward(self, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        (sums_TD,) = context.opaque(self.scan, hidden_TD, widths=[hidden_TD.stride(0)])
        return sum_rows(hidden_TD, sums_TD)

    def scan(self, context: ForwardContext, hidden_TD: Tensor) -> list[Tensor]:
        """Token after token of all requests at once, elementwise, so that bits depend on nothing else."""
        states_NKC, step = context.cache_of(self.layer.name)
        pages = state_pages(
            step.block_table,
            step.query_start_loc,
            step.seq_lens,
            step.slot_mapping,
            num_own_blocks=step.num_own_blocks,
            block_size=step.block_size,
        )
        rank, size = self._group.rank, self._group.size
        (num_tokens, hidden_size), device = hidden_TD.shape, hidden_TD.device
        weights_K1 = torch.linspace(0.1, 1.0, NUM_ROWS, device=device).unsqueeze(1)
        values_TC = hidden_TD.repeat(1, -(-NUM_COLUMNS // hidden_size))[:, rank:NUM_COLUMNS:size]
        starts_R = step.query_start_loc[:-1].long()
        ends_R, first_R = step.query_start_loc[1:].long(), step.seq_lens.long() - step.query_start_loc.diff()
        is_begun_R11 = (pages.before_R > 0).view(-1, 1, 1)
        states_RKC = torch.where(is_begun_R11, states_NKC[pages.before_R], 0.0)
        # One row more, for requests with fewer tokens than others.
        sums_TD = torch.zeros(num_tokens + 1, hidden_size, device=device)
        for offset in range(step.max_query_len):
            is_there_R = starts_R + offset < ends_R
            tokens_R = torch.where(is_there_R, starts_R + offset, num_tokens - 1)
            states_RKC = states_RKC * 0.875 + weights_K1 * values_TC[tokens_R].unsqueeze(1)
            for pages_T in (pages.own_T, pages.snapshots_T):
                # Page 0 takes what is not kept.
                states_NKC[torch.where(is_there_R, pages_T[tokens_R], 0)] = states_RKC
            rows_R = (first_R + offset) * 7 % NUM_ROWS
            read_RC = states_RKC[torch.arange(len(rows_R), device=device), rows_R, : hidden_size // size]
            sums_TD[torch.where(is_there_R, tokens_R, num_tokens), rank::size] = read_RC.tanh() * 0.1
        return [self._group.all_reduce(sums_TD[:-1].contiguous())]


class SummingLayer(DecoderLayer):
    """A decoder layer, and a running sum of what comes out of it."""

    def __init__(self, config: DecoderConfig, index: int, parallel: ParallelState) -> None:
        attention = SelfAttention(config, index, parallel, qkv_bias=False, output_bias=False)
        super().__init__(config, attention, parallel)
        self.running_sum = RunningSum(index, parallel)

    def forward(
        self, hidden_TD: Tensor, residual_TD: Tensor | None, rotation: Rotation, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        hidden_TD, residual_TD = super().forward(hidden_TD, residual_TD, rotation, context)
        return self.running_sum(hidden_TD, context), residual_TD


class RunningSumForCausalLM(DecoderForCausalLM):
    """Llama with a running sum behind its first layer."""

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        config = DecoderConfig.read(ConfigFields(model_config))

        def layer(index: int) -> DecoderLayer:
            if index == 0:
                return SummingLayer(config, index, parallel)
            attention = SelfAttention(config, index, parallel, qkv_bias=False, output_bias=False)
            return DecoderLayer(config, attention, parallel)

        super().__init__(config, parallel, DecoderModel(config, parallel, layer))


def register() -> None:
    register_model(ARCHITECTURE, RunningSumForCausalLM)
