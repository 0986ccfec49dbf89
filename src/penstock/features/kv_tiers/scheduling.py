"""Scheduler side of KV tiers: which blocks are loaded for waiting requests, and which are saved."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

from penstock.config.kv_tiers import FASTER
from penstock.contract import RpcCall, SamplingParams
from penstock.contract.parts import OutputPart
from penstock.errors import InvalidRequest, PenstockError
from penstock.features.kv_files.files import FolderLimit, path_of, remove_folder
from penstock.features.kv_peers.copies import PEER, Copies
from penstock.features.kv_peers.proxies import Proxies
from penstock.features.kv_tiers.choice import LoadBytes, LoadChoice
from penstock.features.kv_tiers.host_blocks import HostBlock, HostBlocks
from penstock.features.kv_tiers.moves import Move, MoveResult, Tier
from penstock.scheduler.block_pool import BlockKey, KVCacheBlock
from penstock.scheduler.feature import SchedulerFeature
from penstock.scheduler.idle_turns import IdleTurns
from penstock.scheduler.kv_cache_manager import PrefixHit
from penstock.scheduler.outputs import RUNNING, EngineCoreOutput
from penstock.scheduler.request import Request
from penstock.scheduler.services import SchedulerServices
from penstock.scheduler.state_pool import StatePool

logger = logging.getLogger(__name__)
# Reason for which a request waits.
_LOAD = "blocks from outside of the KV cache"
# Block id of a block that is not in the KV cache.
_ELSEWHERE = -1
# Step before all others: a block whose content is there.
_BEFORE_ALL_STEPS = -2
# Interval at which a core with requests begins saves, and asks for the results.
_ASK_S = 0.05
# Share of a core's time that saves take from the steps, each of which waits for its slowest thread; and seconds of it
# at once.
_SAVE_SHARE, _MOST_AT_ONCE_S = 0.015, 0.005
# Interval at which a core without requests asks.
_IDLE_S = 0.01
# Blocks that saves may hold at once, and their share of a pool.
_MOST_SAVES, _MOST_SAVING = 32, 0.25
# Seconds without saves after one has failed, such as for a full disk.
_PAUSE_S = 60.0
# Waiting requests that are looked up before their turn, and bytes in transfer from which on no others are. Their blocks
# may have this share of the free ones.
_MOST_AHEAD, _MOST_AHEAD_BYTES, _SHARE_AHEAD = 16, 256 << 20, 0.5
# Counts for the metrics.
_COUNTS = (
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "kv_host_queries",
    "kv_host_hits",
    "kv_host_loaded_bytes",
    "kv_host_saved_bytes",
    "kv_tier_loaded_bytes",
    "kv_tier_saved_bytes",
    "kv_tier_failed_loads",
    "kv_tier_recomputed_tokens",
    "kv_tier_copied_bytes",
)
# Seconds that a core which ends, or whose prefix cache is reset, waits for moves.
_LONGEST_END_S = 30.0


@dataclass(eq=False, slots=True)
class _Load:
    """Blocks that are loaded together, those of one request's hit. Others may wait for them too.

    num_tokens: of the hit, beyond what was there. num_bytes: of its blocks on one rank, by source. held: blocks of the
    hit that were there before, with their groups.
    blocks: (block, key, position among blocks) by move. host_blocks: those that are read, by move.
    req_ids: requests that wait.
    pending: moves that have not ended, with the ranks that have not answered. failed: moves.
    is_unwanted: no request waits any more. begun, ended: on the first rank.
    """

    num_tokens: int
    num_bytes: LoadBytes
    held: list[tuple[KVCacheBlock, int]]
    blocks: dict[int, tuple[KVCacheBlock, BlockKey, int]] = field(default_factory=dict)
    host_blocks: dict[int, HostBlock] = field(default_factory=dict)
    req_ids: list[str] = field(default_factory=list)
    pending: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    is_unwanted: bool = False
    begun: float = math.inf
    ended: float = -math.inf


@dataclass(eq=False, slots=True)
class _Save:
    """Block that is written. num_pending: ranks that have not answered. cost_s: the most of all ranks' results.

    expected_s: cost by the pace; None for a save that need not keep to it. block: in the KV cache, if it is written
    from there. host_block: if it is written to host memory, or from there.
    """

    target: Tier
    key: BlockKey
    num_pending: int
    expected_s: float | None
    block: KVCacheBlock | None = None
    host_block: HostBlock | None = None
    has_failed: bool = False
    cost_s: float = 0.0


class _Pace:
    """Pace of saves beside steps: CPU time that they may take, as it comes and is used.

    Kernels that wait long for a thread, since saves take its core, go on with fewer threads for a while. So saves are
    few at once.
    """

    def __init__(self, now: float) -> None:
        self._now, self._credit_s = now, 0.0
        # CPU time of a save; a guess before the first one.
        self._cost_s = _MOST_AT_ONCE_S

    def num_blocks(self, now: float) -> int:
        """Number of blocks that may be saved now. now: seconds of `time.monotonic`."""
        most = max(_MOST_AT_ONCE_S, self._cost_s)
        self._credit_s = min(most, self._credit_s + (now - self._now) * _SAVE_SHARE)
        self._now = now
        return min(_MOST_SAVES, max(0, int(self._credit_s / self._cost_s))) if self._cost_s else _MOST_SAVES

    def begin(self) -> float:
        """Note that a save begins; return the CPU time that it is expected to take."""
        self._credit_s -= self._cost_s
        return self._cost_s

    def end(self, expected_s: float, cost_s: float) -> None:
        """Note the CPU time that a save has taken."""
        self._credit_s += expected_s - cost_s
        self._cost_s += (cost_s - self._cost_s) / 2 if cost_s else -self._cost_s


class TierScheduling(SchedulerFeature):
    """Loads blocks into the prefix cache before requests that would hit them are admitted, and saves full ones.

    A loaded block is a block of the prefix cache as any other: whether its request still waits, or goes on, does not
    matter. A request that waits for blocks is skipped; others go on.
    """

    def __init__(self, services: SchedulerServices) -> None:
        config = services.config
        self._services, self._scheduler, self._call = services, services.scheduler, services.call_workers
        self._kv_cache = services.scheduler.kv_cache
        self._blocks = self._kv_cache.single_blocks
        self._kv_cache.on_cached, self._kv_cache.on_forgotten = self._note_cached, self._remove
        self._num_ranks = config.parallel.world_size
        folder = config.kv_tiers.folder
        self._limit = None if folder is None else FolderLimit(folder, config.kv_tiers.max_bytes)
        self._has_host = config.kv_tiers.host_bytes > 0
        # Made when the workers are asked, with the folders of the weights whose blocks it has.
        self._host: HostBlocks | None = None
        self._host_is_of: list[str] = []
        # Folders of the ranks' blocks; empty until the workers are asked.
        self._folders: list[str] = []
        self._next_move_id = 0
        self._queued: list[Move] = []
        self._loads: dict[int, _Load] = {}
        self._saves: dict[int, _Save] = {}
        self._loading: dict[BlockKey, _Load] = {}
        # Loads that requests wait for, and preemptions of requests for which blocks were looked up.
        self._waiting: dict[str, set[_Load]] = {}
        self._tried: dict[str, int] = {}
        # Blocks that were loaded before a request's turn; moves of requests that have ended.
        self._ahead: dict[str, int] = {}
        self._unwanted: list[int] = []
        is_choosing = config.kv_tiers.kv_load_policy == FASTER
        self._choice = LoadChoice(self._kv_cache.config, self._scheduler.measure_computing() if is_choosing else None)
        # Full blocks that may have to be saved, oldest first, with the last step that was launched before.
        self._fresh: OrderedDict[KVCacheBlock, tuple[BlockKey, int]] = OrderedDict()
        self._pace = _Pace(time.monotonic())
        # Other engines wait for blocks of one that listens.
        self._keeps_pace = config.kv_tiers.kv_listen is None
        self._ask_at = self._paused_until = 0.0
        self._idle_turns = IdleTurns(services.scheduler, services.call_soon)
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._copies = None if folder is None else Copies(services, self)
        self._proxies = Proxies(config)

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
        self._counts["external_prefix_cache_queries"] += num_queried
        self._counts["kv_host_queries"] += num_queried if self._has_host else 0
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
        return _LOAD if self._begin_load(request.req_id, hit, num_tokens, is_ahead=is_ahead) else None

    def _bytes_of(self, keys: Sequence[BlockKey]) -> LoadBytes:
        """Bytes of blocks that are elsewhere."""
        return self._choice.num_bytes((key, self._in_host(key) is not None) for key in keys)

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
        path = path_of(self._folder, key)
        if key not in self._loading and self._in_host(key) is None and path not in others and not self._in_folder(path):
            return None
        found = KVCacheBlock(_ELSEWHERE)
        found.key = key
        return found

    def _in_host(self, key: BlockKey) -> HostBlock | None:
        return None if self._host is None else self._host.find(key)

    def _in_folder(self, path: str) -> bool:
        return self._limit is not None and os.path.exists(path)

    # The folder, for blocks of other engines.

    def paths_missing(self, request: Request) -> list[str]:
        folders = self._folders_of_ranks
        keys = [key for key in self._kv_cache.keys_of(request) if self._kv_cache.groups[key[0]].pool.find(key) is None]
        paths = (path_of(folder, key) for key in keys if self._in_host(key) is None for folder in folders)
        return [path for path in paths if not os.path.exists(path)]

    def paths_of_hit(self, request: Request, others: Collection[str]) -> list[str]:
        hit = self._kv_cache.find_with(request, lambda key: self._find(key, others))
        keys = [block.key for blocks in hit.blocks for block in blocks if block.block_id == _ELSEWHERE]
        return [path_of(folder, key) for key in keys if key is not None for folder in self._folders_of_ranks]

    def note_copied(self, num_bytes: int) -> None:
        self._counts["kv_tier_copied_bytes"] += num_bytes
        self._note_written(num_bytes)

    def names_to_come(self) -> set[str]:
        fresh, saves = list(self._fresh.values()), list(self._saves.values())
        return {os.path.basename(path_of("", key)) for key in (*(key for key, _ in fresh), *(one.key for one in saves))}

    def _begin_load(self, req_id: str, hit: PrefixHit, num_tokens: int, *, is_ahead: bool) -> bool:
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
        if is_ahead:
            self._ahead[req_id] = len(wanted)
        load = _Load(num_tokens, self._bytes_of([key for key, _ in wanted]), held)
        for (key, index), block in zip(wanted, blocks_taken, strict=True):
            host_block = self._in_host(key)
            source = Tier.FOLDER if host_block is None else Tier.HOST
            move_id = self._queue(source, Tier.KV_CACHE, key, block, host_block)
            load.blocks[move_id], load.pending[move_id] = (block, key, index), self._num_ranks
            if host_block is not None and self._host is not None:
                self._host.use(host_block)
                load.host_blocks[move_id] = host_block
            self._loads[move_id] = self._loading[key] = load
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
            group = self._kv_cache.groups[key[0]]
            if move_id not in load.failed:
                group.cache_loaded(block, key, index)
                host = self._host_memory
                if host is not None and host.lacks(key) and block.key == key:
                    self._fresh[block] = (key, _BEFORE_ALL_STEPS)
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
        self._counts["kv_host_hits"] += num_tokens if 0 < len(load.host_blocks) == len(load.blocks) else 0
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
        if self._host is not None and request.has_lasting_keys:
            # A prefix is useful without its tail.
            self._host.refresh(reversed(self._kv_cache.keys_of(request)))
        if self._fresh or self._is_busy:
            # A core without requests has no turn by itself.
            self._services.call_soon(lambda: None)

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

    # Saves.

    def _note_cached(self, request: Request, blocks: list[KVCacheBlock]) -> None:
        if not request.has_lasting_keys:
            return
        last_launched = self._kv_cache.steps.last_launched
        for block in blocks:
            assert block.key is not None
            self._fresh[block] = (block.key, last_launched)
            self._fresh.move_to_end(block)

    def _save(self, most: int, *, is_paced: bool) -> None:
        """Begin to write full blocks that are computed, and in no other tier yet: the oldest ones, so many at most."""
        steps, host = self._kv_cache.steps, self._host_memory
        is_idle = steps.last_done == steps.last_launched
        if self._limit is not None and not self._limit.has_room(0):
            self._pause("the file system of kv_offload_dir is full")
        num_saving = sum(save.block is not None for save in self._saves.values())
        while self._fresh and most > 0:
            block, (key, last_launched) = next(iter(self._fresh.items()))
            if not is_idle and steps.last_done <= last_launched:
                break
            pool = self._kv_cache.groups[key[0]].pool
            is_wanted = block.key == key and not (isinstance(pool, StatePool) and pool.is_superseded(block))
            is_for_host = is_wanted and host is not None and host.lacks(key)
            is_wanted = is_for_host or (is_wanted and self._is_for_folder(key))
            if is_wanted and num_saving >= min(_MOST_SAVES, pool.num_blocks * _MOST_SAVING):
                break
            host_block = None
            if is_for_host and host is not None:
                host_block = host.add(key)
                if host_block is None:
                    break  # until others are read or written
            del self._fresh[block]
            if is_wanted:
                self._blocks.hold(block, key[0])
                target = Tier.FOLDER if host_block is None else Tier.HOST
                self._begin_save(target, key, block, host_block, is_paced=is_paced)
                num_saving += 1
                most -= 1

    def _is_for_folder(self, key: BlockKey) -> bool:
        """Whether the block is to be written to the folder."""
        return (
            self._limit is not None
            and time.monotonic() >= self._paused_until
            and not os.path.exists(path_of(self._folder, key))
        )

    def _begin_save(
        self,
        target: Tier,
        key: BlockKey,
        block: KVCacheBlock | None,
        host_block: HostBlock | None,
        *,
        is_paced: bool,
    ) -> None:
        """Write a block, which is held, from the KV cache, or from host memory."""
        source = Tier.HOST if block is None else Tier.KV_CACHE
        expected_s = self._pace.begin() if is_paced else None
        move_id = self._queue(source, target, key, block, host_block, is_beside_steps=is_paced)
        self._saves[move_id] = _Save(target, key, self._num_ranks, expected_s, block, host_block)

    def _end_save(self, save: _Save) -> None:
        """Release a block that is written. From host memory it goes on to the folder."""
        if save.block is not None:
            self._blocks.release(save.block, save.key[0])
        host, host_block = self._host, save.host_block
        if host is None or host_block is None:
            return
        if save.target is Tier.HOST and save.has_failed:
            host.forget(save.key)
        elif save.target is Tier.HOST:
            host_block.is_whole = True
            # Not if its weights are others by now.
            if self._is_for_folder(save.key) and host.find(save.key) is host_block:
                self._begin_save(Tier.FOLDER, save.key, None, host_block, is_paced=save.expected_s is not None)
                return
        host.release(host_block)

    def _remove(self, keys: Sequence[BlockKey]) -> None:
        """Remove blocks whose content may be wrong."""
        for key in keys:
            if self._host is not None:
                self._host.forget(key)
            for folder in self._folders:
                try:
                    os.unlink(path_of(folder, key))
                except OSError:
                    continue  # most blocks are not there

    # Turns of the core.

    def before_step(self) -> None:
        now = time.monotonic()
        is_due = now >= self._ask_at
        if self._fresh:
            if not self._keeps_pace or not self._scheduler.has_unfinished_requests():
                self._save(_MOST_SAVES, is_paced=False)
            elif is_due:
                self._save(self._pace.num_blocks(now), is_paced=True)
        is_awaited = self._waiting and self._scheduler.waiting_for(_LOAD)
        if self._queued or (self._is_busy and (is_awaited or is_due)):
            self._ask()
        if self._fresh or self._is_busy:
            self._idle_turns.want(_IDLE_S)

    def after_step(self) -> None:
        self._read_ahead()
        if self._queued:
            self._ask()

    @property
    def _is_busy(self) -> bool:
        return bool(self._loads or self._saves)

    @property
    def _folders_of_ranks(self) -> list[str]:
        if not self._folders:
            self._folders = self._call(RpcCall("kv_tier_folder"))
            if self._host is not None and self._folders != self._host_is_of:
                # Its blocks were computed with other weights.
                self._host.clear()
            self._host_is_of = self._folders
        return self._folders

    @property
    def _host_memory(self) -> HostBlocks | None:
        """Blocks in host memory, for the present weights; None without kv_offloading_size."""
        if self._folders_of_ranks and self._has_host and self._host is None:
            self._host = HostBlocks(self._call(RpcCall("kv_host_layout")))
        return self._host

    @property
    def _folder(self) -> str:
        """Folder of the first rank."""
        return self._folders_of_ranks[0]

    def _queue(
        self,
        source: Tier,
        target: Tier,
        key: BlockKey,
        block: KVCacheBlock | None,
        host_block: HostBlock | None,
        *,
        is_beside_steps: bool = False,
    ) -> int:
        move_id, self._next_move_id = self._next_move_id, self._next_move_id + 1
        block_id = 0 if block is None else block.block_id
        pieces = () if host_block is None else host_block.pieces
        self._queued.append(Move(move_id, source, target, key, block_id, pieces, is_beside_steps))
        return move_id

    def _ask(self) -> None:
        """Give the queued moves to the workers, and take in the results of earlier ones."""
        moves, self._queued = self._queued, []
        unwanted, self._unwanted = self._unwanted, []
        answers: list[list[MoveResult]] = self._call(RpcCall("move_kv_blocks", (self._folders, moves, unwanted)))
        self._ask_at = time.monotonic() + _ASK_S
        saved: list[_Save] = []
        for rank, results in enumerate(answers):
            for result in results:
                saved += self._take(result, is_first=rank == 0)
        # The end of a prefix makes room first.
        for save in reversed(saved):
            self._end_save(save)

    def _take(self, result: MoveResult, *, is_first: bool) -> Sequence[_Save]:
        """Take in a result; return the block that is written with it, if there is one."""
        load, save = self._loads.get(result.move_id), self._saves.get(result.move_id)
        if load is not None:
            if result.error is not None:
                if not load.is_unwanted:
                    logger.warning(
                        "A block of the KV cache is computed, since it could not be loaded: %s", result.error
                    )
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
                if host_block is not None and self._host is not None:
                    self._host.release(host_block)
            if not load.pending:
                self._end_load(load)
        elif save is not None:
            save.num_pending -= 1
            save.cost_s = max(save.cost_s, result.cost_s)
            if result.error is not None:
                save.has_failed = True
                self._pause(result.error)
            is_for_host = save.target is Tier.HOST
            if is_first:
                self._counts["kv_host_saved_bytes" if is_for_host else "kv_tier_saved_bytes"] += result.num_bytes
            if not is_for_host:
                self._note_written(result.num_bytes)
            if not save.num_pending:
                del self._saves[result.move_id]
                if save.expected_s is not None:
                    self._pace.end(save.expected_s, save.cost_s)
                return (save,)
        return ()

    def _note_written(self, num_bytes: int) -> None:
        if self._limit is not None:
            self._limit.note_written(num_bytes)

    def _pause(self, error: str) -> None:
        """Write nothing to the folder for a while."""
        if time.monotonic() >= self._paused_until:
            logger.warning("No blocks of the KV cache are saved for %.0f s: %s", _PAUSE_S, error)
        self._paused_until = time.monotonic() + _PAUSE_S

    def _save_all(self) -> None:
        """Write all full blocks, as many at once as are held at once, and wait for them."""
        give_up_at = time.monotonic() + _LONGEST_END_S
        self._finish()
        while self._fresh and time.monotonic() < give_up_at:
            self._save(_MOST_SAVES, is_paced=False)
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
        self._folders = []
        self._fresh.clear()
        self._tried.clear()

    def reset_connector(self) -> bool:
        """Remove all blocks of this engine's fingerprint, which other engines that share the folder compute again."""
        if self._host is not None:
            self._host.clear()
        if self._limit is None:
            return True
        try:
            folders = self._folders_of_ranks
        except PenstockError as error:
            logger.warning("The blocks in kv_offload_dir are not removed: %s", error)
            return False
        failures = [failure for folder in folders for failure in remove_folder(Path(folder))]
        if failures:
            logger.warning("%d blocks in kv_offload_dir are not removed: %s", len(failures), failures[0])
        # It is described anew with its next block.
        self._folders = []
        return not failures

    def workers_replaced(self) -> None:
        self._host = None  # their memory is lost
        for load in {id(load): load for load in self._loads.values()}.values():
            load.failed.update(load.blocks)
            self._end_load(load)
        for save in self._saves.values():
            if save.block is not None:
                self._blocks.release(save.block, save.key[0])
        for kept in (self._loads, self._saves, self._fresh, self._queued, self._unwanted, self._tried, self._ahead):
            kept.clear()
        self._folders = []

    # Calls of the deployment's side.

    def save_kv_prefix(self, token_ids: Sequence[int]) -> list[tuple[int, list[str]]]:
        """Finish the saves; return the tokens of a prompt that are kept in whole blocks, and their files.

        Raises InvalidRequest without a folder.
        """
        if self._limit is None:
            raise InvalidRequest("Prefixes are saved in a folder. Start the engine with kv_offload_dir=FOLDER.")
        if not token_ids:
            return [(0, [])]
        self._save_all()
        request = Request("", list(token_ids), SamplingParams(max_tokens=1))
        keys = self._kv_cache.keys_of(request)
        paths = [path for folder in self._folders for key in keys if os.path.exists(path := path_of(folder, key))]
        # The prompt of a later request has at least a token more.
        request.all_token_ids.append(0)
        return [(self._kv_cache.find_with(request, self._find).num_tokens, paths)]

    def counters(self) -> Mapping[str, int]:
        return self._counts.copy()

    def gauges(self) -> Mapping[str, float]:
        # Engines beside each other have one folder.
        is_first = self._services.config.parallel.data_parallel_rank == 0
        return {} if self._limit is None else {"kv_tier_folder_bytes": self._limit.num_bytes if is_first else 0}

    def close(self) -> None:
        self._idle_turns.close()
        if self._limit is not None:
            self._save_what_is_left()
            self._limit.close()
        if self._copies is not None:
            self._copies.close()
