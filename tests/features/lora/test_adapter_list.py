"""The list of adapters, by any order of loads, removals, requests, and losses of its owner."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from penstock.config import EngineConfig
from penstock.contract import Parts, RpcCall, SamplingParams, part_of
from penstock.engine.messages import EngineRequest
from penstock.errors import AdapterNotFound, CheckpointError, InvalidRequest, ProcessLost
from penstock.features.deployment import DeploymentFeatures, DeploymentServices
from penstock.features.lora.adapter_list import AdapterList, AdapterListState
from penstock.features.lora.request import MAX_NUMBER, AdapterPart, LoRARequest

NAMES = st.sampled_from(["x", "k", "z"])
PATHS = st.sampled_from(["folder a", "folder b", "folder c"])
FAILURES = st.sampled_from([None, None, CheckpointError, ProcessLost])


def request_with(adapter: LoRARequest, **fields: Any) -> EngineRequest:
    """A request as a caller or a front end makes it, from what it knows of the adapter."""
    return EngineRequest(
        req_id="r", prompt_token_ids=[1], sampling_params=SamplingParams(), parts=Parts.of([adapter.part]), **fields
    )


def adapter_of(request: EngineRequest) -> AdapterPart:
    part = part_of(request.parts, AdapterPart)
    assert part is not None
    return part


def list_with(
    call_cores: Callable[[RpcCall], list[Any]],
    state: AdapterListState | None,
    on_change: Callable[[AdapterListState], None],
) -> AdapterList:
    config: Any = SimpleNamespace(parallel=SimpleNamespace(executor="mp"))
    return AdapterList(DeploymentServices(config, call_cores, state, on_change))


def resolved_by(adapters: AdapterList, request: EngineRequest) -> EngineRequest:
    assert request.parts is not None
    return replace(request, parts=adapters.resolve(request.parts, is_admitted=request.is_admitted))


class ListMachine(RuleBasedStateMachine):
    """Compares the list with a model: folders by name, and the folder with which each running request began."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = AdapterListState()
        self.fails: type[Exception] | None = None
        self.loaded: dict[int, str] = {}
        self.list = self.owner(None)
        # Folders by name; adapters that front ends may still know; identities that were given to adapters of a folder.
        self.served: dict[str, LoRARequest] = {}
        self.seen: list[LoRARequest] = []
        self.identities: dict[int, str] = {}
        self.running: list[EngineRequest] = []

    def owner(self, state: AdapterListState | None) -> AdapterList:
        def call_cores(call: RpcCall) -> list[Any]:
            (adapter,) = call.args
            failure, self.fails = self.fails, None
            if failure is not None:
                raise failure("a fault")
            if call.name == "remove_lora":
                self.loaded.pop(adapter.identity, None)
                return [None]
            is_new = adapter.identity not in self.loaded or adapter.load_inplace
            self.loaded[adapter.identity] = adapter.lora_path if is_new else self.loaded[adapter.identity]
            return [is_new]

        def keep(state: AdapterListState) -> None:
            self.kept = state

        return list_with(call_cores, state, keep)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        (answer,) = self.list.call(RpcCall(method, args, kwargs))
        return answer

    def known(self, name: str) -> LoRARequest | None:
        return next((one for one in self.call("known_loras") if one.lora_name == name), None)

    @rule(name=NAMES, path=PATHS, fails=FAILURES)
    def load(self, name: str, path: str, fails: type[Exception] | None) -> None:
        is_there = name in self.served
        adapter = LoRARequest(name, self.call("take_lora_number"), path)
        self.fails = None if is_there else fails
        expected = InvalidRequest if is_there else fails
        if expected is not None:
            with pytest.raises(expected):
                self.call("add_lora", adapter, owns_name=True)
            return
        assert self.call("add_lora", adapter, owns_name=True)
        self.note(name, path)

    @rule(name=NAMES, path=PATHS)
    def replace_in_place(self, name: str, path: str) -> None:
        if name not in self.served:
            return
        number, identity = self.served[name].lora_int_id, self.served[name].identity
        self.call("prefetch_lora", LoRARequest(name, number, path, load_inplace=True))
        assert self.call("add_lora", LoRARequest(name, number, path, load_inplace=True), owns_name=True)
        del self.identities[identity]
        self.note(name, path)
        assert self.served[name].identity == identity

    @rule(name=NAMES, path=PATHS, number=st.integers(1, 3))
    def name_a_folder_in_a_request(self, name: str, path: str, number: int) -> None:
        """As callers of `generate` do, with numbers of their own."""
        if name in self.served:
            return
        is_taken = any(one.lora_int_id == number for one in self.served.values())
        try:
            self.running.append(resolved_by(self.list, request_with(LoRARequest(name, number, path))))
        except InvalidRequest:
            assert is_taken
            return
        assert not is_taken
        self.note(name, path)

    @rule(name=NAMES, fails=st.sampled_from([None, ProcessLost]))
    def remove(self, name: str, fails: type[Exception] | None) -> None:
        if name in self.served:
            self.fails = fails
            assert self.call("remove_lora", self.served.pop(name).lora_int_id)

    @rule(modules=st.lists(st.tuples(NAMES, PATHS), unique_by=lambda one: one[0], max_size=2))
    def offer(self, modules: list[tuple[str, str]]) -> None:
        """Each front end offers the adapters of the command line once it starts."""
        before = self.kept.offered
        self.call("offer_loras", [LoRARequest(name, 100 + n, path) for n, (name, path) in enumerate(modules)])
        for number, (name, path) in enumerate(modules, start=100):
            if number not in before and name not in self.served:
                self.note(name, path)
            elif number not in before:
                # Two of one name, which a caller may have.
                twins = [one for one in self.call("known_loras") if one.lora_name == name]
                for one in twins:
                    if one.identity != self.served[name].identity:
                        self.call("remove_lora", one.lora_int_id)

    @rule(data=st.data())
    def begin_a_request(self, data: st.DataObject) -> None:
        """Of an adapter that a front end knows, perhaps no longer served."""
        if not self.seen:
            return
        adapter = data.draw(st.sampled_from(self.seen))
        present = self.served.get(adapter.lora_name)
        if present is None or present.identity != adapter.identity:
            with pytest.raises(AdapterNotFound):
                resolved_by(self.list, request_with(adapter))
            return
        resolved = resolved_by(self.list, request_with(adapter))
        assert adapter_of(resolved).lora_path == present.lora_path
        self.running.append(resolved)

    @rule(order=st.randoms(use_true_random=False))
    def lose_the_owner(self, order: Any) -> None:
        """The next owner has the state that was kept; requests come back in any order, also of removed adapters."""
        self.list, self.loaded = self.owner(self.kept), {}
        order.shuffle(self.running)
        for request in self.running:
            before = adapter_of(request)
            resumed = adapter_of(resolved_by(self.list, request_with_part(before, is_admitted=True)))
            assert resumed.identity == before.identity
            expected = self.identities.get(before.identity, before.lora_path)
            assert resumed.lora_path == expected

    def note(self, name: str, path: str) -> None:
        adapter = self.known(name)
        assert adapter is not None
        assert adapter.identity not in self.identities, "an identity is given once"
        self.identities[adapter.identity] = path
        self.served[name] = adapter
        self.seen.append(adapter)

    @invariant()
    def lists_what_is_served(self) -> None:
        known = {one.lora_name: (one.identity, one.lora_path) for one in self.call("known_loras")}
        assert known == {name: (one.identity, self.identities[one.identity]) for name, one in self.served.items()}


def request_with_part(part: AdapterPart, **fields: Any) -> EngineRequest:
    return EngineRequest(
        req_id="r", prompt_token_ids=[1], sampling_params=SamplingParams(), parts=Parts.of([part]), **fields
    )


TestList = ListMachine.TestCase


def made(state: AdapterListState | None = None) -> AdapterList:
    return list_with(lambda call: [True], state, lambda state: None)


def test_numbers_for_new_adapters_do_not_come_back() -> None:
    adapters = made()
    numbers = []
    for _ in range(3):
        (number,) = adapters.call(RpcCall("take_lora_number", ()))
        adapters.call(RpcCall("add_lora", (LoRARequest("x", number, "a"),)))
        adapters.call(RpcCall("remove_lora", (number,)))
        numbers.append(number)
    assert numbers == [1, 2, 3]
    adapters.call(RpcCall("add_lora", (LoRARequest("x", MAX_NUMBER, "a"),)))
    assert adapters.call(RpcCall("take_lora_number", ())) == [1]


def test_adapters_are_offered_once_wherever_the_owner_is_lost() -> None:
    states: list[AdapterListState] = [AdapterListState()]
    offered = [LoRARequest(name, number, f"folder {name}") for number, name in enumerate("xk", 1)]
    list_with(lambda call: [True], None, states.append).call(RpcCall("offer_loras", [offered]))
    for state in states:
        # The front end repeats its call.
        next_owner = made(state)
        next_owner.call(RpcCall("offer_loras", [offered]))
        (known,) = next_owner.call(RpcCall("known_loras", []))
        assert [(one.lora_name, one.lora_int_id) for one in known] == [("x", 1), ("k", 2)]


def test_a_name_that_is_taken_leaves_no_weights_in_the_cores() -> None:
    held: set[int] = set()

    def call_cores(call: RpcCall) -> list[bool]:
        (adapter,) = call.args
        (held.discard if call.name == "remove_lora" else held.add)(adapter.identity)
        return [True]

    adapters = list_with(call_cores, None, lambda state: None)
    first, second = (LoRARequest("x", number, "a") for number in (1, 2))
    for adapter in (first, second):
        adapters.call(RpcCall("prefetch_lora", (adapter,)))
    adapters.call(RpcCall("add_lora", (first,), {"owns_name": True}))
    assert held == {1, 2}
    with pytest.raises(InvalidRequest, match="There is an adapter 'x' already"):
        adapters.call(RpcCall("add_lora", (second,), {"owns_name": True}))
    assert held == {1}


def test_a_new_core_gets_what_requests_cannot_read_again() -> None:
    adapters = made()
    in_memory = LoRARequest("m", 2, tensors={}, peft_config={})
    for adapter in (LoRARequest("x", 1, "a"), in_memory, LoRARequest("k", 3, "b")):
        adapters.call(RpcCall("add_lora", (adapter,)))
    adapters.call(RpcCall("pin_lora", (3,)))
    calls = [(call.name, call.args[0].lora_name) for call in adapters.calls_of_new_core()]
    assert calls == [("add_lora", "m"), ("add_lora", "k"), ("pin_lora", "k")]


def test_an_engine_without_adapters_says_so() -> None:
    config = EngineConfig.create("demo")
    features = DeploymentFeatures(config, lambda call: [True])
    with pytest.raises(InvalidRequest, match="add_lora: LoRA adapters are not enabled .*enable_lora=True"):
        features.side_of(RpcCall("add_lora", (LoRARequest("x", 1, "a"),)))
    with pytest.raises(InvalidRequest, match="enable_lora=True"):
        features.resolve(request_with(LoRARequest("x", 1, "a")))
