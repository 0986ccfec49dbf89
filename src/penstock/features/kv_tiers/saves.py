"""Saves of full blocks: from the KV cache to host memory or to the folder, and from there to the folder."""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.features.kv_files.files import path_of
from penstock.features.kv_tiers.host_blocks import HostBlock
from penstock.features.kv_tiers.moves import MoveQueue, MoveResult, Tier
from penstock.features.kv_tiers.places import Places
from penstock.scheduler.block_pool import BlockKey, KVCacheBlock
from penstock.scheduler.cache_watcher import FOLDER, HOST_MEMORY, CacheWatcher
from penstock.scheduler.pace import Pace
from penstock.scheduler.request import Request
from penstock.scheduler.services import SchedulerServices
from penstock.scheduler.state_pool import StatePool

logger = logging.getLogger(__name__)
# Step before all others: a block whose content is there.
_BEFORE_ALL_STEPS = -2
# Blocks that saves may hold at once, and their share of a pool.
_MOST_SAVES, _MOST_SAVING = 32, 0.25
# Seconds without saves after one has failed, such as for a full disk.
_PAUSE_S = 60.0


@dataclass(eq=False, slots=True)
class Save:
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


class Saves(CacheWatcher):
    """Blocks that are written, and those that may have to be.

    fresh: full blocks, oldest first, with their keys and the last step that was launched before. keeps_pace: whether
    saves beside steps keep to a pace. counts: of the metrics. problem: why the last block was not saved.
    """

    def __init__(self, services: SchedulerServices, places: Places, moves: MoveQueue, counts: dict[str, int]) -> None:
        config = services.config
        self._kv_cache, self._blocks = services.scheduler.kv_cache, services.scheduler.kv_cache.single_blocks
        self._places, self._moves, self._counts = places, moves, counts
        self._num_ranks = config.parallel.world_size
        self.fresh: OrderedDict[KVCacheBlock, tuple[BlockKey, int]] = OrderedDict()
        self._saves: dict[int, Save] = {}
        self._pace = Pace(time.monotonic(), _MOST_SAVES)
        # Other engines wait for blocks of one that listens.
        self.keeps_pace = config.kv_tiers.kv_listen is None
        self.problem, self._paused_until = "", 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a block is being written."""
        return bool(self._saves)

    def names_to_come(self) -> set[str]:
        """Names of the files that are about to be written; called by another thread."""
        fresh, saves = list(self.fresh.values()), list(self._saves.values())
        return {os.path.basename(path_of("", key)) for key in (*(key for key, _ in fresh), *(one.key for one in saves))}

    def cached(self, request: Request, blocks: Sequence[KVCacheBlock], start: int) -> None:
        if not request.has_lasting_keys:
            return
        last_launched = self._kv_cache.steps.last_launched
        for block in blocks:
            assert block.key is not None
            self.fresh[block] = (block.key, last_launched)
            self.fresh.move_to_end(block)

    def loaded(self, request: Request, block: KVCacheBlock, index: int) -> None:
        # A block that came from the folder goes to host memory if that lacks it.
        host = self._places.host_memory
        if host is not None and block.key is not None and host.lacks(block.key):
            self.fresh[block] = (block.key, _BEFORE_ALL_STEPS)

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Remove blocks whose content may be wrong, also those that are being written, once they are."""
        self._places.remove(keys)
        self._places.wrong.update({save.key for save in self._saves.values()}.intersection(keys))

    def resume(self, keys: Sequence[BlockKey]) -> None:
        """End a pause, and note the blocks of these keys, which may not have been saved during it."""
        self.problem, self._paused_until = "they have made room for others", 0.0
        for key in keys:
            if (block := self._kv_cache.groups[key[0]].pool.find(key)) is not None:
                self.fresh.setdefault(block, (key, self._kv_cache.steps.last_launched))

    def begin(self, *, is_paced: bool) -> None:
        """Begin to write full blocks that are computed, and in no other tier yet, the oldest ones first.

        is_paced: as many as the pace allows; otherwise as many as are held at once.
        """
        most = self._pace.num_jobs(time.monotonic()) if is_paced else _MOST_SAVES
        steps, host = self._kv_cache.steps, self._places.host_memory
        is_idle = steps.last_done == steps.last_launched
        if self._places.limit is not None and (why := self._places.limit.why_full(0)) is not None:
            self._pause(why)
        num_saving = sum(save.block is not None for save in self._saves.values())
        while self.fresh and most > 0:
            block, (key, last_launched) = next(iter(self.fresh.items()))
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
            del self.fresh[block]
            if is_wanted:
                self._blocks.hold(block, key[0])
                target = Tier.FOLDER if host_block is None else Tier.HOST
                self._begin_save(target, key, block, host_block, is_paced=is_paced)
                num_saving += 1
                most -= 1

    def _is_for_folder(self, key: BlockKey) -> bool:
        """Whether the block is to be written to the folder."""
        return (
            self._places.limit is not None
            and time.monotonic() >= self._paused_until
            and not all(os.path.exists(path_of(folder, key)) for folder in self._places.folders)
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
        block_id = 0 if block is None else block.block_id
        pieces = () if host_block is None else host_block.pieces
        move_id = self._moves.add(source, target, key, block_id, pieces, is_beside_steps=is_paced)
        self._saves[move_id] = Save(target, key, self._num_ranks, expected_s, block, host_block)

    def end(self, save: Save) -> None:
        """Release a block that is written. From host memory it goes on to the folder."""
        if not save.has_failed and save.target is Tier.FOLDER:
            self._kv_cache.watchers.kept_elsewhere(save.key, FOLDER)
        if save.block is not None:
            self._blocks.release(save.block, save.key[0])
        if save.key in self._places.wrong:
            self._places.remove((save.key,))
            if all(one.key != save.key for one in self._saves.values()):
                self._places.wrong.remove(save.key)
        host, host_block = self._places.host, save.host_block
        if host is None or host_block is None:
            return
        if save.target is Tier.HOST and save.has_failed:
            host.forget(save.key)
        elif save.target is Tier.HOST:
            host_block.is_whole = True
            # Not if its weights are others by now.
            if host.find(save.key) is host_block:
                self._kv_cache.watchers.kept_elsewhere(save.key, HOST_MEMORY)
                if self._is_for_folder(save.key):
                    self._begin_save(Tier.FOLDER, save.key, None, host_block, is_paced=save.expected_s is not None)
                    return
        host.release(host_block)

    def take(self, result: MoveResult, *, is_first: bool) -> Sequence[Save]:
        """Take in a result; return the block that is written with it, if there is one. is_first: of the first rank."""
        save = self._saves.get(result.move_id)
        if save is None:
            return ()
        save.num_pending -= 1
        save.cost_s = max(save.cost_s, result.cost_s)
        if result.error is not None:
            save.has_failed = True
            self._pause(result.error)
        is_for_host = save.target is Tier.HOST
        if is_first:
            self._counts["kv_host_saved_bytes" if is_for_host else "kv_tier_saved_bytes"] += result.num_bytes
        if not is_for_host:
            self._places.note_written(result.num_bytes)
        if save.num_pending:
            return ()
        del self._saves[result.move_id]
        if save.expected_s is not None:
            self._pace.end(save.expected_s, save.cost_s)
        return (save,)

    def workers_replaced(self) -> None:
        for save in self._saves.values():
            if save.block is not None:
                self._blocks.release(save.block, save.key[0])
        self._saves.clear()
        self.fresh.clear()

    def _pause(self, error: str) -> None:
        """Write nothing to the folder for a while."""
        self.problem = error
        if time.monotonic() >= self._paused_until:
            logger.warning("No blocks of the KV cache are saved for %.0f s: %s", _PAUSE_S, error)
        self._paused_until = time.monotonic() + _PAUSE_S
