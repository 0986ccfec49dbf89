"""Worker side of KV tiers: blocks are moved in threads, beside the steps."""

from __future__ import annotations

import functools
import logging
import queue
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.contract.memory_tags import KV_CACHE
from penstock.device.limits import cpu_quota, physical_cores, usable_cpus
from penstock.errors import ConfigError
from penstock.features.kv_files.files import (
    DamagedBlock,
    folder_of,
    path_of,
    read_block,
    remove_folder,
    write_about,
    write_described,
)
from penstock.features.kv_files.fingerprint import kind_of, page_bytes, what_blocks_depend_on
from penstock.features.kv_tiers.host_memory import HostMemory
from penstock.features.kv_tiers.moves import HostLayout, Move, MoveResult, Tier
from penstock.runner.kv_cache import PagedKVCache
from penstock.runner.slot_owner import SlotOwner
from penstock.version import __version__
from penstock.worker.feature import WorkerFeature, WorkerServices
from penstock.worker.fingerprint import digest_of

logger = logging.getLogger(__name__)
_NUM_LOAD_THREADS = 2


class _CacheOwner(SlotOwner):
    """KV cache, and the memory for blocks that leave it. make_host: makes the latter."""

    kv_cache: PagedKVCache | None = None
    host: HostMemory | None = None

    def __init__(self, make_host: Callable[[PagedKVCache], HostMemory] | None) -> None:
        self._make_host = make_host

    def use_kv_cache(self, kv_cache: PagedKVCache) -> None:
        self.kv_cache = kv_cache
        if self._make_host is not None:
            self.host = self._make_host(kv_cache)


class TierWorker(WorkerFeature):
    """Moves blocks of one rank. The scheduler's side holds them meanwhile, so that nothing else touches them."""

    def __init__(self, services: WorkerServices) -> None:
        self._services = services
        self._owner = _CacheOwner(self._make_host if services.config.kv_tiers.host_bytes else None)
        self._done: queue.SimpleQueue[MoveResult] = queue.SimpleQueue()
        self._futures: dict[int, Future[None]] = {}
        self._loads = ThreadPoolExecutor(_NUM_LOAD_THREADS, "kv-tier-load")
        self._saves = ThreadPoolExecutor(1, "kv-tier-save")
        # Copies to host memory do not wait for the disk.
        self._copies = ThreadPoolExecutor(1, "kv-tier-copy")
        self._digest: str | None = None
        self._kind: str | None = None
        # Weights that are not those of the start are known to this process alone, and so are their folders: that of
        # the present ones, and those of earlier ones, which are removed.
        self._nonce = secrets.token_hex(8)
        self._pushed_folder: str | None = None
        self._old_folders: list[str] = []
        self._about: dict[str, Any] = {}
        self._takes_cores = services.device.kind == "cpu" and not _has_spare_core()

    def slot_owners(self) -> Sequence[SlotOwner]:
        return (self._owner,)

    def kv_tier_folder(self) -> str:
        """Folder of the blocks of this rank, as its weights are now; its name alone without `kv_offload_dir`."""
        services = self._services
        if self._digest is None:
            depends = what_blocks_depend_on(services, self._kv_cache)
            self._digest, self._kind = digest_of(depends), kind_of(depends, services, self._kv_cache)
            if self._kind is None and services.config.kv_tiers.kv_peers_other_ranks:
                raise ConfigError(
                    "kv_peers_other_ranks=True is not valid for this engine, whose blocks are not shares of heads: it "
                    "needs attention to keys and values in all layers, by the C++ kernels of the CPU, and neither "
                    "pipeline_parallel_size nor decode_context_parallel_size. Leave it out."
                )
        version = 0 if services.updates is None else services.updates.version
        digest = self._digest if not version else digest_of({"of": self._digest, self._nonce: version})
        root = services.config.kv_tiers.folder
        if root is None:
            return digest
        folder = str(folder_of(root, digest))
        if self._pushed_folder is not None and self._pushed_folder != folder:
            self._old_folders.append(self._pushed_folder)
            self._saves.submit(self._remove_old_folders)
        self._pushed_folder = folder if version else None
        self._about = self._described(version)
        try:
            write_about(folder, self._about)
        except OSError as error:
            logger.warning("Nothing can be kept in %s: %s", folder, error)
        return folder

    def _described(self, version: int) -> dict[str, Any]:
        config = self._services.config
        return {
            "model": str(config.model.model),
            "rank": self._services.rank,
            "ranks": config.parallel.world_size,
            "tensor_parallel_size": config.parallel.tensor_parallel_size,
            "kind": None if version else self._kind,
            "page_bytes": page_bytes(self._kv_cache),
            "weight_version": version,
            "block_size": config.cache.block_size,
            "max_model_len": config.model.planned_context,
            "kv_cache_dtype": config.cache.kv_cache_dtype,
            "made": time.strftime("%Y-%m-%d"),
            "penstock": __version__,
        }

    def kv_host_layout(self) -> HostLayout:
        """Pieces of this rank's host memory."""
        return self._host.layout

    def move_kv_blocks(
        self, folders: Sequence[str], moves: Sequence[Move], unwanted: Sequence[int] = ()
    ) -> list[MoveResult]:
        """Begin moves of this rank's blocks; return the results of those that have ended since.

        folders: of all ranks, as `kv_tier_folder` says. unwanted: moves that end without effect if they wait still.
        """
        for move_id in unwanted:
            waiting = self._futures.get(move_id)
            if waiting is not None and waiting.cancel():
                self._done.put(MoveResult(move_id, 0, "it is not wanted any more"))
        for move in moves:
            threads = self._loads if move.is_load else self._copies if move.target is Tier.HOST else self._saves
            future = threads.submit(self._move, folders[self._services.rank], move)
            self._futures[move.move_id] = future
            future.add_done_callback(functools.partial(self._forget, move.move_id))
        results = []
        while not self._done.empty():
            results.append(self._done.get())
        return results

    def _forget(self, move_id: int, _: Future[None]) -> None:
        self._futures.pop(move_id, None)

    def drop(self, tag: str) -> None:
        if tag == KV_CACHE:
            wait(tuple(self._futures.values()))

    def close(self) -> None:
        for threads in (self._loads, self._copies, self._saves):
            threads.shutdown(wait=True, cancel_futures=True)
        if self._pushed_folder is not None:
            self._old_folders.append(self._pushed_folder)
        self._remove_old_folders()

    def _remove_old_folders(self) -> None:
        """Remove blocks of weights that this process alone knew."""
        while self._old_folders:
            remove_folder(Path(self._old_folders.pop()))

    @property
    def _kv_cache(self) -> PagedKVCache:
        assert self._owner.kv_cache is not None, "a plan's features get no calls"
        return self._owner.kv_cache

    @property
    def _host(self) -> HostMemory:
        assert self._owner.host is not None, "the scheduler's side asks where there is kv_offloading_size"
        return self._owner.host

    def _make_host(self, kv_cache: PagedKVCache) -> HostMemory:
        config = self._services.config
        num_bytes = config.kv_tiers.host_bytes // config.parallel.world_size
        return HostMemory(kv_cache, num_bytes, self._services.device)

    def _move(self, folder: str, move: Move) -> None:
        path, error, num_bytes = path_of(folder, move.key), None, 0
        begun, begin = time.monotonic(), time.thread_time()
        try:
            num_bytes = self._transfer(folder, path, move)
        except DamagedBlock as damage:
            error = str(damage)
            Path(path).unlink(missing_ok=True)
        except Exception as failure:  # of the thread's own: a result tells it
            error = f"{type(failure).__name__}: {failure}"
        cost_s = time.thread_time() - begin if self._takes_cores and not move.is_load else 0.0
        self._done.put(MoveResult(move.move_id, num_bytes, error, cost_s, begun, time.monotonic()))

    def _transfer(self, folder: str, path: str, move: Move) -> int:
        """Move a block of this rank; return the bytes. path: of its file."""
        # Of a move from host memory to the folder they have the sizes alone.
        pages = self._kv_cache.pages_of_block(move.key[0], move.block_id)
        if move.source is Tier.FOLDER:
            return self._load(path, pages)
        if move.target is Tier.FOLDER:
            kept = self._host.pages(pages, move.pieces) if move.source is Tier.HOST else pages
            on_host = [page.cpu().numpy() for page in kept]
            return write_described(folder, self._about, path, on_host, keeps_in_memory=not move.is_beside_steps)
        for part, piece in self._host.parts(pages, move.pieces):
            source, target = (piece, part) if move.is_load else (part, piece)
            if self._services.device.kind == "cpu":
                # Torch would divide each page among threads of its own.
                np.copyto(target.numpy(), source.numpy())
            else:
                target.copy_(source)
        return sum(page.nbytes for page in pages)

    def _load(self, path: str, pages: Sequence[Tensor]) -> int:
        if self._services.device.kind == "cpu":
            return read_block(path, [page.numpy() for page in pages])
        staged = [torch.empty(page.shape, dtype=page.dtype, pin_memory=True) for page in pages]
        num_bytes = read_block(path, [page.numpy() for page in staged])
        for page, read in zip(pages, staged, strict=True):
            page.copy_(read)
        return num_bytes


def _has_spare_core() -> bool:
    """Whether there are cores that the steps do not use."""
    num_cores = len(physical_cores(usable_cpus()))
    return torch.get_num_threads() < min(num_cores, cpu_quota() or num_cores)
