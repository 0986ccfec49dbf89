"""A recurrent layer between attention layers: a running sum of each request's hidden states.

Its state lies in pages of its own kind. A page holds the sums after the last few positions of a block, so that drafts
can be taken back, and after the block's last position, from which a request with a cached prefix goes on.
Suffixes: N blocks, P states of a page, W width, T tokens, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from penstock.attention import CacheBackend, ForwardContext, StepGeometry
from penstock.config import ModelConfig
from penstock.kernels.rotary import Rotation
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, DecoderForCausalLM, DecoderLayer, DecoderModel, SelfAttention
from penstock.models.registry import register_model
from penstock.parallel import ParallelState
from penstock.scheduler.block_pool import KVCacheBlock
from penstock.scheduler.kv_cache_groups import KVCacheGroup, register_kv_cache_group

ARCHITECTURE = "RunningSumForCausalLM"
# States of a page: more than a step has drafts.
NUM_STATES = 8
WIDTH = 16


class RunningSumSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A page per block of tokens: the sums after the last `NUM_STATES` positions that were computed in it."""

    block_size: int
    width: int = WIDTH
    padding_bytes: int = 0

    @property
    def page_size_bytes(self) -> int:
        return NUM_STATES * self.width * 4 + self.padding_bytes

    def with_pages_of(self, page_size_bytes: int) -> Self | None:
        padding = page_size_bytes - NUM_STATES * self.width * 4
        return None if padding < 0 else msgspec.structs.replace(self, padding_bytes=padding)

    def table_width(self, max_model_len: int) -> int:
        return math.ceil(max_model_len / self.block_size)

    def max_blocks_per_request(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        return self.table_width(max_model_len)


class RunningSumGroup(KVCacheGroup):
    """Blocks of running sums: a cached prefix needs its last block alone."""

    shares_in_step = False

    def find_hit(self, block_hashes: Sequence[bytes], max_num_tokens: int) -> list[KVCacheBlock]:
        for end in range(max_num_tokens // self.block_size, 0, -1):
            block = self.find(block_hashes, end - 1)
            if block is not None:
                return [self._pool.null_block] * (end - 1) + [block]
        return []


@dataclass(frozen=True, slots=True)
class RunningSums:
    """A step's requests: tokens from `starts[i]` to `starts[i + 1]`, the last of `seq_lens[i]` positions."""

    starts: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    block_size: int


class RunningSumBackend(CacheBackend):
    name = "running_sum"

    def view_pages(self, pages_NX: Tensor, spec: Any) -> Tensor:
        return pages_NX.view(torch.float32)[:, : NUM_STATES * spec.width].unflatten(1, (NUM_STATES, spec.width))

    def make_metadata(self, geometry: StepGeometry) -> RunningSums:
        num_reqs = geometry.num_actual_reqs
        return RunningSums(
            geometry.query_start_loc_np[: num_reqs + 1],
            geometry.seq_lens[:num_reqs].cpu().numpy(),
            geometry.block_table[:num_reqs].cpu().numpy(),
            geometry.block_size,
        )


@dataclass(frozen=True, slots=True)
class RunningSumLayer:
    name: str

    def make_backend(self, device: torch.device) -> CacheBackend:
        return RunningSumBackend()


class RunningSum(nn.Module):
    """Adds to the first hidden values of each token, scaled, the sum over the request's tokens up to it."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer = RunningSumLayer(f"model.layers.{index}.running_sum")

    def get_kv_cache_spec(self, block_size: int, dtype: str) -> RunningSumSpec:
        return RunningSumSpec(block_size=block_size)

    def forward(self, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        (out_TD,) = context.opaque(self.scan, hidden_TD, widths=[hidden_TD.stride(0)])
        return out_TD

    def scan(self, context: ForwardContext, hidden_TD: Tensor) -> list[Tensor]:
        """A strict left fold over each request's tokens, whatever its chunks."""
        states_NPW, step = context.cache_of(self.layer.name)
        out_TD = hidden_TD.clone()
        for index, seq_len in enumerate(step.seq_lens.tolist()):
            begin, end = int(step.starts[index]), int(step.starts[index + 1])
            position = seq_len - (end - begin)
            state_W = torch.zeros(WIDTH, device=hidden_TD.device)
            if position > 0:
                before = position - 1
                state_W = states_NPW[step.block_table[index, before // step.block_size], before % NUM_STATES]
            for token in range(begin, end):
                state_W = state_W + hidden_TD[token, :WIDTH]
                states_NPW[step.block_table[index, position // step.block_size], position % NUM_STATES] = state_W
                out_TD[token, :WIDTH] += 0.1 * state_W.tanh()
                position += 1
        return [out_TD]


class SummingLayer(DecoderLayer):
    """A decoder layer, and a running sum of what comes out of it."""

    def __init__(self, config: DecoderConfig, index: int, parallel: ParallelState) -> None:
        attention = SelfAttention(config, index, parallel, qkv_bias=False, output_bias=False)
        super().__init__(config, attention, parallel)
        self.running_sum = RunningSum(index)

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
    register_kv_cache_group(RunningSumSpec, RunningSumGroup)
