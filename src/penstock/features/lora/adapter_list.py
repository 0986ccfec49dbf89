"""List of the LoRA adapters of a deployment: the one place that changes it, in the order of the changes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock.contract import Parts, RpcCall, part_of
from penstock.errors import AdapterNotFound, InvalidRequest, ProcessLost
from penstock.features.deployment import DeploymentFeature, DeploymentServices
from penstock.features.lora.request import MAX_NUMBER, AdapterPart, LoRARequest, stamp_of


class AdapterListState(msgspec.Struct, frozen=True):
    """State of an adapter list, for the owner that replaces a lost one.

    adapters: in the order of their loading, with their identities. pinned: numbers of those that are pinned.
    offered: numbers that were offered once. replaced: present adapters of the identities whose weights were replaced in
    place.
    last_identity, last_number: the highest that were given out; versions are of the same count as identities.
    """

    adapters: list[LoRARequest] = []
    pinned: frozenset[int] = frozenset()
    offered: frozenset[int] = frozenset()
    replaced: dict[int, LoRARequest] = {}
    last_identity: int = 0
    last_number: int = 0


class AdapterList(DeploymentFeature):
    """The adapters that requests may use, by number. Its owner is the client of the cores, or the one core.

    An identity is given to each adapter that is added, and never again: requests carry it, so that no other weights
    serve them, whichever processes are replaced. A number that is free may be used again; `load_inplace` alone puts
    other weights under an identity.
    """

    def __init__(self, services: DeploymentServices) -> None:
        self._call, self._on_change = services.call_cores, services.on_change
        # Workers read the files that the owner of the list saw, or none; those on other machines may have copies.
        self._stamps_files = services.config.parallel.executor in ("uni", "mp")
        self._state: AdapterListState = services.state or AdapterListState()
        # Adapters whose loading has begun, which are not listed yet, by number.
        self._loading: dict[int, LoRARequest] = {}

    def resolve(self, parts: Parts, *, is_admitted: bool) -> Parts:
        """Give a request's adapter its identity and its folder.

        A request that continues keeps the adapter with which it began, also after its removal.
        Raises AdapterNotFound for one that is not there, InvalidRequest for another one of its number.
        """
        part = part_of(parts, AdapterPart)
        if part is None:
            return parts
        listed = self._by_number(part.lora_int_id)
        if part.identity:
            if listed is None or listed.identity != part.identity:
                if not is_admitted:
                    raise AdapterNotFound(
                        f"There is no adapter {part.lora_name!r} ({part.lora_int_id}): it was removed."
                    )
                listed = self._state.replaced.get(part.identity)
        elif listed is None:
            listed = self._named_by_request(part)
        elif part.lora_name != listed.lora_name or part.lora_path not in ("", listed.lora_path):
            raise InvalidRequest(
                f"lora_int_id={part.lora_int_id} is {_described(listed)}, and the request has {part.lora_name!r} "
                f"({part.lora_path or 'in memory'}). Give each adapter an id of its own, or remove the other one first."
            )
        if listed is None:
            return parts
        return Parts({**parts, part.feature: replace(listed.part, lora_name=part.lora_name)})

    def calls_of_new_core(self) -> Iterator[RpcCall]:
        """Calls that a replacement core needs; it reads other adapters when their requests need them."""
        for adapter in self._state.adapters:
            is_pinned = adapter.lora_int_id in self._state.pinned
            if adapter.tensors is not None or is_pinned:
                yield RpcCall("add_lora", (adapter,))
            if is_pinned:
                yield RpcCall("pin_lora", (adapter,))

    def add_lora(self, lora_request: LoRARequest, *, owns_name: bool = False) -> list[bool]:
        """Load an adapter, and list it. owns_name: refuse a name that another number has."""
        number = lora_request.lora_int_id
        if owns_name and any(
            other.lora_name == lora_request.lora_name and other.lora_int_id != number for other in self._state.adapters
        ):
            loading = self._loading.pop(number, None)
            if loading is not None:
                self._call(RpcCall("remove_lora", (loading,)))
            raise InvalidRequest(
                f"There is an adapter {lora_request.lora_name!r} already. Remove it first, or choose another name."
            )
        adapter = self._identified(lora_request)
        is_new = number in self._loading
        try:
            answers = self._call(RpcCall("add_lora", (adapter,)))
        except ProcessLost:
            # The caller repeats the call, with the same identity.
            raise
        except Exception:
            self._loading.pop(number, None)
            raise
        if is_new or (adapter.load_inplace and any(answers)):
            replaced = {} if is_new else {adapter.identity: _without_tensors(adapter)}
            self._list(adapter, replaced={**self._state.replaced, **replaced})
            return [True]
        return [False]

    def prefetch_lora(self, lora_request: LoRARequest) -> list[LoRARequest]:
        """Start loading an adapter, which is listed once it is added. Returns it with its identity."""
        adapter = self._identified(lora_request)
        self._call(RpcCall("prefetch_lora", (adapter,)))
        return [_without_tensors(adapter)]

    def offer_loras(self, lora_requests: Sequence[LoRARequest]) -> list[None]:
        """List adapters that are loaded once requests use them; each number once, so that removed ones stay so."""
        for request in lora_requests:
            number = request.lora_int_id
            if number in self._state.offered:
                continue
            if self._by_number(number) is not None:
                (number,) = self.take_lora_number()
            adapter = self._identified(replace(request, lora_int_id=number))
            self._list(adapter, offered=self._state.offered | {request.lora_int_id})
        return [None]

    def remove_lora(self, lora_id: int) -> list[bool]:
        adapter = self._by_number(lora_id) or self._loading.get(lora_id)
        if adapter is None:
            return [False]
        while True:
            try:
                self._call(RpcCall("remove_lora", (adapter,)))
                break
            except ProcessLost:
                # The core that replaces the lost one may have loaded it again.
                continue
        self._loading.pop(lora_id, None)
        self._change(adapters=self._others(lora_id), pinned=self._state.pinned - {lora_id})
        return [True]

    def pin_lora(self, lora_id: int) -> list[bool]:
        adapter = self._by_number(lora_id)
        if adapter is None or not all(self._call(RpcCall("pin_lora", (adapter,)))):
            return [False]
        self._change(pinned=self._state.pinned | {lora_id})
        return [True]

    def known_loras(self) -> list[list[LoRARequest]]:
        """The adapters by number, without tensors."""
        adapters = sorted(self._state.adapters, key=lambda one: one.lora_int_id)
        return [[_without_tensors(one) for one in adapters]]

    def take_lora_number(self) -> list[int]:
        """A number that no adapter of this deployment has had, for a caller that chooses none."""
        number = self._state.last_number + 1
        if number > MAX_NUMBER:
            number = next(
                one for one in itertools.count(1) if self._by_number(one) is None and one not in self._loading
            )
        self._change(last_number=max(self._state.last_number, number))
        return [number]

    def _identified(self, request: LoRARequest) -> LoRARequest:
        """The adapter with the identity of its number; with a new one if the number is free.

        Raises InvalidRequest for another adapter than the number's, unless it is to be replaced.
        """
        if not request.has_weights:
            raise InvalidRequest(
                f"The adapter {request.lora_name!r} has neither lora_path nor tensors. Give lora_path, or tensors and "
                "peft_config."
            )
        number = request.lora_int_id
        known = self._by_number(number)
        if known is not None:
            if not request.load_inplace and not _is_same(known, request):
                raise InvalidRequest(
                    f"lora_int_id={number} is {_described(known)} already. Give each adapter an id of its own, remove "
                    "the other one first, or replace it with load_inplace=True."
                )
            stamp, version = known.stamp, known.version
            if request.load_inplace:
                stamp, version = self._stamp(request), self._new_identity()
            return replace(request, identity=known.identity, stamp=stamp, version=version)
        loading = self._loading.get(number)
        if loading is None or not _is_same(loading, request) or loading.tensors is not request.tensors:
            identity = self._new_identity(last_number=max(self._state.last_number, number))
            loading = replace(request, identity=identity, stamp=self._stamp(request), load_inplace=False)
            self._loading[number] = loading
        return loading

    def _new_identity(self, **fields: Any) -> int:
        """An identity or version that was never given before. fields: further ones of the state."""
        self._change(last_identity=self._state.last_identity + 1, **fields)
        return self._state.last_identity

    def _named_by_request(self, part: AdapterPart) -> LoRARequest:
        """List the adapter of a request that names its folder."""
        if not part.lora_path:
            raise AdapterNotFound(
                f"There is no adapter {part.lora_name!r} ({part.lora_int_id}), and the request has no lora_path. "
                "Add it first (add_lora)."
            )
        adapter = self._identified(LoRARequest(part.lora_name, part.lora_int_id, part.lora_path))
        self._list(adapter)
        return adapter

    def _stamp(self, request: LoRARequest) -> str:
        return stamp_of(request.lora_path) if self._stamps_files and request.lora_path else ""

    def _by_number(self, number: int) -> LoRARequest | None:
        return next((one for one in self._state.adapters if one.lora_int_id == number), None)

    def _others(self, number: int) -> list[LoRARequest]:
        return [one for one in self._state.adapters if one.lora_int_id != number]

    def _list(self, adapter: LoRARequest, **fields: Any) -> None:
        """Let requests use an adapter. The last one is loaded last by a new core, and so stays longest.

        fields: further ones of the state, which change with it: an owner that is lost leaves both or neither.
        """
        number = adapter.lora_int_id
        self._loading.pop(number, None)
        self._change(adapters=[*self._others(number), replace(adapter, load_inplace=False)], **fields)

    def _change(self, **fields: Any) -> None:
        self._state = replace(self._state, **fields)
        self._on_change(self._state)


def _is_same(known: LoRARequest, other: LoRARequest) -> bool:
    return (known.lora_name, known.lora_path) == (other.lora_name, other.lora_path)


def _without_tensors(adapter: LoRARequest) -> LoRARequest:
    return replace(adapter, tensors=None, peft_config=None)


def _described(adapter: LoRARequest) -> str:
    return f"the adapter {adapter.lora_name!r} ({adapter.lora_path or 'in memory'})"
