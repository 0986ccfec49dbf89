"""Pages of other layers: a recurrent state beside attention, and a model without pages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.attention import CacheBackend, ForwardContext, StepGeometry
from penstock.attention.base import BringsBackend
from penstock.config import DeviceConfig
from penstock.contract import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    NewRequestData,
    RecurrentStateSpec,
    decode,
    encode,
)
from penstock.device import create_device
from penstock.models.attention_layers import KeepsCache, cache_layers, kv_cache_specs
from penstock.runner.block_tables import BlockTables
from penstock.runner.model_runner import ModelRunner, RunnerLimits
from support.runners import GREEDY, LAYER, VOCAB_SIZE, ArithmeticModel, Driver, kv_cache_config, next_token

NUM_BLOCKS = 12
PROMPT = [5, 17, 3, 88, 41, 9, 2, 60, 33, 7]


@dataclass(frozen=True, slots=True)
class StateMetadata:
    """Per request: the page of its state, its tokens of this step, and whether they are its first."""

    pages: list[int]
    starts: list[int]
    begins: list[bool]


class StateBackend(CacheBackend):
    name = "running_sum"

    def view_pages(self, pages_NX: Tensor, spec: RecurrentStateSpec) -> Tensor:
        return pages_NX[:, : spec.state_bytes].view(torch.int64)

    def make_metadata(self, geometry: StepGeometry) -> StateMetadata:
        num_reqs = geometry.num_actual_reqs
        starts = geometry.query_start_loc_np[: num_reqs + 1].tolist()
        counts = [stop - start for start, stop in itertools.pairwise(starts)]
        lengths = geometry.seq_lens[:num_reqs].tolist()
        begins = [length == count for length, count in zip(lengths, counts, strict=True)]
        return StateMetadata(geometry.block_table[:num_reqs, 0].tolist(), starts, begins)


@dataclass(frozen=True, slots=True)
class RunningSumLayer:
    """The sum of 3 * sum + token over all tokens so far, modulo the vocabulary."""

    name: str

    def make_backend(self, device: torch.device) -> StateBackend:
        return StateBackend()


class RunningSum(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer = RunningSumLayer(name)

    def get_kv_cache_spec(self, block_size: int, dtype: str) -> RecurrentStateSpec:
        return RecurrentStateSpec(state_bytes=8)

    def forward(self, input_ids_T: Tensor, context: ForwardContext) -> Tensor:
        states_N1, step = context.cache_of(self.layer.name)
        sums_T = torch.zeros(len(input_ids_T), dtype=torch.int64)
        for page, start, stop, begins in zip(step.pages, step.starts, step.starts[1:], step.begins, strict=False):
            state = 0 if begins else int(states_N1[page, 0])
            for token in range(start, stop):
                state = (3 * state + int(input_ids_T[token])) % VOCAB_SIZE
                sums_T[token] = state
            states_N1[page, 0] = state
        return sums_T


class RecurrentModel(ArithmeticModel, nn.Module):
    """The next token is the running sum; attention runs beside it where the cache has its layer."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        ArithmeticModel.__init__(self)
        self.mixer = RunningSum("mixer")

    def __call__(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        if LAYER.name in context.layers:
            super().__call__(input_ids, positions, context)
        return context.asked_for(self.mixer(input_ids, context).float().unsqueeze(-1))


def expected(prompt: Sequence[int], count: int) -> list[int]:
    state, tokens = 0, []
    for token in prompt:
        state = (3 * state + token) % VOCAB_SIZE
    for _ in range(count):
        tokens.append(state)
        state = (3 * state + state) % VOCAB_SIZE
    return tokens


def cache_config(*, with_attention: bool) -> KVCacheConfig:
    """The attention layer's page is larger: the state is padded, and shares its memory."""
    attention = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype="float32")
    specs = kv_cache_specs(RecurrentModel(), 4, "float32")
    state = specs["mixer"].with_pages_of(attention.page_size_bytes)
    assert state is not None
    groups = [KVCacheGroupSpec(layer_names=("mixer",), spec=state)]
    if with_attention:
        groups.append(KVCacheGroupSpec(layer_names=(LAYER.name,), spec=attention))
    names = tuple(name for group in groups for name in group.layer_names)
    tensor = KVCacheTensor(size_bytes=NUM_BLOCKS * attention.page_size_bytes, shared_by=names)
    return KVCacheConfig(num_blocks=NUM_BLOCKS, tensors=(tensor,), groups=tuple(groups))


def make_driver(model: Any, layers: dict[str, Any], config: KVCacheConfig) -> Driver:
    device = create_device(DeviceConfig(device="cpu", num_threads=1))
    limits = RunnerLimits(max_num_reqs=4, max_num_tokens=64, max_model_len=32, vocab_size=VOCAB_SIZE)
    return Driver(ModelRunner(device, model, layers, config, limits))


def request(req_id: str, prompt: list[int], *block_ids: list[int]) -> NewRequestData:
    return NewRequestData(
        req_id=req_id,
        prompt_token_ids=prompt,
        prefill_token_ids=prompt,
        sampling_params=GREEDY,
        block_ids=block_ids,
        num_computed_tokens=0,
    )


def recurrent_driver(with_attention: bool) -> Driver:
    model = RecurrentModel()
    layers = {**cache_layers(model), LAYER.name: LAYER}
    return make_driver(model, layers, cache_config(with_attention=with_attention))


def test_whatever_has_a_spec_and_a_name_keeps_pages() -> None:
    layer = RunningSum("mixer")
    assert isinstance(layer, KeepsCache)
    assert isinstance(layer.layer, BringsBackend)
    assert cache_layers(nn.ModuleList([nn.Linear(2, 2), layer])) == {"mixer": layer.layer}
    assert cache_layers(nn.Linear(2, 2)) == {}


@pytest.mark.parametrize("with_attention", [False, True])
def test_a_state_per_request_lives_through_chunks_and_steps(with_attention: bool) -> None:
    driver = recurrent_driver(with_attention)
    blocks = [([page], list(range(first, first + 4)))[: 1 + with_attention] for page, first in ((9, 1), (10, 5))]
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    other = PROMPT[::-1][:3]
    steps = [
        driver.tokens({"a": 4}, [request("a", PROMPT, *blocks[0])]),
        driver.tokens({"a": 5, "b": 3}, [request("b", other, *blocks[1])]),
        *[driver.tokens({"a": 1, "b": 1}) for _ in range(5)],
    ]
    for step in steps:
        for req_id, sampled in step.items():
            tokens[req_id] += sampled
    assert tokens == {"a": expected(PROMPT, 5), "b": expected(other, 6)}
    # The page's next request starts from a cleared state.
    again = driver.tokens({"c": 3}, [request("c", other, *blocks[0])], finished={"a", "b"})
    assert again == {"c": expected(other, 1)}


def test_blocks_are_pages_of_bytes_to_which_one_clears_or_moves_them() -> None:
    driver = recurrent_driver(with_attention=True)
    cache = driver.runner.kv_cache
    (pages_NX,) = cache.memory_of_blocks(0, NUM_BLOCKS)
    assert (pages_NX.dtype, pages_NX.shape) == (torch.uint8, (NUM_BLOCKS, cache.page_size_bytes))
    pages_NX.fill_(3)
    for group, block in ((0, 4), (1, 7)):
        cache.clear_blocks(group, torch.tensor([block]))
    assert [bool(page.any()) for page in pages_NX] == [block not in (4, 7) for block in range(NUM_BLOCKS)]
    assert cache.layer_memory(LAYER.name)[:, 7].abs().sum() == 0

    # A copy of the bytes is the block, whatever is in it.
    driver.tokens({"a": 6}, [request("a", PROMPT[:6], [1], [2, 3])])
    kept = [page.clone() for page in pages_NX[1:4]]
    pages_NX[8:11] = torch.stack(kept)
    pages_NX[1:4] = 0
    moved = request("b", [*PROMPT[:6], *expected(PROMPT[:6], 1)], [8], [9, 10])
    moved = NewRequestData(
        req_id="b",
        prompt_token_ids=moved.prompt_token_ids,
        prefill_token_ids=moved.prefill_token_ids,
        sampling_params=GREEDY,
        block_ids=moved.block_ids,
        num_computed_tokens=6,
    )
    assert driver.tokens({"b": 1}, [moved], finished={"a"}) == {"b": expected(PROMPT[:6], 2)[1:]}


class CachelessModel(ArithmeticModel):
    """Knows its next token from the last one."""

    def __call__(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        assert not context.layers
        best = (input_ids.long() * 7 + positions * 3 + 5) % VOCAB_SIZE
        return context.asked_for(best.float().unsqueeze(-1))


def test_a_model_that_keeps_nothing_is_served() -> None:
    driver = make_driver(CachelessModel(), {}, KVCacheConfig(num_blocks=1, tensors=(), groups=()))
    tokens = [driver.tokens({"a": 4}, [request("a", PROMPT)])["a"], driver.tokens({"a": 6})["a"]]
    tokens += [driver.tokens({"a": 1})["a"] for _ in range(3)]
    last, position, sampled = PROMPT[-1], len(PROMPT) - 1, []
    for _ in range(4):
        last, position = next_token(last, position), position + 1
        sampled.append(last)
    assert [token for step in tokens for token in step] == sampled
    assert driver.runner.kv_cache.page_size_bytes == 0
    assert list(driver.runner.kv_cache.memory_of_blocks(0, 1)) == []


def test_a_configuration_with_states_survives_the_way_to_another_process() -> None:
    config = cache_config(with_attention=True)
    assert decode(encode(config), KVCacheConfig) == config
    assert decode(encode(kv_cache_config()), KVCacheConfig) == kv_cache_config()


def test_a_block_table_is_as_wide_as_what_its_group_keeps() -> None:
    attention = {"block_size": 4, "num_kv_heads": 1, "head_size": 4, "dtype": "float32"}
    specs = (
        FullAttentionSpec(**attention),
        CrossAttentionSpec(**attention, max_num_encoder_tokens=90),
        RecurrentStateSpec(state_bytes=8),
    )
    groups = tuple(KVCacheGroupSpec(layer_names=(str(index),), spec=spec) for index, spec in enumerate(specs))
    config = KVCacheConfig(num_blocks=NUM_BLOCKS, tensors=(), groups=groups)
    tables = BlockTables(create_device(DeviceConfig(device="cpu", num_threads=1)), 3, 32, config)
    assert [tables.table(group).shape for group in range(3)] == [(3, 8), (3, 23), (3, 1)]
