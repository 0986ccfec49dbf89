"""Weight cache: quantised weights on disk as an engine packed them, which later engines read.

An entry belongs to one checkpoint, by names, sizes, modification times and a sample of the bytes of its files, to the
options that change weights, and to the build of the kernels; others are never read. An entry that is damaged is written
anew.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.config import LoadConfig, ModelConfig
from penstock.config.load import STATES
from penstock.device import Device, DtypeChoice
from penstock.errors import CheckpointError
from penstock.loader.loader import restore
from penstock.loader.packed_files import UNFINISHED, metadata_of, read_header, read_state, write_tensors
from penstock.loader.packed_header import LAYOUT_VERSION
from penstock.loader.packed_state import PackedState
from penstock.loader.quantized.choose import choose_rounding
from penstock.loader.weight_files import WeightFiles, damaged
from penstock.models.causal_lm import CausalLM
from penstock.models.registry import runs_through_transformers
from penstock.observability.units import format_bytes
from penstock.parallel import ParallelState
from penstock.version import __version__
from penstock.worker.fingerprint import digest_of, made_of

logger = logging.getLogger(__name__)
# Space of the file system that an entry leaves free.
_RESERVE_BYTES = 1 << 30
# Age from which on a file that was never finished is removed.
_ABANDONED_S = 3600.0


class WeightCache:
    """Cache of a rank's weights. Ranks of a group read entries together, or load together.

    Without `weight_cache_dir`, and for weights that are not quantised, it loads.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        load_config: LoadConfig,
        parallel: ParallelState,
        device: Device,
        dtype: DtypeChoice,
    ) -> None:
        self._model, self._load, self._parallel = model_config, load_config, parallel
        self._device, self._dtype = device, dtype

    def load(self, load: Callable[[], CausalLM], *, keeps_inputs: bool) -> CausalLM:
        """Return the model of the cache, else that of `load`, which is written then.

        keeps_inputs: as in `load_for_device`.
        """
        if self._load.weight_cache_dir is None or not self._is_quantized():
            return load()
        folder = Path(self._load.weight_cache_dir).expanduser()
        path = folder / f"{self._key(keeps_inputs)}-rank-{self._parallel.rank}.safetensors"
        begin = time.monotonic()
        model = self._read(path)
        # A rank that loads alone would wait for the others, which calibrate together.
        is_there = model is not None
        for group in (self._parallel.tensor, self._parallel.pipeline):
            is_there = all(group.gather_values(is_there))
        if model is not None and is_there:
            logger.info("Weight cache: read %s in %.1f s", path, time.monotonic() - begin)
            return model
        model = None
        loaded = load()
        self._write(path, loaded)
        return loaded

    def _is_quantized(self) -> bool:
        is_read = self._load.load_format not in ("dummy", *STATES) and not runs_through_transformers(self._model)
        return is_read and choose_rounding(self._model, self._load, self._device.kind) is not None

    def _read(self, path: Path) -> CausalLM | None:
        if not path.is_file():
            return None
        files = WeightFiles((path,))
        dtypes = self._dtype.torch_dtype, self._dtype.weights_torch_dtype
        try:
            header = read_header(files)
            if header is None:
                raise damaged(path, "it has no header of packed weights")
            device = self._device.torch_device
            state = read_state(files, header)
            return restore(state, self._model, self._parallel, self._device.kind, device, *dtypes)
        except CheckpointError as error:
            logger.warning("Weight cache: %s is not used, and written anew. %s", path, error)
            return None

    def _write(self, path: Path, model: CausalLM) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(path.parent)
            with torch.no_grad():
                dtypes = self._dtype.name, self._dtype.weights
                state = PackedState.of(model, self._model, self._device.kind, dtypes)
            size = sum(tensor.numel() * tensor.element_size() for tensor in state.tensors.values())
            free = shutil.disk_usage(path.parent).free
            if size + _RESERVE_BYTES > free:
                logger.warning(
                    "Weight cache: %s would take %s, but %s are free, of which %s stay so. It is not written.",
                    path,
                    *map(format_bytes, (size, free, _RESERVE_BYTES)),
                )
                return
            begin = time.monotonic()
            write_tensors(path, state.tensors, metadata_of(state))
        except OSError as error:
            logger.warning("Weight cache: %s cannot be written: %s. The engine starts without.", path, error)
        else:
            logger.info("Weight cache: wrote %s (%s) in %.1f s", path, format_bytes(size), time.monotonic() - begin)

    def _key(self, keeps_inputs: bool) -> str:
        """Digest of all that the packed weights depend on."""
        ranks = self._parallel
        parts: dict[str, Any] = {
            **made_of(self._model, self._load, self._device.kind),
            "versions": (LAYOUT_VERSION, __version__, torch.__version__),
            "dtypes": (self._dtype.name, self._dtype.weights),
            "keeps_inputs": keeps_inputs,
            "ranks": [(group.rank, group.size) for group in (ranks.tensor, ranks.pipeline, ranks.context)],
            "stages": (ranks.pipeline_layers, ranks.embeds_at_end),
        }
        return digest_of(parts)


def _remove_abandoned(folder: Path) -> None:
    """Remove files of engines that ended while they wrote."""
    for path in folder.glob(f"*{UNFINISHED}"):
        if path.stat().st_mtime < time.time() - _ABANDONED_S:
            path.unlink(missing_ok=True)
