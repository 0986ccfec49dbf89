"""Scheduler side of KV tiers: which blocks are loaded for waiting requests, and which are saved."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

from penstock.config.kv_tiers import FASTER
from penstock.contract import RpcCall, SamplingParams
from penstock.contract.parts import OutputPart
from penstock.errors import InvalidRequest, PenstockError
from penstock.features.kv_files.files import path_of
from penstock.features.kv_peers.copies import PEER, Copies
from penstock.features.kv_peers.proxies import Proxies
from penstock.features.kv_tiers import FEATURE
from penstock.features.kv_tiers.choice import LoadBytes, LoadChoice
from penstock.features.kv_tiers.host_blocks import HostBlock
from penstock.features.kv_tiers.moves import MoveQueue, MoveResult, Tier
from penstock.features.kv_tiers.places import Places
from penstock.features.kv_tiers.saves import Save, Saves
from penstock.scheduler.block_pool import BlockKey, KVCacheBlock
from penstock.scheduler.cache_watcher import CacheWatcher
from penstock.scheduler.feature import SchedulerFeature
from penstock.scheduler.idle_turns import IdleTurns
from penstock.scheduler.kv_cache_manager import PrefixHit
from penstock.scheduler.outputs import RUNNING, EngineCoreOutput
from penstock.scheduler.request import Request
from penstock.scheduler.services import SchedulerServices

logger = logging.getLogger(__name__)
# Reason for which a request waits.
_LOAD = "blocks from outside of the KV cache"
# Counters of tokens by where they came from, the farthest place of all blocks of a hit.
_HITS = ("kv_host_hits", "kv_folder_hits", "kv_peer_hits")
# Block id of a block that is not in the KV cache.
_ELSEWHERE = -1
# Interval at which a core with requests begins saves, and asks for the results.
_ASK_S = 0.05
# Interval at which a core without requests asks.
_IDLE_S = 0.01
# Waiting requests that are looked up before their turn, and bytes in transfer from which on no others are. Their blocks
# may have this share of the free ones.
_MOST_AHEAD, _MOST_AHEAD_BYTES, _SHARE_AHEAD = 16, 256 << 20, 0.5
# Seconds that a core which ends, or whose prefix cache is reset, waits for moves.
_LONGEST_END_S = 30.0


@dataclass(eq=False, slots=True)
class _Load:
    """Blocks that are loaded together, those of one request's hit. Others may wait for them too.

    request: whose hit it is; it may have ended. source: counter of its tokens, by its number in `_HITS`.
    num_tokens: of the hit, beyond what was there. num_bytes: of its blocks on one rank, by source. held: blocks of the
    hit that were there before, with their groups.
    blocks: (block, key, position among blocks) by move. host_blocks: those that are read, by move.
    req_ids: requests that wait.
    pending: moves that have not ended, with the ranks that have not answered. failed: moves.
    is_unwanted: no request waits any more. begun, ended: on the first rank.
    """

    request: Request
    num_tokens: int
    num_bytes: LoadBytes
    held: list[tuple[KVCacheBlock, int]]
    blocks: dict[int, tuple[KVCacheBlock, BlockKey, int]] = field(default_factory=dict)
    host_blocks: dict[int, HostBlock] = field(default_factory=dict)
    req_ids: list[str] = field(default_factory=list)
    pending: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    source: int = 0
    is_unwanted: bool = False
    begun: float = math.inf
    ended: float = -math.inf


class TierScheduling(SchedulerFeature, CacheWatcher):
    """Loads blocks into the prefix cache before requests that would hit them are admitted, and saves full ones.

    A loaded block is a block of the prefix cache as any other: whether its request still waits, or goes on, does not
    matter. A request that waits for blocks is skipped; others go on.
    """

    def __init__(self, services: SchedulerServices) -> None:
        config = services.config
        self._services, self._scheduler, self._call = services, services.scheduler, services.call_workers
        self._kv_cache = services.scheduler.kv_cache
        self._blocks = self._kv_cache.single_blocks
        self._num_ranks = config.parallel.world_size
        folder = config.kv_tiers.folder
        self._places, self._moves = Places(services), MoveQueue()
        self._loads: dict[int, _Load] = {}
        self._loading: dict[BlockKey, _Load] = {}
        # Loads that requests wait for, and preemptions of requests for which blocks were looked up.
        self._waiting: dict[str, set[_Load]] = {}
        self._tried: dict[str, int] = {}
        # Blocks that were loaded before a request's turn; moves of requests that have ended.
        self._ahead: dict[str, int] = {}
        self._unwanted: list[int] = []
        is_choosing = config.kv_tiers.kv_load_policy == FASTER
        self._choice = LoadChoice(self._kv_cache.config, self._scheduler.measure_computing() if is_choosing else None)
        self._ask_at = 0.0
        self._idle_turns = IdleTurns(services.scheduler, services.call_soon)
        self._counts = dict.fromkeys(FEATURE.counters, 0)
        self._saves = Saves(services, self._places, self._moves, self._counts)
        self._kv_cache.watch(self._saves)
        self._kv_cache.watch(self)
        self._copies = None if folder is None else Copies(services, self)
        self._proxies = Proxies(config)
        has = {"host": self._places.has_host, "folder": folder is not None, "peer": bool(config.kv_tiers.kv_peers)}
        of_places = (f"kv_{place}_queries" for place, is_there in has.items() if is_there)
        self._queries = ("external_prefix_cache_queries", *of_places)

    # Loads.

    def skips(self, request: Request) -> str | None:
        if request.req_id in self._waiting:
            return _LOAD
        if self._tried.get(request.req_id) == request.num_preemptions or not request.has_lasting_keys:
            return None
        if self._copies is not None and self._copies.begin(request):
            return PEER
        if not self._kv_cache.has_room_for(request, self._kv_cache.get_computed_blocks(request)):
            return None  # it is asked for again once it can be admitted
        self._tried[request.req_id] = request.num_preemptions
        was_loaded_ahead = self._ahead.pop(request.req_id, None) is not None
        return self._look_up(request, is_first=not was_loaded_ahead)

    def _look_up(self, request: Request, *, is_first: bool = True, is_ahead: bool = False) -> str | None:
        """Begin to load a request's hit. is_first: it is counted. is_ahead: before its turn."""
        local = self._kv_cache.get_computed_blocks(request)
        hit = self._kv_cache.find_with(request, self._find)
        num_tokens = hit.num_tokens - local.num_tokens
        num_queried = request.num_tokens - local.num_tokens if is_first else 0
        for count in self._queries:
            self._counts[count] += num_queried
        if num_tokens <= 0:
            return None
        keys = (block.key for blocks in hit.blocks for block in blocks if block.block_id == _ELSEWHERE)
        wanted = [key for key in keys if key is not None and key not in self._loading]
        num_bytes = self._num_bytes_loading.plus(self._bytes_of(wanted))
        was_copied = self._copies is not None and self._copies.has_served(request)
        if not was_copied and self._choice.is_sooner_computed(local.num_tokens, num_tokens, num_bytes):
            self._counts["kv_tier_recomputed_tokens"] += num_tokens
            self._tried[request.req_id] = request.num_preemptions
            return None
        return _LOAD if self._begin_load(request, hit, num_tokens, is_ahead=is_ahead) else None

    def _bytes_of(self, keys: Sequence[BlockKey]) -> LoadBytes:
        """Bytes of blocks that are elsewhere."""
        return self._choice.num_bytes((key, self._places.in_host(key) is not None) for key in keys)

    @property
    def _num_bytes_loading(self) -> LoadBytes:
        return reduce(LoadBytes.plus, (load.num_bytes for load in set(self._loads.values())), LoadBytes(0, 0))

    def _read_ahead(self) -> None:
        """Load the hit of a request that waits for others, so that it need not wait for its blocks later.

        One request at a time, within the bounds of free blocks and of bytes in transfer.
        """
        if self._scheduler.rest is not RUNNING or self._num_bytes_loading.total >= _MOST_AHEAD_BYTES:
            return
        for request in self._scheduler.next_waiting(_MOST_AHEAD):
            req_id = request.req_id
            is_known = req_id in self._ahead or self._tried.get(req_id) == request.num_preemptions
            if is_known or not request.has_lasting_keys:
                continue
            if self._copies is not None and self._copies.begin(request):
                self._scheduler.wait_for(req_id, PEER)
            else:
                self._ahead[req_id] = 0
                self._look_up(request, is_ahead=True)
            return

    def _find(self, key: BlockKey, others: Collection[str] = ()) -> KVCacheBlock | None:
        """A block that stands for one in another tier; None if it is not there. others: paths that count as there."""
        if not self._places.has(key, others) and key not in self._loading:
            return None
        found = KVCacheBlock(_ELSEWHERE)
        found.key = key
        return found

    # The folder, for blocks of other engines.

    def paths_missing(self, request: Request) -> list[str]:
        folders = self._places.folders
        keys = [key for key in self._kv_cache.keys_of(request) if self._kv_cache.groups[key[0]].pool.find(key) is None]
        paths = (path_of(folder, key) for key in keys if self._places.in_host(key) is None for folder in folders)
        return [path for path in paths if not os.path.exists(path)]

    def paths_of_hit(self, request: Request, others: Collection[str]) -> list[str]:
        hit = self._kv_cache.find_with(request, lambda key: self._find(key, others))
        keys = [block.key for blocks in hit.blocks for block in blocks if block.block_id == _ELSEWHERE]
        return [path_of(folder, key) for key in keys if key is not None for folder in self._places.folders]

    def note_copied(self, num_bytes: int) -> None:
        self._counts["kv_tier_copied_bytes"] += num_bytes
        self._places.note_written(num_bytes)

    def names_to_come(self) -> set[str]:
        return self._saves.names_to_come()

    def _begin_load(self, request: Request, hit: PrefixHit, num_tokens: int, *, is_ahead: bool) -> bool:
        """Load the blocks of a hit that are elsewhere; False if there is no room. num_tokens: that these give."""
        wanted, held = [], []
        for group, blocks in enumerate(hit.blocks):
            for index, block in enumerate(blocks):
                if block.block_id == _ELSEWHERE:
                    assert block.key is not None
                    wanted.append((block.key, index))
                elif block is not self._kv_cache.groups[group].pool.null_block:
                    held.append((block, group))
        waits_for = {load for key, _ in wanted if (load := self._loading.get(key)) is not None}
        wanted = [(key, index) for key, index in wanted if key not in self._loading]
        # Those of the hit must not make room for the others.
        for block, group in held:
            self._blocks.hold(block, group)
        share, num_others = (_SHARE_AHEAD, sum(self._ahead.values())) if is_ahead else (1.0, 0)
        blocks_taken = self._blocks.take([key[0] for key, _ in wanted], share=share, num_others=num_others)
        if blocks_taken is None:
            for block, group in reversed(held):
                self._blocks.release(block, group)
            return False
        req_id = request.req_id
        if is_ahead:
            self._ahead[req_id] = len(wanted)
        load = _Load(request, num_tokens, self._bytes_of([key for key, _ in wanted]), held)
        for (key, index), block in zip(wanted, blocks_taken, strict=True):
            host_block = self._places.in_host(key)
            source = Tier.FOLDER if host_block is None else Tier.HOST
            pieces = () if host_block is None else host_block.pieces
            move_id = self._moves.add(source, Tier.KV_CACHE, key, block.block_id, pieces)
            load.blocks[move_id], load.pending[move_id] = (block, key, index), self._num_ranks
            if host_block is not None and self._places.host is not None:
                self._places.host.use(host_block)
                load.host_blocks[move_id] = host_block
            self._loads[move_id] = self._loading[key] = load
        was_copied = self._copies is not None and self._copies.has_served(request)
        is_of_folder = len(load.host_blocks) < len(load.blocks)
        load.source = max(2 * was_copied, is_of_folder, *(one.source for one in waits_for))
        waits_for.add(load)
        if not load.blocks:
            self._end_load(load)
            waits_for.remove(load)
        for one in waits_for:
            one.req_ids.append(req_id)
        self._waiting[req_id] = waits_for
        return True

    def _end_load(self, load: _Load) -> None:
        """Add the loaded blocks to the prefix cache, and let requests go on that wait for nothing else."""
        # The end of a prefix makes room first.
        for move_id, (block, key, index) in sorted(load.blocks.items(), key=lambda one: -one[1][2]):
            if move_id not in load.failed:
                self._kv_cache.cache_loaded(load.request, block, key, index)
            if self._loading.get(key) is load:
                del self._loading[key]
            self._blocks.release(block, key[0])
        for block, held_by in reversed(load.held):
            self._blocks.release(block, held_by)
        self._let_go_on(load)
        if load.failed:
            self._counts["kv_tier_failed_loads"] += 0 if load.is_unwanted else len(load.failed)
            return
        num_tokens = 0 if load.is_unwanted else load.num_tokens
        self._counts["external_prefix_cache_hits"] += num_tokens
        self._counts[_HITS[load.source]] += num_tokens
        if load.ended > load.begun:
            self._choice.note_load(load.num_bytes, load.ended - load.begun)

    def _let_go_on(self, load: _Load) -> None:
        for req_id in load.req_ids:
            waits_for = self._waiting.get(req_id, set())
            waits_for.discard(load)
            if not waits_for and self._waiting.pop(req_id, None) is not None:
                self._scheduler.ready(req_id, _LOAD)

    def request_ending(self, request: Request) -> None:
        if self._proxies.note_end(request):
            self._scheduler.call_for_all_outputs(self.parts_of_outputs)

    def parts_of_outputs(self, outputs: Sequence[EngineCoreOutput]) -> Mapping[str, OutputPart]:
        return self._proxies.take()

    def request_ended(self, request: Request) -> None:
        for known in (self._tried, self._ahead):
            known.pop(request.req_id, None)
        for load in self._waiting.pop(request.req_id, ()):
            load.req_ids.remove(request.req_id)
            if not load.req_ids:
                self._end_unwanted(load)
        if self._copies is not None:
            self._copies.request_ended(request)
        if self._places.host is not None and request.has_lasting_keys:
            # A prefix is useful without its tail.
            self._places.host.refresh(reversed(self._kv_cache.keys_of(request)))
        if self._saves.fresh or self._is_busy:
            # A core without requests has no turn by itself.
            self._services.call_soon(lambda: None)

    def forgotten(self, keys: Sequence[BlockKey]) -> None:
        # Those that are being loaded are not used.
        self._saves.forget(keys)
        for load in self._loads.values():
            load.failed.update(move_id for move_id, (_, key, _) in load.blocks.items() if key in keys)

    def _end_unwanted(self, load: _Load) -> None:
        """Take back the moves of a load that have not begun; requests that want its blocks load them anew."""
        load.is_unwanted = True
        self._unwanted += load.pending
        for _, key, _ in load.blocks.values():
            if self._loading.get(key) is load:
                del self._loading[key]

    @property
    def is_polled(self) -> bool:
        return bool(self._waiting)

    # Turns of the core.

    def before_step(self) -> None:
        now = time.monotonic()
        is_due = now >= self._ask_at
        if self._saves.fresh:
            if not self._saves.keeps_pace or not self._scheduler.has_unfinished_requests():
                self._saves.begin(is_paced=False)
            elif is_due:
                self._saves.begin(is_paced=True)
        is_awaited = self._waiting and self._scheduler.waiting_for(_LOAD)
        if self._moves.moves or (self._is_busy and (is_awaited or is_due)):
            self._ask()
        if self._saves.fresh or self._is_busy:
            self._idle_turns.want(_IDLE_S)

    def after_step(self) -> None:
        self._read_ahead()
        if self._moves.moves:
            self._ask()

    @property
    def _is_busy(self) -> bool:
        return bool(self._loads) or self._saves.is_busy

    def _ask(self) -> None:
        """Give the queued moves to the workers, and take in the results of earlier ones."""
        moves, self._moves.moves = self._moves.moves, []
        unwanted, self._unwanted = self._unwanted, []
        asked = self._places.known_folders, moves, unwanted
        answers: list[list[MoveResult]] = self._call(RpcCall("move_kv_blocks", asked))
        self._ask_at = time.monotonic() + _ASK_S
        saved: list[Save] = []
        for rank, results in enumerate(answers):
            for result in results:
                saved += self._take(result, is_first=rank == 0)
        # The end of a prefix makes room first.
        for save in reversed(saved):
            self._saves.end(save)

    def _take(self, result: MoveResult, *, is_first: bool) -> Sequence[Save]:
        """Take in a result; return the block that is written with it, if there is one."""
        load = self._loads.get(result.move_id)
        if load is not None:
            if result.error is not None:
                if not load.is_unwanted:
                    logger.warning(
                        "A block of the KV cache is computed, since it could not be loaded: %s", result.error
                    )
                    # Of all ranks, since one that lacks its share would fail with the next load too.
                    self._places.remove([load.blocks[result.move_id][1]])
                load.failed.add(result.move_id)
            elif is_first:
                load.begun, load.ended = min(load.begun, result.begun), max(load.ended, result.ended)
            host_block = load.host_blocks.get(result.move_id)
            if is_first:
                count = "kv_tier_loaded_bytes" if host_block is None else "kv_host_loaded_bytes"
                self._counts[count] += result.num_bytes
            load.pending[result.move_id] -= 1
            if not load.pending[result.move_id]:
                del load.pending[result.move_id], self._loads[result.move_id]
                if host_block is not None and self._places.host is not None:
                    self._places.host.release(host_block)
            if not load.pending:
                self._end_load(load)
            return ()
        return self._saves.take(result, is_first=is_first)

    def _save_all(self) -> None:
        """Write all full blocks, as many at once as are held at once, and wait for them."""
        give_up_at = time.monotonic() + _LONGEST_END_S
        self._finish()
        while self._saves.fresh and time.monotonic() < give_up_at:
            self._saves.begin(is_paced=False)
            if not self._is_busy:
                return  # no step that computes the others is done
            self._finish()

    def _save_what_is_left(self) -> None:
        """Write all full blocks, if the workers can."""
        try:
            if not self._services.has_lost_workers():
                self._save_all()
        except PenstockError as error:
            logger.info("The last blocks of the KV cache are not saved: %s", error)

    def _finish(self) -> None:
        """Wait for the moves that have begun."""
        give_up_at = time.monotonic() + _LONGEST_END_S
        while self._is_busy and time.monotonic() < give_up_at:
            self._ask()
            if self._is_busy:
                time.sleep(0.001)

    def before_caches_are_dropped(self) -> None:
        self._save_what_is_left()

    def before_reset(self) -> None:
        if self._is_busy and not self._services.has_lost_workers():
            self._finish()
        # The weights may be others from now on.
        self._places.ask_again()
        self._saves.fresh.clear()
        self._tried.clear()

    def reset_connector(self) -> bool:
        return self._places.remove_all()

    def workers_replaced(self) -> None:
        self._places.workers_replaced()
        for load in {id(load): load for load in self._loads.values()}.values():
            load.failed.update(load.blocks)
            self._end_load(load)
        self._saves.workers_replaced()
        self._moves.moves.clear()
        for kept in (self._loads, self._unwanted, self._tried, self._ahead):
            kept.clear()

    # Calls of the deployment's side.

    def save_kv_prefix(self, token_ids: Sequence[int]) -> list[tuple[int, list[str]]]:
        """Finish the saves; return the tokens of a prompt that are kept in whole blocks, and their files.

        Raises InvalidRequest without a folder, PenstockError where blocks cannot be written.
        """
        if self._places.limit is None:
            raise InvalidRequest("Prefixes are saved in a folder. Start the engine with kv_offload_dir=FOLDER.")
        if not token_ids:
            return [(0, [])]
        request = Request("", list(token_ids), SamplingParams(max_tokens=1))
        keys, folders = self._kv_cache.keys_of(request), self._places.folders
        self._saves.resume(keys)
        self._save_all()
        paths = [path for folder in folders for key in keys if os.path.exists(path := path_of(folder, key))]
        # The prompt of a later request has at least a token more.
        request.all_token_ids.append(0)
        hit = self._kv_cache.find_with(request, self._find)
        wanted = {path_of(folder, one.key) for of in hit.blocks for one in of if one.key for folder in folders}
        if missing := wanted.difference(paths):
            raise PenstockError(f"{len(missing):,} of {len(wanted):,} blocks are not saved: {self._saves.problem}.")
        return [(hit.num_tokens, paths)]

    def counters(self) -> Mapping[str, int]:
        return self._counts.copy()

    def gauges(self) -> Mapping[str, float]:
        # Engines beside each other have one folder.
        is_first = self._services.config.parallel.data_parallel_rank == 0
        limit = self._places.limit
        return {} if limit is None else {"kv_tier_folder_bytes": limit.num_bytes if is_first else 0}

    def close(self) -> None:
        self._idle_turns.close()
        if self._places.limit is not None:
            self._save_what_is_left()
            self._places.limit.close()
        if self._copies is not None:
            self._copies.close()
