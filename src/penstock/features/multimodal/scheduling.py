"""Scheduling of media items: which items a step encodes, where chunks end, and which features stay in the cache.

The scheduler decides, and workers obey, so that all ranks hold the same features.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from weakref import WeakValueDictionary

import msgspec

from penstock.contract import ArrayBytes, Part, Parts, RpcCall, SchedulerOutput, part_of
from penstock.contract.rpc import WeightChange
from penstock.errors import InvalidRequest
from penstock.features.multimodal.messages import RESET, MediaItem, MediaPart, ScheduledRows, StepMediaPart
from penstock.scheduler.feature import SchedulerFeature
from penstock.scheduler.request import Request
from penstock.scheduler.services import SchedulerServices


class EncoderCache:
    """Features in the workers' cache, by the key of their item.

    An item is *used* by the running requests that have taken in a part of it. Unused ones stay until their room is
    needed, least recently used first. num_rows: rows of all. num_queries: uses so far. num_hits: those of items that
    were cached.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_rows = self.num_queries = self.num_hits = 0
        self._rows: OrderedDict[str, int] = OrderedDict()
        self._users: dict[str, set[str]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    @property
    def num_used_rows(self) -> int:
        """Rows of used items."""
        return sum(self._rows[key] for key in self._users)

    def is_used(self, key: str) -> bool:
        """Whether a running request uses the item."""
        return key in self._users

    def use(self, key: str, num_rows: int, req_id: str) -> None:
        """Note that a request uses an item, whose features are computed if they are not cached."""
        users = self._users.setdefault(key, set())
        if req_id not in users:
            self.num_queries += 1
            self.num_hits += key in self._rows
            users.add(req_id)
        if key not in self._rows:
            self._rows[key] = num_rows
            self.num_rows += num_rows
        self._rows.move_to_end(key)

    def release(self, key: str, req_id: str) -> None:
        """Note that a request does not use an item any more."""
        users = self._users.get(key)
        if users is not None:
            users.discard(req_id)
            if not users:
                del self._users[key]

    def evict(self) -> list[str]:
        """Drop unused items until the others fit; returns their keys."""
        evicted = []
        for key in list(self._rows):
            if self.num_rows <= self.capacity:
                break
            if key not in self._users:
                self.num_rows -= self._rows.pop(key)
                evicted.append(key)
        return evicted

    def clear(self) -> list[str]:
        """Forget all items, and their users; returns their keys."""
        keys = list(self._rows)
        self._rows.clear()
        self._users.clear()
        self.num_rows = 0
        return keys


class _Room:
    """Rows that are left for the items of a step: of the cache beside the used ones, and of those to encode."""

    def __init__(self, cache: EncoderCache, budget: int) -> None:
        self._cache = cache
        self._kept, self._new = cache.capacity - cache.num_used_rows, budget
        self._keys: set[str] = set()

    def take(self, key: str, num_rows: int) -> bool:
        """Take the rows of an item, unless it has them already; False where they do not fit."""
        if key in self._keys:
            return True
        kept = self._kept - (0 if self._cache.is_used(key) else num_rows)
        new = self._new - (0 if key in self._cache else num_rows)
        if kept < 0 or new < 0:
            return False
        self._kept, self._new = kept, new
        self._keys.add(key)
        return True


class MediaScheduling(SchedulerFeature):
    """Shares the encoder cache and the encoders' budget of a step among requests."""

    def __init__(self, services: SchedulerServices) -> None:
        config, step = services.config.multimodal, services.config.scheduler.max_num_batched_tokens
        self.cache = EncoderCache(config.cache_rows(step))
        self._budget = config.item_rows(step)
        self._max_num_tokens, self._runs_chunks = step, services.config.scheduler.enable_chunked_prefill
        # Items of all requests, and inputs among them by key and name: requests with one item share its bytes.
        self._items: dict[str, list[MediaItem]] = {}
        self._inputs = WeakValueDictionary[tuple[str, str], ArrayBytes]()
        # Items of running requests that are not taken in whole.
        self._running: dict[str, list[MediaItem]] = {}
        # Keys of features that the next step drops beside those that are evicted.
        self._dropped: list[str] = []
        # Keys and rows of the features that the requests of the step being built need to be computed or kept.
        self._planned: dict[str, dict[str, int]] = {}
        # Whether a request is kept out of that step.
        self._is_short = False

    def request_added(self, request: Request) -> None:
        stop = 0
        for item in _items(request):
            if item.start < stop or item.stop > request.num_prompt_tokens:
                raise InvalidRequest(
                    f"The {item.modality} at position {item.start} is not within the prompt's "
                    f"{request.num_prompt_tokens} tokens, after the items before it."
                )
            self._check_size(item)
            stop = item.stop
        num_rows = sum({item.key: item.num_rows for item in _items(request)}.values())
        if num_rows > self._budget and not self._runs_chunks:
            raise InvalidRequest(
                f"The prompt's media have {num_rows:,} tokens, which one step computes here. Allowed: up to "
                f"{self._budget:,} (encoder_cache_size, max_num_encoder_input_tokens). Give fewer of them, or smaller "
                "ones."
            )
        if _items(request):
            self._items[request.req_id] = items = [self._sharing(item) for item in _items(request)]
            request.parts = Parts({**(request.parts or {}), MediaPart.feature: MediaPart(items=items)})

    def request_ended(self, request: Request) -> None:
        self._items.pop(request.req_id, None)

    def _sharing(self, item: MediaItem) -> MediaItem:
        """The item with the inputs of an equal one that another request has."""
        inputs = {name: self._inputs.setdefault((item.key, name), array) for name, array in item.inputs.items()}
        return msgspec.structs.replace(item, inputs=inputs)

    def _check_size(self, item: MediaItem) -> None:
        if item.num_rows > self._budget:
            raise InvalidRequest(
                f"The {item.modality} has {item.num_rows:,} tokens. Allowed: up to {self._budget:,} "
                "(encoder_cache_size, max_num_encoder_input_tokens). Give a smaller one, or start with larger ones."
            )
        num_tokens = item.stop - item.start
        if not item.may_cut and num_tokens > self._max_num_tokens:
            raise InvalidRequest(
                f"The {item.modality} has {num_tokens:,} tokens, which this model computes in one step. Allowed: up to "
                f"{self._max_num_tokens:,} (max_num_batched_tokens)."
            )

    def chunk(self, request: Request, start: int, num_tokens: int) -> int:
        """End before the first item that there is no room for, or that would be cut and must not be."""
        self._planned.pop(request.req_id, None)
        items = _items(request)
        if not items or items[-1].stop <= start:
            return num_tokens
        stop, planned = start + num_tokens, self._planned.setdefault(request.req_id, {})
        room = _Room(self.cache, self._budget)
        for one in self._planned.values():
            for key, num_rows in one.items():
                room.take(key, num_rows)
        for item in items:
            if not item.overlaps(start, stop):
                continue
            if (not item.may_cut and item.stop > stop) or not room.take(item.key, item.num_rows):
                stop = max(start, item.start)
                break
            planned[item.key] = item.num_rows
        self._is_short |= stop == start
        return stop - start

    def admits(self, request: Request, in_step: Sequence[Request]) -> bool:
        """Whether no running request waits for room, which new ones might take again and again."""
        return not self._is_short

    def part_of_step(self, message: SchedulerOutput) -> Part | None:
        self._planned.clear()
        self._is_short = False
        for req_id in message.preempted_req_ids | message.finished_req_ids:
            self._forget(req_id)
        for new in message.scheduled_new_reqs:
            part = part_of(new.parts, MediaPart)
            if part is not None:
                self._running[new.req_id] = self._items[new.req_id]
        inputs: dict[str, dict[str, ArrayBytes]] = {}
        rows: list[ScheduledRows] = []
        ended: list[tuple[str, str]] = []
        for req_id, start in message.first_positions():
            items = self._running.get(req_id)
            if items is None:
                continue
            stop = start + message.num_scheduled_tokens[req_id]
            for number, item in enumerate(items):
                if not item.overlaps(start, stop):
                    continue
                if item.key not in self.cache:
                    inputs[item.key] = item.inputs
                self.cache.use(item.key, item.num_rows, req_id)
                rows += item.scheduled(req_id, number, start, stop)
                if item.stop <= stop:
                    ended.append((item.key, req_id))
            if items[-1].stop <= stop:
                del self._running[req_id]
        # The items of this step count as used, so that none of them is dropped.
        evicted = [*self._dropped, *self.cache.evict()]
        self._dropped.clear()
        for key, req_id in ended:
            self.cache.release(key, req_id)
        return StepMediaPart(evicted=evicted, rows=rows, inputs=inputs) if rows or evicted else None

    def workers_replaced(self) -> None:
        self._running.clear()
        self._planned.clear()
        self._dropped.clear()
        self.cache.clear()

    def caches_dropped(self) -> None:
        self._dropped += self.cache.clear()

    def before_call(self, call: RpcCall) -> None:
        """Have all features dropped, and encoded again, where workers drop them, or change the encoder."""
        if call.method_name == RESET or call.effects.weights is WeightChange.NOW:
            self.caches_dropped()

    def counts(self) -> Mapping[str, int]:
        cache = self.cache
        return {
            "num_encoder_tokens": cache.capacity,
            "num_used_encoder_tokens": cache.num_used_rows,
            "num_cached_encoder_tokens": cache.num_rows - cache.num_used_rows,
            "num_encoder_queries": cache.num_queries,
            "num_encoder_hits": cache.num_hits,
        }

    def _forget(self, req_id: str) -> None:
        for item in self._running.pop(req_id, ()):
            self.cache.release(item.key, req_id)


def _items(request: Request) -> Sequence[MediaItem]:
    part = part_of(request.parts, MediaPart)
    return () if part is None else part.items
