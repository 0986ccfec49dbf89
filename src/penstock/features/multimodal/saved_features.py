"""Encoder outputs in a folder, where other and later engines find them by the content of their items.

It is that of `ec_transfer_config`, or else of `kv_offload_dir`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from penstock.features.kv_files.files import (
    DamagedBlock,
    FolderLimit,
    folder_of,
    path_of,
    read_block,
    write_described,
)
from penstock.features.multimodal.messages import MediaItem
from penstock.version import __version__
from penstock.worker.feature import WorkerServices
from penstock.worker.fingerprint import digest_of, made_of, media_processing

logger = logging.getLogger(__name__)
# Outputs that wait to be written; others are not kept.
_MOST_WAITING = 16


class SavedFeatures:
    """Encoder outputs of one rank, each a file as blocks of the KV cache are. Ranks read, and the first one writes.

    Outputs of weights that came after the start are neither kept nor found, and neither are those of items that a
    caller has named, since the name may be another item's in another engine.
    """

    def __init__(self, services: WorkerServices) -> None:
        self._services = services
        tiers, transfer = services.config.kv_tiers, services.config.ec_transfer
        # With a transfer, a file is there before the answer of its request, upon which another engine is asked.
        self._writes_at_once = transfer.folder is not None
        self._root = transfer.folder or tiers.folder
        self._max_bytes = transfer.max_bytes if self._writes_at_once else tiers.max_bytes
        self._is_writer = services.rank == 0 and (transfer.saves or not self._writes_at_once)
        self._folder: Path | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._limit: FolderLimit | None = None
        self._num_waiting = 0

    def load(self, item: MediaItem, width: int) -> Tensor | None:
        """Features of an item, [num_rows, width] in the model's dtype; None if they are not there."""
        path = self._path_of(item)
        if path is None or not os.path.exists(path):
            return None
        found = torch.empty((item.num_rows, width), dtype=self._services.dtype)
        try:
            read_block(path, [_bytes_of(found)])
        except DamagedBlock as damage:
            logger.warning("An item is encoded again: %s", damage)
            with contextlib.suppress(OSError):
                Path(path).unlink()
            return None
        except OSError as error:
            logger.info("An item is encoded again: %s", error)
            return None
        return found.to(self._services.device.torch_device)

    def save(self, item: MediaItem, features: Tensor) -> None:
        """Write the features of an item: in a thread, or at once where an engine is asked next that needs them."""
        path = self._path_of(item)
        if path is None or not self._is_writer or self._num_waiting >= _MOST_WAITING:
            return
        self._num_waiting += 1
        if self._writes_at_once:
            self._write(path, features.detach())
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "encoder-output-save")
        self._threads.submit(self._write, path, features.detach())

    def close(self) -> None:
        """Write what waits to be written."""
        if self._threads is not None:
            self._threads.shutdown(wait=True)
        if self._limit is not None:
            self._limit.close()

    def _path_of(self, item: MediaItem) -> str | None:
        """Path of an item's file; None where its features are not kept."""
        services = self._services
        if self._root is None or item.is_named or (services.updates is not None and services.updates.num_updates):
            return None
        if self._folder is None:
            self._folder = folder_of(self._root, _digest_of_encoder(services))
        return path_of(self._folder, (0, hashlib.sha256(item.key.encode()).digest()))

    def _write(self, path: str, features: Tensor) -> None:
        try:
            content = features.contiguous().cpu()
            assert self._root is not None
            if self._limit is None:
                option = "shared_storage_path" if self._writes_at_once else "kv_offload_dir"
                self._limit = FolderLimit(self._root, self._max_bytes, option=option)
            if (why := self._limit.why_full(content.nbytes)) is not None:
                logger.info("An encoder output is not kept: %s", why)
                return
            num_bytes = write_described(str(self._folder), self._about(), path, [_bytes_of(content)])
            self._limit.note_written(num_bytes)
        except OSError as error:
            logger.warning("An encoder output is not kept: %s", error)
        finally:
            self._num_waiting -= 1

    def _about(self) -> dict[str, object]:
        return {
            "model": str(self._services.config.model.model),
            "content": "encoder outputs",
            "rank": 0,
            "ranks": 1,
            "made": time.strftime("%Y-%m-%d"),
            "penstock": __version__,
        }


def _digest_of_encoder(services: WorkerServices) -> str:
    """Fingerprint of all that an item's features depend on besides its key."""
    config = services.config
    parts = {
        "what": "encoder outputs",
        **made_of(config.model, config.load, services.device.kind, has_times=False),
        "torch": torch.__version__,
        "dtype": str(services.dtype),
        "processing": media_processing(config),
        "seed": config.model.seed if config.load.load_format == "dummy" else None,
    }
    return digest_of(parts)


def _bytes_of(tensor: Tensor) -> np.ndarray:
    """Memory of a tensor on the host, uint8."""
    return tensor.view(-1).view(torch.uint8).numpy()
