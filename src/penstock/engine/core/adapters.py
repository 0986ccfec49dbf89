"""LoRA adapters of an engine core: which are known, which are loaded, and the requests that wait for one."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from penstock.config import LoRAConfig
from penstock.contract import Parts, part_of
from penstock.contract.lora import AdapterPart, LoRARequest
from penstock.engine.messages import EngineRequest
from penstock.errors import InvalidRequest
from penstock.scheduler.adapters import AdapterLimit
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from penstock.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)
# Reason for which a request waits while its adapter is loaded.
_ADAPTER = "its adapter"
# Worker methods that the core calls through `CoreAdapters`.
ADAPTER_METHODS = ("add_lora", "prefetch_lora", "offer_loras", "remove_lora", "pin_lora", "known_loras")


@dataclass(slots=True)
class _Known:
    """An adapter that requests may use.

    version: changes with its weights. is_removed: only requests of before its removal use it. waiting: requests that
    wait for it.
    """

    request: LoRARequest
    version: int
    is_loaded: bool = False
    has_begun: bool = False
    is_removed: bool = False
    waiting: list[str] = field(default_factory=list)


class CoreAdapters:
    """Loads adapters before their requests run, while steps go on.

    call: calls a method of every worker between two steps. tell_ends: called with the last outputs of requests whose
    adapters cannot be loaded. loads_at_once: ranks whose engines schedule by themselves cannot wait for an adapter,
    since they would not stop waiting at the same step.
    """

    def __init__(
        self,
        config: LoRAConfig,
        scheduler: Scheduler,
        limit: AdapterLimit | None,
        call: Callable[..., list[Any]],
        tell_ends: Callable[[list[EngineCoreOutput]], None],
        *,
        loads_at_once: bool,
    ) -> None:
        self._is_enabled, self._num_on_host = config.enable_lora, config.num_on_host
        self._scheduler = scheduler
        self._limit = limit
        self._call = call
        self._tell_ends = tell_ends
        self._loads_at_once = loads_at_once
        self._known: dict[int, _Known] = {}
        # Ids of adapters that were removed, which are not offered again.
        self._removed: set[int] = set()
        self._pinned: set[int] = set()
        self._versions = itertools.count()

    def with_version(self, request: EngineRequest) -> Parts | None:
        """The parts of a new request, completed. Raises InvalidRequest for an adapter that it cannot use.

        The adapter of a request that a lost core has admitted may have been replaced or removed since.
        """
        parts, part = request.parts, part_of(request.parts, AdapterPart)
        if parts is None or part is None:
            return parts
        self._require_enabled()
        known = self._known.get(part.lora_int_id)
        if known is None or (known.is_removed and not request.is_admitted):
            known = self._known_again(part, known, is_resumed=bool(request.output_token_ids))
        elif not request.is_admitted and not _is_same(part, known.request):
            raise InvalidRequest(
                f"lora_int_id={part.lora_int_id} is {_described(known.request)}, and the request has "
                f"{part.lora_name!r} ({part.lora_path or 'in memory'}). Give each adapter an id of its own, or remove "
                "the other one first."
            )
        path = known.request.lora_path
        return Parts({**parts, part.feature: replace(part, version=known.version, lora_path=path)})

    def _known_again(self, part: AdapterPart, before: _Known | None, *, is_resumed: bool) -> _Known:
        """The adapter of a request that names its folder. before: the removed adapter of this id, if any."""
        if not part.lora_path:
            raise InvalidRequest(
                f"There is no adapter {part.lora_name!r} ({part.lora_int_id}), and the request has no lora_path. "
                "Add it first (add_lora)."
            )
        if before is not None and _is_same(part, before.request):
            before.is_removed = False
            return before
        known = self._note(LoRARequest(part.lora_name, part.lora_int_id, part.lora_path))
        known.is_removed = is_resumed
        return known

    def add(self, req_id: str, parts: Parts | None) -> None:
        """Follow a new request of the scheduler, which waits while its adapter is loaded."""
        if not self._is_loaded_for(req_id, parts):
            self._scheduler.wait_for(req_id, _ADAPTER)

    def _is_loaded_for(self, req_id: str, parts: Parts | None) -> bool:
        """Whether a request may run at once; otherwise its adapter is being loaded."""
        part = part_of(parts, AdapterPart)
        if part is None:
            return True
        known = self._known[part.lora_int_id]
        if len(self._known) > self._num_on_host:
            # Others may have taken its place.
            self._read_status()
        if known.is_loaded:
            return True
        if self._loads_at_once:
            self._call("add_lora", args=(known.request,))
            known.is_loaded = True
            return True
        known.waiting.append(req_id)
        self._begin(known)
        return False

    @property
    def are_loading(self) -> bool:
        """Whether requests wait for adapters."""
        return any(known.waiting for known in self._known.values())

    def take_ready(self) -> None:
        """Let requests run whose adapters are loaded, and end those whose adapters cannot be."""
        if not self.are_loading:
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
        for lora_id, states in self._read_status().items():
            known = self._known[lora_id]
            if not known.waiting:
                continue
            if not known.has_begun:
                self._begin(known)
                continue
            reasons = [state for state in states if state not in (None, "", _GONE)]
            if reasons:
                failed.update(dict.fromkeys(known.waiting, str(reasons[0])))
            elif "" not in states:
                # One that has made room for others meanwhile is loaded when its request runs.
                ready += known.waiting
                known.waiting.clear()
            if reasons or (known.is_removed and not known.waiting):
                del self._known[lora_id]
        return ready, failed

    def _read_status(self) -> dict[int, list[object]]:
        """States of the known adapters, of each rank."""
        of_ranks = self._call("lora_status")
        states: dict[int, list[object]] = {}
        for lora_id, known in self._known.items():
            states[lora_id] = [status.get(lora_id, _GONE) for status in of_ranks]
            known.is_loaded = all(state is None for state in states[lora_id])
        return states

    def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Call a worker method of `ADAPTER_METHODS` by its name; one result per rank."""
        self._require_enabled()
        functions: dict[str, Callable[..., list[Any]]] = {
            "add_lora": self._add,
            "prefetch_lora": self._prefetch,
            "offer_loras": self._offer,
            "remove_lora": self._remove,
            "pin_lora": self._pin,
            "known_loras": self._list,
        }
        return functions[method](*args, **kwargs)

    def workers_replaced(self) -> None:
        """Load all adapters again in new workers; requests that wait for one still do."""
        for known in self._known.values():
            known.is_loaded = known.has_begun = False
            if known.request.tensors is not None or known.request.lora_int_id in self._pinned:
                self._begin(known)
        for lora_id in sorted(self._pinned):
            self._call("pin_lora", args=(lora_id,))

    def _begin(self, known: _Known) -> None:
        """Start loading an adapter; again later, where adapters in use leave it no room."""
        try:
            self._call("prefetch_lora", args=(known.request,))
        except InvalidRequest as error:
            logger.info("The adapter %s waits: %s", known.request.lora_name, error)
        else:
            known.has_begun = True

    def _add(self, lora_request: LoRARequest) -> list[bool]:
        known = self._check_same(lora_request)
        try:
            answers = self._call("add_lora", args=(lora_request,))
        except Exception:
            if known is not None and not known.is_loaded and not known.waiting:
                # It was to be loaded in the background, which has failed.
                del self._known[lora_request.lora_int_id]
            raise
        if known is not None:
            known.is_loaded = known.has_begun = True
        if known is None or (lora_request.load_inplace and any(answers)):
            now = self._note(replace(lora_request, load_inplace=False))
            now.is_loaded = now.has_begun = True
        return answers

    def _prefetch(self, lora_request: LoRARequest) -> list[None]:
        known = self._check_same(lora_request)
        if known is not None and lora_request.load_inplace:
            return self._call("prefetch_lora", args=(lora_request,))
        if known is None:
            known = self._note(replace(lora_request, load_inplace=False))
        self._begin(known)
        return [None] if known.has_begun else self._call("prefetch_lora", args=(known.request,))

    def _offer(self, lora_requests: Sequence[LoRARequest]) -> list[None]:
        """Let requests use adapters by their ids; those that were removed meanwhile stay so."""
        for request in lora_requests:
            if request.lora_int_id not in self._known and request.lora_int_id not in self._removed:
                self._note(request)
        return [None]

    def _remove(self, lora_id: int) -> list[bool]:
        known = self._known.get(lora_id)
        if known is not None and known.request.lora_path == "" and known.waiting:
            raise InvalidRequest(f"Requests wait for the adapter {lora_id}. Abort them first.")
        was_known = known is not None and not known.is_removed
        if known is not None and known.waiting:
            known.is_removed = True
        elif known is not None:
            del self._known[lora_id]
        self._removed.add(lora_id)
        self._pinned.discard(lora_id)
        self._tell_pinned()
        return [was_held or was_known for was_held in self._call("remove_lora", args=(lora_id,))]

    def _pin(self, lora_id: int) -> list[bool]:
        if self._limit is not None and lora_id in self._known:
            self._limit.check_pin(lora_id)
        answers: list[bool] = self._call("pin_lora", args=(lora_id,))
        if all(answers):
            self._pinned.add(lora_id)
            self._tell_pinned()
        return answers

    def _list(self) -> list[list[LoRARequest]]:
        """The known adapters, without tensors."""
        in_memory = {"lora_path": "in memory", "tensors": None, "peft_config": None}
        requests = [known.request for known in self._known.values() if not known.is_removed]
        return [[one if one.tensors is None else replace(one, **in_memory) for one in requests]]

    def _tell_pinned(self) -> None:
        if self._limit is not None:
            self._limit.set_pinned(self._pinned)

    def _check_same(self, request: LoRARequest) -> _Known | None:
        """The known adapter of this id. Raises InvalidRequest for another one, unless it is to be replaced."""
        if not request.has_weights:
            raise InvalidRequest(
                f"The adapter {request.lora_name!r} has neither lora_path nor tensors. Give lora_path, or tensors and "
                "peft_config."
            )
        known = self._known.get(request.lora_int_id)
        if known is None or request.load_inplace:
            return known
        if (known.request.lora_name, known.request.lora_path) == (request.lora_name, request.lora_path):
            known.is_removed = False
            return known
        if known.is_removed:
            return None
        raise InvalidRequest(
            f"lora_int_id={request.lora_int_id} is {_described(known.request)} already. Give each adapter an id of "
            "its own, remove the other one first, or replace it with load_inplace=True."
        )

    def _note(self, request: LoRARequest) -> _Known:
        """Let requests use an adapter. Those of another one that had its id go on with this one."""
        before = self._known.get(request.lora_int_id)
        known = self._known[request.lora_int_id] = _Known(request, next(self._versions))
        if before is not None:
            known.waiting = before.waiting
        self._removed.discard(request.lora_int_id)
        self._scheduler.change_parts(lambda parts: _with_new_version(parts, known))
        return known

    def _require_enabled(self) -> None:
        if not self._is_enabled:
            raise InvalidRequest(
                "LoRA adapters are not enabled in this engine. Start it with enable_lora=True, or leave lora_request "
                "out."
            )


# State of an adapter that a rank does not hold.
_GONE = object()


def _is_same(part: AdapterPart, request: LoRARequest) -> bool:
    return part.lora_name == request.lora_name and part.lora_path in ("", request.lora_path)


def _described(request: LoRARequest) -> str:
    return f"the adapter {request.lora_name!r} ({request.lora_path or 'in memory'})"


def _with_new_version(parts: Parts, known: _Known) -> Parts | None:
    """The parts of a request of this adapter with its present version; None for other requests."""
    part = part_of(parts, AdapterPart)
    if part is None or part.lora_int_id != known.request.lora_int_id:
        return None
    return Parts({**parts, part.feature: replace(part, version=known.version, lora_path=known.request.lora_path)})
