"""Scheduler side of LoRA adapters: which the workers hold, and the requests that wait for one."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.contract import Parts, RpcCall, part_of
from penstock.errors import InvalidRequest, ModelError, UnsupportedFeature
from penstock.features.lora.request import AdapterPart, LoRARequest
from penstock.scheduler.feature import SchedulerFeature
from penstock.scheduler.outputs import FinishReason
from penstock.scheduler.request import Request, RequestStatus
from penstock.scheduler.services import SchedulerServices

logger = logging.getLogger(__name__)
# Reasons for which a request waits: while its adapter is loaded, and while running requests have all slots.
_ADAPTER, _SLOT = "its adapter", "a slot for its adapter"


@dataclass(slots=True)
class _Held:
    """An adapter that workers hold or load, or that came in memory.

    version: changes with its weights. digest: of its matrices; None until it is read. has_begun: its loading was asked
    for. is_removed: it goes once no request uses it. waiting: requests that wait for it.
    """

    request: LoRARequest
    version: int
    digest: str | None = None
    is_loaded: bool = False
    has_begun: bool = False
    is_pinned: bool = False
    is_removed: bool = False
    waiting: list[Request] = field(default_factory=list)

    @property
    def must_stay(self) -> bool:
        """False for an adapter that workers may have dropped, and that requests can have read again."""
        has_tensors = self.request.tensors is not None
        return bool(self.is_loaded or self.waiting or self.is_pinned or self.is_removed or has_tensors)


class LoRAScheduling(SchedulerFeature):
    """Loads adapters before their requests run, while steps go on, and limits those that run at once.

    Adapters are known by their keys here, which are identities (`AdapterList`). Removed ones stay until no request uses
    them.

    Waiting requests whose adapter has no slot are skipped; others go on. The oldest skipped request gets the slot of
    one adapter: later requests of that adapter wait, so that it becomes free once those that run have ended. So no
    request is starved, whatever arrives after it.
    """

    def __init__(self, services: SchedulerServices) -> None:
        config = services.config
        self._scheduler, self._call, self._tell_ends = services.scheduler, services.call_workers, services.tell_ends
        self._max_loras, self._num_on_host = config.lora.max_loras, config.lora.num_on_host
        # Ranks whose engines schedule by themselves cannot wait for an adapter: they would not stop waiting at the same
        # step.
        self._loads_at_once = config.parallel.must_agree_on_time
        self._held: dict[int, _Held] = {}
        # Running requests by adapter, while requests are admitted to a step.
        self._users: Counter[int] = Counter()
        # Adapter whose slot the oldest skipped request gets.
        self._leaving: int | None = None
        # Whether keys of blocks must mean the same to other engines.
        self._needs_digests = config.keeps_kv
        # Versions of adapters without a stamp, whose folders may have other weights each time that they are read.
        self._unstamped_versions = itertools.count(-1, -1)

    def request_added(self, request: Request) -> None:
        """Complete the request's part; it waits while its adapter is loaded.

        Raises InvalidRequest for an adapter that cannot be had any more, or can have no slot.
        """
        part = part_of(request.parts, AdapterPart)
        if part is None:
            return
        pinned = self._pinned
        if part.key not in pinned and len(pinned) >= self._max_loras:
            raise InvalidRequest(
                f"The adapter {part.lora_name!r} cannot run: all of max_loras={self._max_loras} slots have pinned "
                "adapters. Start the engine with more, or remove one of them."
            )
        held = self._held.get(part.key)
        if held is None:
            if not part.lora_path:
                raise InvalidRequest(
                    f"The adapter {part.lora_name!r} ({part.lora_int_id}) was removed, and the core that had it in "
                    "memory is lost. Add it again, and repeat the request."
                )
            held = self._note(part.adapter)
        request.parts = _completed(request.parts, part, held)
        if not self._is_loaded_for(request, held):
            self._scheduler.wait_for(request.req_id, _ADAPTER)

    def begin_admission(self, running: Sequence[Request]) -> None:
        self._users = Counter(key for request in running if (key := _key_of(request)) is not None)
        skipped = self._scheduler.waiting_for(_SLOT)
        slots = self._slots
        if not skipped:
            self._leaving = None
        elif len(slots) < self._max_loras or any(_key_of(one) in slots for one in skipped):
            self._leaving = None
            for request in skipped:
                self._scheduler.ready(request.req_id, _SLOT)

    def skips(self, request: Request) -> str | None:
        key = _key_of(request)
        if key is None:
            return None
        # A pinned adapter may have no slot yet, where requests of others run.
        slots = self._slots
        has_slot = self._users[key] > 0 or len(slots | {key}) <= self._max_loras
        if has_slot and not (key == self._leaving and self._is_after_skipped(request)):
            self._users[key] += 1
            return None
        if self._leaving is None:
            others = slots - self._pinned
            self._leaving = min(others, key=lambda one: (self._users[one], one)) if others else None
        return _SLOT

    @property
    def _pinned(self) -> set[int]:
        return {key for key, held in self._held.items() if held.is_pinned}

    @property
    def _slots(self) -> set[int]:
        """Adapters with slots: those of running requests, and pinned ones."""
        return {key for key, count in self._users.items() if count} | self._pinned

    def _is_after_skipped(self, request: Request) -> bool:
        skipped = self._scheduler.waiting_for(_SLOT)
        return any(_order(request) > _order(one) for one in skipped if _key_of(one) != self._leaving)

    def _is_loaded_for(self, request: Request, held: _Held) -> bool:
        """Whether a request may run at once; otherwise its adapter is being loaded."""
        if len(self._held) > self._num_on_host:
            # Others may have taken its place.
            self._read_status()
        if held.is_loaded:
            return True
        if self._loads_at_once:
            self._call(RpcCall("add_lora", (held.request,)))
            held.is_loaded = True
            return True
        held.waiting.append(request)
        self._begin(held)
        return False

    @property
    def is_polled(self) -> bool:
        return any(held.waiting for held in self._held.values())

    def before_step(self) -> None:
        """Let requests run whose adapters are loaded, and end those whose adapters cannot be."""
        self.after_step()
        if not self.is_polled:
            return
        ready, failed = self._loaded_and_failed()
        for req_id in ready:
            self._scheduler.ready(req_id, _ADAPTER)
        for req_id, reason in failed.items():
            ended = self._scheduler.finish_requests([req_id], FinishReason.ERROR)
            self._tell_ends([replace(output, error=reason) for output in ended])

    def _loaded_and_failed(self) -> tuple[list[str], dict[str, str]]:
        """Requests whose adapters are loaded now, and reasons by request whose adapters cannot be loaded."""
        ready: list[str] = []
        failed: dict[str, str] = {}
        for key, states in self._read_status().items():
            held = self._held[key]
            held.waiting = [request for request in held.waiting if request.status is not RequestStatus.FINISHED]
            if not held.waiting:
                continue
            if not held.has_begun:
                self._begin(held)
                continue
            reasons = [state for state in states if state not in (None, "", _GONE)]
            if reasons:
                failed.update(dict.fromkeys((request.req_id for request in held.waiting), str(reasons[0])))
            elif "" not in states:
                # One that has made room for others meanwhile is loaded when its request runs.
                for request in held.waiting:
                    self._complete(request, held)
                    ready.append(request.req_id)
                held.waiting.clear()
            if reasons:
                self._drop(key)
        return ready, failed

    def _read_status(self) -> dict[int, list[object]]:
        """States of the adapters, of each rank."""
        of_ranks = self._call(RpcCall("lora_status"))
        states: dict[int, list[object]] = {}
        for key, held in self._held.items():
            states[key] = [status.get(key, _GONE) for status in of_ranks]
            held.is_loaded = all(state is None for state in states[key])
        self._read_digests()
        return states

    def _read_digests(self) -> None:
        """Read the digests of loaded adapters, where all ranks have the matrices that the adapter was listed with."""
        unread = [held for held in self._held.values() if held.is_loaded and held.digest is None]
        if not self._needs_digests or not unread:
            return
        of_ranks: list[dict[int, str]] = self._call(RpcCall("lora_digests"))
        for held in unread:
            is_certain = held.request.stamp or held.request.tensors is not None
            digests = {of_rank.get(held.request.key, "") for of_rank in of_ranks}
            held.digest = digests.pop() if is_certain and len(digests) == 1 else ""

    def _complete(self, request: Request, held: _Held) -> None:
        """Complete the part of a request whose adapter is loaded now."""
        part = part_of(request.parts, AdapterPart)
        assert part is not None, "it waits for its adapter"
        if part.digest != (held.digest or ""):
            request.parts = _completed(request.parts, part, held)
            request.block_hashes.clear()

    def after_step(self) -> None:
        """Drop removed adapters which no request uses any more."""
        removed = {key for key, held in self._held.items() if held.is_removed}
        if not removed:
            return
        in_use = set(map(_key_of, self._scheduler.unfinished_requests()))
        for key in sorted(removed - in_use):
            self._drop(key)

    def workers_ready(self) -> None:
        """Load all adapters again in new workers; requests that wait for one still do."""
        for held in self._held.values():
            held.is_loaded = held.has_begun = False
            if held.request.tensors is not None or held.is_pinned:
                self._begin(held)
        for key in sorted(self._pinned):
            self._call(RpcCall("pin_lora", (key,)))

    def _begin(self, held: _Held) -> None:
        """Start loading an adapter; again later, where adapters in use leave it no room."""
        try:
            self._call(RpcCall("prefetch_lora", (held.request,)))
        except InvalidRequest as error:
            logger.info("The adapter %s waits: %s", held.request.lora_name, error)
        else:
            held.has_begun = True

    def add_lora(self, adapter: LoRARequest) -> list[bool]:
        held = self._held.get(adapter.key)
        try:
            answers: list[bool] = self._call(RpcCall("add_lora", (adapter,)))
        except (ModelError, UnsupportedFeature, InvalidRequest):
            if held is None or not (held.is_loaded or held.waiting):
                # Other ranks than the one that has failed may have it.
                self._drop(adapter.key)
            raise
        if held is None or (adapter.load_inplace and any(answers)):
            self._note(adapter, is_loaded=True)
        else:
            held.is_loaded = held.has_begun = True
            self._read_digests()
        return answers

    def prefetch_lora(self, adapter: LoRARequest) -> list[None]:
        held = self._held.get(adapter.key)
        if held is not None and adapter.load_inplace:
            return self._call(RpcCall("prefetch_lora", (adapter,)))
        held = held or self._note(adapter)
        self._begin(held)
        return [None] if held.has_begun else self._call(RpcCall("prefetch_lora", (held.request,)))

    def remove_lora(self, adapter: LoRARequest) -> list[None]:
        """Remove an adapter; requests that wait or run keep it until they end."""
        held = self._held.get(adapter.key) or self._note(adapter)
        held.is_removed = True
        self.after_step()
        return [None]

    def pin_lora(self, adapter: LoRARequest) -> list[bool]:
        held = self._held.get(adapter.key)
        if held is not None:
            self._check_pin(adapter)
        answers: list[bool] = self._call(RpcCall("pin_lora", (adapter.key,)))
        if all(answers):
            held = held or self._note(adapter)
            held.is_pinned = True
        return answers

    def _check_pin(self, adapter: LoRARequest) -> None:
        """Raise InvalidRequest if pinning an adapter would leave no slot for unfinished requests of others."""
        pinned = self._pinned | {adapter.key}
        if len(pinned) < self._max_loras:
            return
        for request in self._scheduler.unfinished_requests():
            other = part_of(request.parts, AdapterPart)
            if other is not None and other.key not in pinned:
                raise InvalidRequest(
                    f"The adapter {adapter.lora_name!r} cannot be pinned now: it would take the last of max_loras="
                    f"{self._max_loras} slots, and request {request.req_id} of adapter {other.lora_name!r} has not "
                    "ended. Pin it later, or start the engine with more slots."
                )

    def _note(self, adapter: LoRARequest, *, is_loaded: bool = False) -> _Held:
        """Hold an adapter; its requests go on with it where it replaces other weights in place."""
        before = self._held.get(adapter.key)
        self._held = {key: held for key, held in self._held.items() if held.must_stay}
        version = adapter.version if adapter.stamp else next(self._unstamped_versions)
        held = self._held[adapter.key] = _Held(replace(adapter, load_inplace=False), version)
        held.is_loaded = held.has_begun = is_loaded
        self._read_digests()
        if before is not None:
            held.waiting, held.is_pinned, held.is_removed = before.waiting, before.is_pinned, before.is_removed
        if adapter.load_inplace:
            self._scheduler.change_parts(lambda parts: _with_new_version(parts, held))
        return held

    def _drop(self, key: int) -> None:
        """Forget an adapter, on all ranks."""
        self._call(RpcCall("remove_lora", (key,)))
        self._held.pop(key, None)


# State of an adapter that a rank does not hold.
_GONE = object()


def _key_of(request: Request) -> int | None:
    """Key of a request's adapter."""
    part = part_of(request.parts, AdapterPart)
    return None if part is None else part.key


def _order(request: Request) -> tuple[int, int]:
    return request.priority, request.order


def _with_new_version(parts: Parts, held: _Held) -> Parts | None:
    """The parts of a request of this adapter with its present version; None for other requests."""
    part = part_of(parts, AdapterPart)
    if part is None or part.key != held.request.key:
        return None
    path, stamp = held.request.lora_path, held.request.stamp
    return _completed(parts, replace(part, lora_path=path, stamp=stamp), held)


def _completed(parts: Parts | None, part: AdapterPart, held: _Held) -> Parts:
    """The parts of a request with what is known of its adapter."""
    return Parts({**(parts or {}), part.feature: replace(part, version=held.version, digest=held.digest or "")})
