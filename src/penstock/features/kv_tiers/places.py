"""Places of blocks outside of the KV cache: host memory, and the folders of the ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from penstock.contract import RpcCall
from penstock.errors import PenstockError
from penstock.features.kv_files.files import FolderLimit, key_of, path_of, remove_folder
from penstock.features.kv_tiers.host_blocks import HostBlock, HostBlocks
from penstock.scheduler.block_pool import BlockKey
from penstock.scheduler.cache_watcher import FOLDER, HOST_MEMORY
from penstock.scheduler.services import SchedulerServices

logger = logging.getLogger(__name__)


class Places:
    """Which blocks are where, for the present weights. limit: of the folder; None without `kv_offload_dir`.

    has_host: whether there is host memory for blocks. host: the blocks in it; None until the workers are asked.
    known_folders: of the ranks' blocks; empty until the workers are asked, since the weights may have changed.
    wrong: keys of blocks that are being written with content that may be wrong.
    """

    def __init__(self, services: SchedulerServices) -> None:
        config = services.config.kv_tiers
        self._call, self._kv_cache = services.call_workers, services.scheduler.kv_cache
        self._call_soon, folder, kv_cache = services.call_soon, config.folder, self._kv_cache.config
        self.known_folders: list[str] = []
        largest = max(map(kv_cache.block_bytes_of, range(len(kv_cache.groups))), default=0)
        self.limit = None if folder is None else FolderLimit(folder, config.max_bytes, largest, self._note_removed)
        self.has_host = config.host_bytes > 0
        # Made when the workers are asked, with the folders of the weights whose blocks it has.
        self.host: HostBlocks | None = None
        self._blocks_are_of: list[str] = []
        self.wrong: set[BlockKey] = set()

    @property
    def folders(self) -> list[str]:
        """Folders of the ranks' blocks."""
        if not self.known_folders:
            self.known_folders = self._call(RpcCall("kv_tier_folder"))
            if self._blocks_are_of and self.known_folders != self._blocks_are_of:
                # The blocks so far were computed with other weights.
                self._kv_cache.watchers.lost_elsewhere(None, FOLDER)
                if self.host is not None:
                    self.host.clear()
            self._blocks_are_of = self.known_folders
        return self.known_folders

    @property
    def host_memory(self) -> HostBlocks | None:
        """Blocks in host memory, for the present weights; None without kv_offloading_size."""
        if self.folders and self.has_host and self.host is None:
            layouts = self._call(RpcCall("kv_host_layout"))
            self.host = HostBlocks(layouts, lambda key: self._kv_cache.watchers.lost_elsewhere((key,), HOST_MEMORY))
        return self.host

    def path(self, key: BlockKey) -> str:
        """Path of the first rank's file of a block."""
        return path_of(self.folders[0], key)

    def has(self, key: BlockKey, others: Collection[str] = ()) -> bool:
        """Whether a block is in host memory or in the folder. others: paths that count as there."""
        path = self.path(key)
        if key in self.wrong:
            return False
        return self.in_host(key) is not None or path in others or (self.limit is not None and os.path.exists(path))

    def in_host(self, key: BlockKey) -> HostBlock | None:
        """A block in host memory; None if it is not there."""
        return None if self.host is None else self.host.find(key)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Remove blocks whose content may be wrong."""
        for key in keys:
            if self.host is not None:
                self.host.forget(key)
            for folder in self.known_folders:
                try:
                    os.unlink(path_of(folder, key))
                except OSError:
                    continue  # most blocks are not there
        self._kv_cache.watchers.lost_elsewhere(keys, FOLDER)

    def _note_removed(self, paths: Sequence[str]) -> None:
        """Note files that had to make room; called in another thread."""
        keys = [key_of(path) for path in paths if path.startswith(tuple(self.known_folders))]
        self._call_soon(lambda: self._kv_cache.watchers.lost_elsewhere(keys, FOLDER))

    def remove_all(self) -> bool:
        """Remove all blocks of this engine's fingerprint, which other engines that share the folder compute again.

        Returns whether that was possible.
        """
        if self.host is not None:
            self.host.clear()
        if self.limit is None:
            return True
        try:
            folders = self.folders
        except PenstockError as error:
            logger.warning("The blocks in kv_offload_dir are not removed: %s", error)
            return False
        failures = [failure for folder in folders for failure in remove_folder(Path(folder))]
        if failures:
            logger.warning("%d files in kv_offload_dir are not removed: %s", len(failures), failures[0])
        # It is described anew with its next block.
        self.known_folders = []
        self._kv_cache.watchers.lost_elsewhere(None, FOLDER)
        return not failures

    def ask_again(self) -> None:
        """Note that the weights may be others from now on."""
        self.known_folders = []

    def workers_replaced(self) -> None:
        self.remove(tuple(self.wrong))
        self.wrong.clear()
        if self.host is not None:
            self.host.clear()
        self.host = None  # their memory is lost
        self.known_folders = []

    def note_written(self, num_bytes: int) -> None:
        """Note that files have come to the folder."""
        if self.limit is not None:
            self.limit.note_written(num_bytes)
