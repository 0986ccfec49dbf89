"""The limit of different adapters among running requests: requests are neither blocked by others nor starved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_driver import make_request
from scheduler_fakes import cache_config

from penstock.config import SchedulerConfig
from penstock.contract import Parts, RpcCall, SampledOutput, SchedulerOutput
from penstock.errors import InvalidRequest
from penstock.features.lora.request import AdapterPart, LoRARequest
from penstock.features.lora.scheduling import LoRAScheduling
from penstock.scheduler.outputs import EngineCoreOutput
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.services import SchedulerServices


class Loop:
    """A scheduler with two slots, and a worker that has every adapter, and whose every token is 5.

    status: states of the adapters that the worker loads in the background; None for one that loads them at once.
    """

    def __init__(self, max_loras: int = 2, max_num_seqs: int = 8, status: dict[int, str | None] | None = None) -> None:
        self.max_loras = max_loras
        self.status = status
        self.errors: dict[str, str | None] = {}
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=64),
            cache_config(200),
            max_model_len=64,
            enable_prefix_caching=False,
            async_scheduling=False,
            features=[self._make],
        )
        self.adapters: dict[str, int] = {}
        self.ended: list[str] = []

    def _make(self, scheduler: Scheduler) -> LoRAScheduling:
        config: Any = SimpleNamespace(
            lora=SimpleNamespace(max_loras=self.max_loras, num_on_host=100),
            keeps_kv=False,
            parallel=SimpleNamespace(must_agree_on_time=self.status is None),
        )
        services = SchedulerServices(config, scheduler, self._call, self._note_ends, lambda _: None)
        self.side = LoRAScheduling(services)
        return self.side

    def _call(self, call: RpcCall) -> list[Any]:
        return [dict(self.status or {})] if call.name == "lora_status" else [True]

    def _note_ends(self, outputs: list[EngineCoreOutput]) -> None:
        self.errors |= {output.req_id: output.error for output in outputs}

    def pin(self, adapter: int) -> None:
        request = LoRARequest(str(adapter), adapter, "x")
        self.side.call(RpcCall("add_lora", (request,)))
        self.side.call(RpcCall("pin_lora", (request,)))

    def add(self, name: str, adapter: int, num_tokens: int = 4) -> None:
        part = AdapterPart(lora_int_id=adapter, lora_name=str(adapter), lora_path="x")
        parts = Parts.of([part]) if adapter else None
        self.adapters[name] = adapter
        self.scheduler.add_request(make_request(name, [1, 2, 3], max_tokens=num_tokens, ignore_eos=True, parts=parts))

    def step(self) -> SchedulerOutput:
        message = self.scheduler.schedule()
        req_ids = list(message.num_scheduled_tokens)
        in_step = {self.adapters[req_id] for req_id in req_ids} - {0}
        assert len(in_step) <= self.max_loras
        results = SampledOutput(step_id=message.step_id, req_ids=req_ids, sampled_token_ids=[[5] for _ in req_ids])
        outputs = self.scheduler.update_from_output(message, results)
        self.ended += [output.req_id for output in outputs if output.finish_reason is not None]
        return message


def test_a_request_without_a_slot_does_not_block_those_after_it() -> None:
    loop = Loop()
    for name, adapter in (("a", 1), ("b", 2), ("c", 3), ("d", 0), ("e", 2)):
        loop.add(name, adapter)
    assert list(loop.step().num_scheduled_tokens) == ["a", "b", "d", "e"]


def test_it_runs_once_a_slot_is_free() -> None:
    loop = Loop()
    for name, adapter, num_tokens in (("a", 1, 2), ("b", 2, 9), ("c", 3, 2)):
        loop.add(name, adapter, num_tokens)
    steps = [set(loop.step().num_scheduled_tokens) for _ in range(4)]
    assert steps == [{"a", "b"}, {"a", "b"}, {"b", "c"}, {"b", "c"}]


def test_it_is_not_starved_by_requests_that_keep_coming() -> None:
    loop = Loop()
    loop.add("a0", 1)
    loop.add("b0", 2)
    loop.step()
    loop.add("starving", 3)
    for index in range(1, 20):
        loop.add(f"a{index}", 1)
        loop.add(f"b{index}", 2)
        loop.step()
        if "starving" in loop.ended:
            break
    assert "starving" in loop.ended
    assert index < 12
    for _ in range(200):
        if not loop.scheduler.has_unfinished_requests():
            break
        loop.step()
    assert len(loop.ended) == len(loop.adapters)


def test_pinned_adapters_keep_their_slots() -> None:
    loop = Loop()
    loop.pin(7)
    loop.add("a", 1)
    loop.add("b", 2)
    assert list(loop.step().num_scheduled_tokens) == ["a"]
    while loop.scheduler.has_unfinished_requests():
        loop.step()
    loop.pin(8)
    with pytest.raises(InvalidRequest, match="max_loras=2"):
        loop.add("c", 3)


def test_a_pinned_adapter_without_a_slot_waits_for_one() -> None:
    loop = Loop()
    loop.add("a", 1, 3)
    loop.add("b", 2, 9)
    loop.step()
    loop.pin(7)
    loop.add("pinned", 7)
    steps = [set(loop.step().num_scheduled_tokens) for _ in range(3)]
    assert steps == [{"a", "b"}, {"a", "b"}, {"b", "pinned"}]


def test_the_last_slot_is_not_pinned_while_requests_of_other_adapters_need_it() -> None:
    loop = Loop(max_loras=1)
    loop.add("a", 1, 2)
    loop.add("b", 2, 2)
    loop.step()
    with pytest.raises(InvalidRequest, match="request b of adapter '2' has not ended"):
        loop.pin(1)
    while loop.scheduler.has_unfinished_requests():
        loop.step()
    loop.pin(1)


@given(
    requests=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=25),
    max_loras=st.integers(1, 3),
    max_num_seqs=st.integers(1, 6),
)
@settings(max_examples=60, deadline=None)
def test_all_requests_end_whatever_comes(
    requests: list[tuple[int, int, int]], max_loras: int, max_num_seqs: int
) -> None:
    loop = Loop(max_loras, max_num_seqs)
    for index, (adapter, num_tokens, num_steps) in enumerate(requests):
        loop.add(f"r{index}", adapter, num_tokens)
        for _ in range(num_steps):
            loop.step()
    for _ in range(400):
        if not loop.scheduler.has_unfinished_requests():
            break
        assert loop.step().num_scheduled_tokens
    assert sorted(loop.ended) == sorted(loop.adapters)


@pytest.mark.parametrize("state", [None, "it has no weights"])
def test_what_becomes_of_an_adapter_is_no_matter_of_a_request_with_the_id_of_an_aborted_one(state: str | None) -> None:
    loop = Loop(status={1: "", 2: ""})
    loop.add("a", 1)
    loop.scheduler.finish_requests(["a"])
    loop.add("a", 2)
    loop.add("b", 1)
    loop.status = {1: state, 2: ""}
    loop.side.before_step()
    assert loop.errors == ({} if state is None else {"b": state})
    assert list(loop.step().num_scheduled_tokens) == (["b"] if state is None else [])
