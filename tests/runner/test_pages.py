"""Pages of other layers: a recurrent state beside attention, and a model without pages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from penstock.attention import CacheBackend, ForwardContext, StepGeometry
from penstock.attention.base import BringsBackend
from penstock.config import DeviceConfig
from penstock.contract import (
    FullAttentionSpec,
    KVCacheConfig,
    NewRequestData,
    RecurrentStateSpec,
    decode,
    encode,
)
from penstock.device import create_device
from penstock.kernels.recurrent_state import StatePages, state_pages
from penstock.models.attention_layers import KeepsCache, cache_layers, kv_cache_specs
from penstock.runner.block_tables import BlockTables
from penstock.runner.model_runner import ModelRunner, RunnerLimits
from penstock.scheduler.kv_cache_plan import group_layers, make_kv_cache_config
from support.runners import GREEDY, LAYER, VOCAB_SIZE, ArithmeticModel, Driver, kv_cache_config, next_token

NUM_BLOCKS = 12
PROMPT = [5, 17, 3, 88, 41, 9, 2, 60, 33, 7]


class StateBackend(CacheBackend):
    name = "running_sum"

    def view_pages(self, pages_NX: Tensor, spec: RecurrentStateSpec) -> Tensor:
        return pages_NX.view(torch.int64)

    def make_metadata(self, geometry: StepGeometry) -> StepGeometry:
        return geometry


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
        return RecurrentStateSpec(state_bytes=8, block_size=block_size)

    def forward(self, input_ids_T: Tensor, context: ForwardContext) -> Tensor:
        states_N1, step = context.cache_of(self.layer.name)
        pages = step_pages(step)
        sums_T = torch.zeros(len(input_ids_T), dtype=torch.int64)
        for row, (start, stop) in enumerate(itertools.pairwise(step.query_start_loc.tolist())):
            before = pages.before_R[row]
            state = int(states_N1[before, 0]) if before else 0
            for token in range(start, stop):
                state = (3 * state + int(input_ids_T[token])) % VOCAB_SIZE
                sums_T[token] = state
                for page in (pages.own_T[token], pages.snapshots_T[token]):
                    if page:
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
        return context.narrowed(self.mixer(input_ids, context).float().unsqueeze(-1))


def expected(prompt: Sequence[int], count: int) -> list[int]:
    state, tokens = 0, []
    for token in prompt:
        state = (3 * state + token) % VOCAB_SIZE
    for _ in range(count):
        tokens.append(state)
        state = (3 * state + state) % VOCAB_SIZE
    return tokens


def cache_config(*, with_attention: bool) -> KVCacheConfig:
    """States have pages of their own."""
    specs = kv_cache_specs(RecurrentModel(), 4, "float32")
    if with_attention:
        specs[LAYER.name] = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype="float32")
    return make_kv_cache_config(group_layers(specs), [NUM_BLOCKS] * len(specs))


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
    blocks = [
        ([page, 0, 0, 0, 0], list(range(first, first + 4)))[: 1 + with_attention] for page, first in ((9, 1), (10, 5))
    ]
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
    (states_NX,), (pages_NX,) = (cache.memory_of_blocks(pool, 0, NUM_BLOCKS) for pool in (0, 1))
    assert (states_NX.dtype, states_NX.shape) == (torch.uint8, (NUM_BLOCKS, 8))
    assert (pages_NX.dtype, pages_NX.shape) == (torch.uint8, (NUM_BLOCKS, 2 * 4 * 4 * 4))
    for group, memory, block in ((0, states_NX, 4), (1, pages_NX, 7)):
        memory.fill_(3)
        cache.clear_blocks(group, torch.tensor([block]))
        assert [bool(page.any()) for page in memory] == [block != other for other in range(NUM_BLOCKS)]
    assert cache.layer_memory(LAYER.name)[:, 7].abs().sum() == 0

    # A copy of the bytes is the block, whatever is in it.
    driver.tokens({"a": 6}, [request("a", PROMPT[:6], [1, 0], [2, 3])])
    for memory, first, last in ((states_NX, 1, 1), (pages_NX, 2, 3)):
        kept = memory[first : last + 1].clone()
        memory[first : last + 1] = 0
        memory[first + 7 : last + 8] = kept
    moved = request("b", [*PROMPT[:6], *expected(PROMPT[:6], 1)], [8, 0], [9, 10])
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
        return context.narrowed(best.float().unsqueeze(-1))


def test_a_model_that_keeps_nothing_is_served() -> None:
    driver = make_driver(CachelessModel(), {}, KVCacheConfig())
    tokens = [driver.tokens({"a": 4}, [request("a", PROMPT)])["a"], driver.tokens({"a": 6})["a"]]
    tokens += [driver.tokens({"a": 1})["a"] for _ in range(3)]
    last, position, sampled = PROMPT[-1], len(PROMPT) - 1, []
    for _ in range(4):
        last, position = next_token(last, position), position + 1
        sampled.append(last)
    assert [token for step in tokens for token in step] == sampled
    assert driver.runner.kv_cache.config.size_bytes == 0


def test_a_configuration_with_states_survives_the_way_to_another_process() -> None:
    config = cache_config(with_attention=True)
    assert decode(encode(config), KVCacheConfig) == config
    assert decode(encode(kv_cache_config()), KVCacheConfig) == kv_cache_config()


def test_a_block_table_is_as_wide_as_what_its_group_keeps() -> None:
    attention = {"block_size": 4, "num_kv_heads": 1, "head_size": 4, "dtype": "float32"}
    specs = {
        "full": FullAttentionSpec(**attention),
        "state": RecurrentStateSpec(state_bytes=8, block_size=8, max_drafts=2),
    }
    config = make_kv_cache_config(group_layers(specs), [NUM_BLOCKS, NUM_BLOCKS])
    tables = BlockTables(create_device(DeviceConfig(device="cpu", num_threads=1)), 3, 32, config)
    assert [tables.table(group).shape for group in range(2)] == [(3, 8), (3, 3 + 4)]


def step_pages(step: StepGeometry) -> StatePages:
    """Pages of a step's states."""
    return state_pages(
        step.block_table,
        step.query_start_loc,
        step.seq_lens,
        step.slot_mapping,
        num_own_blocks=step.num_own_blocks,
        block_size=step.block_size,
    )


def test_a_request_begins_from_a_snapshot_and_leaves_others() -> None:
    """Nothing is written to the snapshot that it begins from, nor to block 0."""
    driver = recurrent_driver(with_attention=False)
    states_N1 = driver.runner.kv_cache.layer_memory("mixer")
    states_N1.fill_(-1)
    prompt = [*PROMPT, *PROMPT]
    first = request("a", prompt, [3, 0, 5, 0, 6, 7])
    assert driver.tokens({"a": len(prompt)}, [first]) == {"a": expected(prompt, 1)}
    assert [int(states_N1[page, 0]) for page in (3, 5, 6, 7)] == [
        expected(prompt[:end], 1)[0] for end in (len(prompt), 8, 16, 20)
    ]
    assert (states_N1[[0, 1, 2, 4, 8]] == -1).all()
    again = msgspec.structs.replace(request("b", prompt, [9, 0, 5, 0, 6, 10]), num_computed_tokens=16)
    states_N1[[3, 5]] = -1
    assert driver.tokens({"b": 2}, [again], finished={"a"}) == {"b": []}
    assert driver.tokens({"b": 2}) == {"b": expected(prompt, 1)}
    assert int(states_N1[6, 0]) == expected(prompt[:16], 1)[0]
