"""A model without a KV cache: there is no KV-cache group, and steps have their sequences all the same."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from torch import Tensor

from penstock.attention import ForwardContext
from penstock.contract import KVCacheConfig
from penstock.runner.dummy_runs import run_dummy_batch, run_prompt
from support.runners import VOCAB_SIZE, ArithmeticModel, Driver, make_runner, new_request, next_token


class WithoutCache(ArithmeticModel):
    """Records the lengths of the step's sequences, and the wanted rows."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences: list[tuple[list[int], list[int]]] = []
        self.rows: list[list[int] | None] = []

    def __call__(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        sequences = context.sequences
        assert sequences is not None
        self.sequences.append((sequences.query_start_loc.tolist(), sequences.seq_lens.tolist()))
        self.rows.append(None if context.last is None else context.last.rows.tolist())
        hidden = ((input_ids.long() * 7 + positions * 3 + 5) % VOCAB_SIZE).float().unsqueeze(-1)
        return context.narrowed(hidden)


def runner_of(model: WithoutCache, **options: Any) -> Any:
    nothing = KVCacheConfig()
    return make_runner(model=model, kv_cache=nothing, **options)


@pytest.mark.parametrize("fast_paths", [False, True])
def test_prompts_and_repeated_decodes_have_their_sequences(fast_paths: bool) -> None:
    model = WithoutCache()
    driver = Driver(runner_of(model, fast_paths=fast_paths))
    prompts = {"a": [5, 6, 7], "b": [8]}
    new = [replace(new_request(req_id, prompt), block_ids=()) for req_id, prompt in prompts.items()]
    tokens = driver.tokens({"b": 1, "a": 3}, new)
    assert tokens == {"a": [next_token(7, 2)], "b": [next_token(8, 0)]}
    for number in range(6):
        last = {req_id: sampled[-1] for req_id, sampled in tokens.items()}
        tokens = driver.tokens({"b": 1, "a": 1}, repeats=number > 0)
        assert tokens == {"a": [next_token(last["a"], 3 + number)], "b": [next_token(last["b"], 1 + number)]}
    assert model.sequences[0] == ([0, 1, 4], [1, 3])
    assert model.sequences[-1] == ([0, 1, 2], [7, 9])
    assert model.rows == [[0, 3]] + [None] * 6


def test_runs_that_serve_no_request_need_no_group() -> None:
    model = WithoutCache()
    runner = runner_of(model)
    run_dummy_batch(runner, num_tokens=2, num_reqs=2)
    assert run_prompt(runner, [5, 6, 7]).flatten().tolist() == [next_token(5, 0), next_token(6, 1), next_token(7, 2)]
    assert model.sequences[-1] == ([0, 3], [3])
