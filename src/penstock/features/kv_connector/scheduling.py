"""Scheduler side of KV connectors: what is loaded for waiting requests, and how long blocks are kept."""

from __future__ import annotations

import logging
import pickle
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from penstock.config.kv_connector import FAIL
from penstock.contract import ModelRunnerOutput, Part, RpcCall, SchedulerOutput
from penstock.contract.feature import with_label
from penstock.contract.parts import OutputPart
from penstock.errors import ConfigError
from penstock.features.kv_connector.base import (
    KVConnectorBase_V1,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorStats,
    SupportsHMA,
)
from penstock.features.kv_connector.load import make_connector
from penstock.features.kv_connector.messages import ConnectorStep, RankOutput
from penstock.features.kv_connector.requests import ConnectorRequest, KVCacheBlocks
from penstock.features.kv_transfer import KVTransferResult
from penstock.scheduler.feature import SchedulerFeature
from penstock.scheduler.idle_turns import IdleTurns
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from penstock.scheduler.request import Request
from penstock.scheduler.services import SchedulerServices

logger = logging.getLogger(__name__)
# Reasons for which a request waits, and for which blocks are held.
_LOAD, _LOOKUP, _SAVE = "blocks from the KV connector", "an answer of the KV connector", "saves by the KV connector"
# Intervals at which the ranks' results are asked for, and at which the connector is asked again, or told of a turn of
# the core in which nothing runs.
_ASK_S, _TELL_S = 0.003, 0.01
# Time for which blocks of ended requests are kept without a word, and between two warnings.
_LONG_S, _WARN_S = 300.0, 60.0
# Interval at which the connector's statistics are asked for while nothing else is, and time over which they are shown.
_STATS_S, _SHOWN_S = 1.0, 10.0
_FAILED = "The KV cache of {} tokens could not be loaded by the KV connector (kv_load_failure_policy='fail')."


@dataclass(eq=False, slots=True)
class _Load:
    """Load of a request's blocks. num_local: tokens before it, of the prefix cache. num_tokens: with those it gives."""

    request: Request
    num_local: int
    num_tokens: int
    block_ids: tuple[list[int], ...]


class ConnectorScheduling(SchedulerFeature):
    """Drives a connector's scheduler side, and asks all ranks for what theirs have done.

    A request whose blocks are loaded in its first step is admitted with them; one whose blocks are loaded beside steps
    waits. Blocks of a transfer are held until all ranks have ended it, whatever the request does meanwhile.
    """

    def __init__(self, services: SchedulerServices) -> None:
        transfer = services.config.kv_connector.connector
        assert transfer is not None, "the feature is on"
        self._services, self._scheduler = services, services.scheduler
        self._kv_cache = services.scheduler.kv_cache
        if not self._kv_cache.can_reserve:
            raise ConfigError(
                "kv_transfer_config is not valid for a model with recurrent states or cross attention, whose blocks "
                "cannot be loaded. Leave it out."
            )
        self._fails = transfer.kv_load_failure_policy == FAIL
        self._requests: dict[str, Request] = {}
        # Requests that were looked up, with their preemptions then, and those whose load has failed.
        self._tried: dict[str, int] = {}
        self._given_up: set[str] = set()
        # Loads of requests that will be in a step, or are, by the step; and those beside steps.
        self._due: dict[str, _Load] = {}
        self._in_steps: dict[int, list[_Load]] = {}
        self._beside: dict[str, _Load] = {}
        # When blocks of ended requests began to be kept.
        self._saving: dict[str, float] = {}
        # Ranks that have named a request, by what they have done; blocks that a rank could not load.
        self._num_sent: Counter[str] = Counter()
        self._num_received: Counter[str] = Counter()
        self._invalid: set[int] = set()
        self._ended: list[str] = []
        self._results: dict[str, KVTransferResult] = {}
        self._has_news = False
        self._ask_at = self._tell_at = self._look_up_at = 0.0
        self._warn_at = 0.0
        self._idle_turns = IdleTurns(services.scheduler, services.call_soon)
        # Of the current workers; None while they are replaced.
        self._made: KVConnectorBase_V1 | None = None
        self.workers_ready()
        self._counts = Counter(
            dict.fromkeys(
                ("external_prefix_cache_queries", "external_prefix_cache_hits", "kv_connector_failed_loads"), 0
            )
        )
        # Statistics that are not shown yet, and those that are.
        self._stats: KVConnectorStats | None = None
        self._shown_stats: dict[str, float] = {}
        self._show_at = 0.0

    @property
    def _connector(self) -> KVConnectorBase_V1:
        assert self._made is not None, "no step is scheduled while workers are replaced"
        return self._made

    def workers_ready(self) -> None:
        config, layout = self._services.config, self._kv_cache.config
        self._made = made = make_connector(config, KVConnectorRole.SCHEDULER, layout)
        self._num_ranks = made.get_finished_count() or config.parallel.world_size
        answers = self._services.call_workers(RpcCall("get_kv_connector_handshake_metadata"))
        metadata = {rank: one for answer in answers if answer is not None for rank, one in answer.items()}
        if metadata:
            made.set_xfer_handshake_metadata(metadata)

    def _view(self, request: Request, *, has_ended: bool = False) -> ConnectorRequest:
        return ConnectorRequest(request, self._kv_cache, has_ended=has_ended)

    def request_added(self, request: Request) -> None:
        self._requests[request.req_id] = request

    # Loads.

    def skips(self, request: Request) -> str | None:
        req_id = request.req_id
        if req_id in self._beside:
            return _LOAD
        if req_id in self._due:
            if self._kv_cache.holds(request):
                return None
            # Its blocks were taken from it before it ran.
            del self._due[req_id], self._tried[req_id]
        if self._tried.get(req_id) == request.num_preemptions or req_id in self._given_up:
            return None
        if request.needs_all_of_prompt or self._kv_cache.holds(request):
            return None
        num_local = self._kv_cache.get_computed_blocks(request).num_tokens
        num_found, is_beside = self._connector.get_num_new_matched_tokens(self._view(request), num_local)
        if num_found is None:
            self._look_up_at = time.monotonic() + _TELL_S
            return _LOOKUP
        if num_found > 0 and not self._reserve(request, num_local, num_found, is_beside=is_beside):
            return None
        if req_id not in self._tried:
            self._counts["external_prefix_cache_queries"] += request.num_tokens - num_local
        self._tried[req_id] = request.num_preemptions
        return _LOAD if req_id in self._beside else None

    def _reserve(self, request: Request, num_local: int, num_found: int, *, is_beside: bool) -> bool:
        """Reserve blocks for tokens that the connector has found; False for no room yet."""
        num_tokens = self._kv_cache.whole_blocks(min(num_local + num_found, request.num_tokens - 1))
        if num_tokens <= num_local:
            return True
        block_ids = self._scheduler.reserve_blocks(request.req_id, num_tokens, _LOAD)
        if block_ids is None:
            return False
        load = _Load(request, num_local, num_tokens, block_ids)
        if is_beside:
            self._kv_cache.hold_blocks(request.req_id, _LOAD)
            self._beside[request.req_id] = load
            self._tell_blocks(load)
        else:
            self._due[request.req_id] = load
            self._scheduler.blocks_loaded(request.req_id, num_tokens, _LOAD)
        return True

    def _tell_blocks(self, load: _Load) -> None:
        self._has_news = True
        blocks, num_external = KVCacheBlocks(load.block_ids), load.num_tokens - load.num_local
        self._connector.update_state_after_alloc(self._view(load.request), blocks, num_external)

    def part_of_step(self, message: SchedulerOutput) -> Part | None:
        for new in message.scheduled_new_reqs:
            load = self._due.pop(new.req_id, None)
            if load is not None:
                self._in_steps.setdefault(message.step_id, []).append(load)
            else:
                load = _Load(
                    self._requests[new.req_id], new.num_computed_tokens, new.num_computed_tokens, new.block_ids
                )
            load.block_ids = new.block_ids
            self._tell_blocks(load)
        if not message.num_scheduled_tokens and not self._ended and not self._has_news:
            if time.monotonic() < self._tell_at:
                return None
            self._tell_at = time.monotonic() + _TELL_S
        self._has_news = False
        metadata = self._connector.build_connector_meta(message)
        ended, self._ended = self._ended, []
        if metadata is None and not ended and message.step_id not in self._in_steps:
            return None
        return ConnectorStep(metadata=None if metadata is None else pickle.dumps(metadata), ended=ended)

    def take_results(self, message: SchedulerOutput, results: ModelRunnerOutput) -> None:
        if message.step_id not in self._in_steps:
            return
        self._ask()
        loads = self._in_steps.pop(message.step_id)
        failed = {load.request: load for load in loads if self._num_loaded(load) < load.num_tokens}
        self._counts["external_prefix_cache_hits"] += sum(
            load.num_tokens - load.num_local for load in loads if load.request not in failed
        )
        if failed:
            self._scheduler.loads_failed({request: self._num_loaded(load) for request, load in failed.items()})
            for load in failed.values():
                self._note_failed(load)

    def _num_loaded(self, load: _Load) -> int:
        """Tokens of a load before its first block that a rank could not load."""
        sizes = [group.block_size for group in self._kv_cache.groups]
        return min(
            (
                index * size
                for size, block_ids in zip(sizes, load.block_ids, strict=True)
                for index, block_id in enumerate(block_ids[: load.num_tokens // size])
                if block_id in self._invalid and index >= load.num_local // size
            ),
            default=load.num_tokens,
        )

    def _note_failed(self, load: _Load) -> None:
        """Let a request whose load has failed compute the rest, or end it."""
        req_id = load.request.req_id
        self._counts["kv_connector_failed_loads"] += 1
        self._invalid.difference_update(*load.block_ids)
        if self._fails:
            ends = self._scheduler.finish_requests([req_id], FinishReason.ERROR)
            error = _FAILED.format(load.num_tokens - load.num_local)
            self._services.tell_ends([replace(end, error=error) for end in ends])
        else:
            logger.warning("Request %s computes what the KV connector could not load", req_id)
            self._given_up.add(req_id)

    def _end_load(self, req_id: str) -> None:
        """Let a request go on whose blocks were loaded beside the steps."""
        load = self._beside.pop(req_id)
        num_loaded = self._num_loaded(load)
        self._scheduler.blocks_loaded(req_id, num_loaded, _LOAD)
        self._kv_cache.release_blocks(req_id, _LOAD)
        if num_loaded == load.num_tokens:
            self._counts["external_prefix_cache_hits"] += num_loaded - load.num_local
        else:
            self._note_failed(load)

    # Ends of requests.

    def request_ending(self, request: Request) -> None:
        req_id = request.req_id
        block_ids = self._kv_cache.get_block_ids(req_id) if self._kv_cache.holds(request) else ()
        if req_id in self._due:
            # It never ran.
            del self._due[req_id]
        connector, view = self._made, self._view(request, has_ended=True)
        if connector is None:
            return
        if isinstance(connector, SupportsHMA):
            keeps, params = connector.request_finished_all_groups(view, block_ids)
        else:
            keeps, params = connector.request_finished(view, block_ids[0] if block_ids else [])
        if keeps and block_ids:
            self._kv_cache.hold_blocks(req_id, _SAVE)
            self._saving[req_id] = time.monotonic()
        if params is not None:
            self._results[req_id] = KVTransferResult(params=params)
            self._scheduler.call_for_all_outputs(self.parts_of_outputs)
        self._ended.append(req_id)
        # A core without requests has one more turn, for the workers' sides.
        self._scheduler.name_ended(req_id)
        self._services.call_soon(self._note_turn)

    def request_ended(self, request: Request) -> None:
        self._requests.pop(request.req_id, None)
        self._tried.pop(request.req_id, None)
        self._given_up.discard(request.req_id)
        if self._due.pop(request.req_id, None) is not None:
            # It was broken off in its admission, after its blocks were cached as those of a step.
            self._kv_cache.forget(request)

    def parts_of_outputs(self, outputs: Sequence[EngineCoreOutput]) -> Mapping[str, OutputPart]:
        results, self._results = self._results, {}
        return results

    # Turns of the core.

    def before_step(self) -> None:
        now = time.monotonic()
        if (self._is_busy and now >= self._ask_at) or (self._has_stats and now >= self._ask_at + _STATS_S):
            self._ask()
        if now >= self._look_up_at:
            for request in self._scheduler.waiting_for(_LOOKUP):
                self._scheduler.ready(request.req_id, _LOOKUP)
        if self._is_busy:
            self._idle_turns.want(_TELL_S)
        if self._saving and now >= self._warn_at:
            self._warn_of_kept_blocks(now)

    def _warn_of_kept_blocks(self, now: float) -> None:
        """Say that blocks are kept for long, which others wait for: the connector has to give them up."""
        req_id, since = next(iter(self._saving.items()))
        if now - since >= _LONG_S:
            self._warn_at = now + _WARN_S
            logger.warning(
                "The KV connector keeps the blocks of %d ended requests, of the first, %s, for %.0f s: no rank has "
                "named it in get_finished",
                len(self._saving),
                req_id,
                now - since,
            )

    def after_step(self) -> None:
        events = [] if self._made is None else list(self._made.take_events())
        if events:
            self._counts.update(with_label("kv_connector_events", "kind", type(event).__name__) for event in events)
            self._kv_cache.watchers.connector_told(events)

    def _note_turn(self) -> None:
        self._has_news = True
        if self._has_stats:
            self._ask_at = 0.0

    @property
    def _has_stats(self) -> bool:
        made = self._made
        return made is not None and type(made).get_kv_connector_stats is not KVConnectorBase_V1.get_kv_connector_stats

    @property
    def is_polled(self) -> bool:
        return bool(self._beside or self._scheduler.waiting_for(_LOOKUP))

    @property
    def _is_busy(self) -> bool:
        return bool(self._beside or self._saving)

    def _ask(self) -> None:
        """Take in what the connectors of all ranks have done."""
        connector = self._connector
        answers: list[RankOutput] = self._services.call_workers(RpcCall("kv_connector_output"))
        self._ask_at = time.monotonic() + _ASK_S
        output = KVConnectorOutput()
        for answer in answers:
            self._num_sent.update(answer.sent)
            self._num_received.update(answer.received)
            output.invalid_block_ids |= answer.invalid_block_ids
            meta, known = answer.worker_meta, output.kv_connector_worker_meta
            if meta is not None:
                output.kv_connector_worker_meta = meta if known is None else known.aggregate(meta)
            if answer.stats is not None and not answer.stats.is_empty():
                before = output.kv_connector_stats or connector.build_kv_connector_stats()
                output.kv_connector_stats = answer.stats if before is None else before.aggregate(answer.stats)
        if (stats := output.kv_connector_stats) is not None:
            self._stats = stats if self._stats is None else self._stats.aggregate(stats)
        if output.invalid_block_ids:
            self._note_invalid(output.invalid_block_ids)
        output.finished_sending = _taken(self._num_sent, self._num_ranks)
        output.finished_recving = _taken(self._num_received, self._num_ranks)
        connector.update_connector_output(output)
        for req_id in output.finished_recving & self._beside.keys():
            self._end_load(req_id)
        for req_id in output.finished_sending & self._saving.keys():
            self._end_save(req_id)

    def _note_invalid(self, block_ids: set[int]) -> None:
        """Note blocks that a rank could not load, of loads that go on."""
        self._invalid |= block_ids
        loads = [*self._beside.values(), *(load for loads in self._in_steps.values() for load in loads)]
        self._invalid.intersection_update({one for load in loads for ids in load.block_ids for one in ids})

    def _end_save(self, req_id: str) -> None:
        del self._saving[req_id]
        self._kv_cache.release_blocks(req_id, _SAVE)

    def before_reset(self) -> None:
        if self._is_busy and not self._services.has_lost_workers():
            self._ask()

    def reset_connector(self) -> bool:
        return self._connector.reset_cache() is not False

    def workers_replaced(self) -> None:
        for req_id in list(self._beside):
            self._scheduler.blocks_loaded(req_id, 0, _LOAD)
            self._kv_cache.release_blocks(req_id, _LOAD)
        for req_id in list(self._saving):
            self._end_save(req_id)
        for known in (self._beside, self._due, self._in_steps, self._tried, self._num_sent, self._num_received):
            known.clear()
        self._invalid.clear()
        self._ended.clear()
        self._shut_down()

    def counters(self) -> Mapping[str, int]:
        return dict(self._counts)

    def gauges(self) -> Mapping[str, float]:
        if self._stats is not None and time.monotonic() >= self._show_at:
            numbers, self._stats = self._stats.reduce(), None
            self._shown_stats = {
                with_label("kv_connector_stats", "name", name): float(number)
                for name, number in numbers.items()
                if isinstance(number, (int, float))
            }
            self._show_at = time.monotonic() + _SHOWN_S
        return self._shown_stats

    def close(self) -> None:
        self._idle_turns.close()
        self._shut_down()

    def _shut_down(self) -> None:
        connector, self._made = self._made, None
        if connector is not None:
            connector.shutdown()


def _taken(counts: Counter[str], num_ranks: int) -> set[str]:
    """Remove, and return, the requests that so many ranks have named."""
    taken = {req_id for req_id, count in counts.items() if count >= num_ranks}
    for req_id in taken:
        del counts[req_id]
    return taken
