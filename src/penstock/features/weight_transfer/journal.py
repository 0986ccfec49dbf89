"""Newest complete weights of a trainer, as a checkpoint that workers load after a crash."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from penstock.config import ModelConfig
from penstock.errors import CheckpointError
from penstock.features.weight_transfer.state import WeightsState

# Bytes of tensors that are held before they are written.
_FILE_BYTES = 256 << 20
# Name of a complete checkpoint, before its version.
_COMPLETE = "version-"


class Journal:
    """Checkpoints of updates in a folder: the newest complete one, and the one that is arriving.

    newest: folder of the former, with weights of `version`; None before the first one.
    is_writer: False on ranks that know the folders alone: each rank gets the same tensors.
    """

    def __init__(self, folder: Path, model: ModelConfig, *, is_writer: bool = True) -> None:
        self._folder, self._model, self._is_writer = folder, model, is_writer
        self._held: dict[str, Tensor] = {}
        self._held_bytes = 0
        self._files: dict[str, str] = {}
        self._arriving = folder / "arriving"
        complete = [path for path in folder.glob(f"{_COMPLETE}*") if path.is_dir()]
        newest = max(complete, key=lambda path: path.stat().st_mtime_ns, default=None)
        self.newest: str | None = None if newest is None else str(newest)
        self.version: int | None = None

    def begin(self) -> None:
        """Begin a checkpoint; what has arrived of another one is dropped."""
        if self._is_writer:
            shutil.rmtree(self._arriving, ignore_errors=True)
        self._held, self._held_bytes, self._files = {}, 0, {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor. Raises CheckpointError where it cannot be written."""
        if not self._is_writer:
            return
        self._held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._held_bytes += tensor.nbytes
        if self._held_bytes >= _FILE_BYTES:
            self._write()

    def finish(self, version: int) -> None:
        """Complete the checkpoint, which takes the place of the newest one."""
        complete = self._folder / f"{_COMPLETE}{version}"
        if not self._is_writer:
            self.newest, self.version = str(complete), version
            return
        self._write()
        index = {"metadata": {}, "weight_map": self._files}
        (self._arriving / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        (self._arriving / "config.json").write_text(json.dumps(self._model.hf_config), encoding="utf-8")
        shutil.rmtree(complete, ignore_errors=True)
        os.replace(self._arriving, complete)
        before, self.newest, self.version = self.newest, str(complete), version
        if before is not None and before != self.newest:
            shutil.rmtree(before, ignore_errors=True)
        self._files = {}

    def folder_of(self, version: int) -> str | None:
        """Folder with the weights of a version; None if they are not kept."""
        return self.newest if self.version == version else None

    def newer(self, state: WeightsState) -> WeightsState:
        """The state of weights that were kept after these, by a process that was lost before it could say so."""
        if state.folder is None or self.newest in (None, state.folder):
            return state
        assert self.newest is not None, "another folder"
        version = int(Path(self.newest).name.removeprefix(_COMPLETE))
        return WeightsState(version, state.num_updates + 1, is_pushed=True, folder=self.newest)

    def _write(self) -> None:
        if not self._held:
            return
        path = self._arriving / f"model-{len(set(self._files.values()))}.safetensors"
        try:
            self._arriving.mkdir(parents=True, exist_ok=True)
            save_file(self._held, path, {"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"recovery_dir={str(self._folder)!r} of weight_transfer_config cannot be written: {error}. Free space "
                "there, or use recovery='undefined'."
            ) from error
        self._files.update(dict.fromkeys(self._held, path.name))
        self._held, self._held_bytes = {}, 0
