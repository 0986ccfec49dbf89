"""Steps reach workers in other processes whole, in order with calls, and without needless waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import EngineConfig
from penstock.contract import (
    CachedRequestData,
    NewRequestData,
    Parts,
    RpcCall,
    SamplingInput,
    SamplingParams,
    SchedulerOutput,
)
from penstock.contract.codec import decode, encode
from penstock.errors import LifecycleError, WorkerError
from penstock.executor import MultiprocessExecutor
from penstock.executor.messages import ExecuteStep, ToWorker, pack_step, unpack_step
from penstock.features.structured_output.messages import BitmaskPart
from support.checkpoints import tiny_checkpoint
from support.noting_worker import FAILS_AT, NotingWorker

BITMASK = Parts.of([BitmaskPart(req_ids=["r1"], bitmask=b"\1\0\0\0" * 4)])
TOKEN_IDS = st.lists(st.integers(0, 200_000), max_size=12)


def new_request(req_id: str, prompt: list[int], generated: list[int]) -> NewRequestData:
    return NewRequestData(
        req_id=req_id,
        prompt_token_ids=prompt,
        prefill_token_ids=prompt + generated,
        sampling_params=SamplingParams(seed=1),
        block_ids=([1, 2],),
        num_computed_tokens=0,
    )


def decoding(step_id: int, awaiting: Sequence[str] = ()) -> SchedulerOutput:
    counts = {f"r{index}": 1 + index % 2 for index in range(5)}
    cached = CachedRequestData(req_ids=list(counts), num_computed_tokens=[step_id] * 5)
    return SchedulerOutput(
        step_id=step_id,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=7,
        awaiting_req_ids=list(awaiting),
    )


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder: Path = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(folder)
    worker_cls = f"{NotingWorker.__module__}.{NotingWorker.__name__}"
    return EngineConfig.create(str(folder), tensor_parallel_size=2, device="cpu", num_threads=2, worker_cls=worker_cls)


@pytest.fixture(scope="module")
def executor(config: EngineConfig) -> Iterator[MultiprocessExecutor]:
    """Two workers; tests leave nothing unsaid to them."""
    started = MultiprocessExecutor(config)
    yield started
    started.shutdown()


@given(requests=st.lists(st.tuples(TOKEN_IDS, TOKEN_IDS), max_size=3))
@settings(deadline=None)
def test_a_packed_step_is_unpacked_as_it_was(requests: list[tuple[list[int], list[int]]]) -> None:
    new = [new_request(str(index), *tokens) for index, tokens in enumerate(requests)]
    output = SchedulerOutput(step_id=3, scheduled_new_reqs=new, finished_req_ids={"x"})
    message = decode(encode(ToWorker(ExecuteStep(output=pack_step(output)))), ToWorker).message
    assert isinstance(message, ExecuteStep)
    assert unpack_step(message.output) == output


def test_a_prompt_is_told_once() -> None:
    output = SchedulerOutput(step_id=3, scheduled_new_reqs=[new_request("r", list(range(1000, 5000)), [])])
    once = len(encode(pack_step(output)))
    assert once < 0.6 * len(encode(output))


def test_steps_and_calls_come_to_all_workers_whole_and_in_order(executor: MultiprocessExecutor) -> None:
    long = new_request("long", list(range(100_000)), [7] * 50_000)
    steps = [
        SchedulerOutput(step_id=0, scheduled_new_reqs=[long], num_scheduled_tokens={"long": 1}),
        *map(decoding, range(1, 5)),
        decoding(5, awaiting=["r1"]),
    ]
    sampling = SamplingInput(step_id=5, parts=BITMASK)
    handles = []
    for step in steps[:5]:
        executor.execute_model(step)
        handles.append(executor.sample_tokens(SamplingInput(step_id=step.step_id)))
    executor.execute_model(steps[5])
    heard = executor.collective_rpc(RpcCall("take_calls"))
    before = [
        event
        for step in steps[:5]
        for event in (("execute_model", step), ("sample_tokens", SamplingInput(step_id=step.step_id)))
    ]
    assert heard == [[*before, ("execute_model", steps[5])]] * 2
    handles.append(executor.sample_tokens(sampling))
    assert executor.collective_rpc(RpcCall("take_calls")) == [[("sample_tokens", sampling)]] * 2
    for step, handle in zip(steps, handles, strict=True):
        result = handle.get_output()
        assert result.step_id == step.step_id
        assert result.req_ids == list(step.num_scheduled_tokens)
        assert list(map(len, result.sampled_token_ids)) == list(step.num_scheduled_tokens.values())


def test_what_awaits_no_parts_is_sampled_without_another_word(executor: MultiprocessExecutor) -> None:
    executor.execute_model(decoding(0))
    heard = executor.collective_rpc(RpcCall("take_calls"))
    assert [[name for name, _ in of_rank] for of_rank in heard] == [["execute_model", "sample_tokens"]] * 2
    with pytest.raises(LifecycleError, match="Step 0 was sampled without parts.*bitmask"):
        executor.sample_tokens(SamplingInput(step_id=0, parts=BITMASK))
    assert executor.sample_tokens(SamplingInput(step_id=0)).get_output().step_id == 0
    assert executor.collective_rpc(RpcCall("take_calls")) == [[], []]


def test_a_step_that_fails_is_not_sampled(config: EngineConfig) -> None:
    executor = MultiprocessExecutor(config)
    executor.execute_model(decoding(FAILS_AT))
    handle = executor.sample_tokens(SamplingInput(step_id=FAILS_AT))
    with pytest.raises(WorkerError, match="failed in execute_model: RuntimeError: no luck"):
        handle.get_output()
    executor.shutdown()
