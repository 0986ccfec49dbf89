"""Weight cache: quantised weights on disk as an engine packed them, which later engines read.

An entry belongs to one checkpoint, by names, sizes, modification times and a sample of the bytes of its files, to the
options that change weights, and to the build of the kernels; others are never read. An entry that is damaged is written
anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from penstock.config import LoadConfig, ModelConfig
from penstock.config.load import STATES
from penstock.device import Device, DtypeChoice
from penstock.device.capability import gpu_capability
from penstock.errors import CheckpointError
from penstock.kernels.native import NATIVE, library_path
from penstock.loader.loader import restore
from penstock.loader.packed_files import UNFINISHED, metadata_of, read_header, read_state, write_tensors
from penstock.loader.packed_state import LAYOUT_VERSION, Kernels, PackedState
from penstock.loader.quantized.choose import choose_rounding
from penstock.loader.weight_files import WeightFiles
from penstock.models.causal_lm import CausalLM
from penstock.models.registry import runs_through_transformers
from penstock.observability.units import format_bytes
from penstock.parallel import ParallelState
from penstock.version import __version__
from penstock.worker.calibration_texts import GENERAL_TEXT

logger = logging.getLogger(__name__)
# Options that change no weight; folders count by their files.
_OTHER_OPTIONS = frozenset(
    (
        "model",
        "folder",
        "tokenizer_folder",
        "hf_generation_config",
        "max_model_len",
        "seed",
        "generation_config",
        "override_generation_config",
        "pooling",
        "mm_processor_kwargs",
        "enable_prompt_embeds",
    )
)
# Parts of a file that are compared, and their size.
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096
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
            state = read_state(files, read_header(files) or {})
            device = self._device.torch_device
            return restore(state, self._model, self._parallel, self._device.kind, device, *dtypes)
        except (CheckpointError, KeyError, TypeError, AttributeError) as error:  # the header may have any values
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
        model, ranks = self._model, self._parallel
        options = {field.name: getattr(model, field.name) for field in fields(model)}
        calibration = model.calibration_file
        texts = GENERAL_TEXT if calibration is None else calibration
        parts: dict[str, Any] = {
            "versions": (LAYOUT_VERSION, __version__, torch.__version__),
            "kernels": asdict(Kernels.here(self._device.kind)),
            "library": _digest_of_library(),
            "arithmetic": NATIVE is not None and NATIVE.prefers_bfloat16,
            "capability": gpu_capability() if self._device.kind == "cuda" else None,
            "options": {name: value for name, value in options.items() if name not in _OTHER_OPTIONS},
            "context": model.planned_context,
            "load": (self._load.load_format, self._load.model_loader_extra_config),
            "dtypes": (self._dtype.name, self._dtype.weights),
            "keeps_inputs": keeps_inputs,
            "ranks": [(group.rank, group.size) for group in (ranks.tensor, ranks.pipeline, ranks.context)],
            "stages": (ranks.pipeline_layers, ranks.embeds_at_end),
            "files": [_stamp(path) for path in _files(model)],
            "calibration": hashlib.sha256(texts.read_bytes()).hexdigest() if texts.is_file() else None,
        }
        written = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.sha256(written.encode()).hexdigest()[:32]


def _files(model: ModelConfig) -> Iterator[Path]:
    """Files of the model and of its tokenizer, which reads the calibration data."""
    for folder in dict.fromkeys((model.folder, model.tokenizer_folder)):
        for path in sorted(folder.iterdir()):
            if path.is_file() and not path.name.startswith(".") and path.suffix not in (".md", ".py", ".txt"):
                yield path


def _stamp(path: Path) -> tuple[str, int, int, str]:
    """Name, size, modification time, and digest of evenly spread parts of a file: all of a small one."""
    status = path.stat()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        step = max(status.st_size // _NUM_SAMPLES, _SAMPLE_BYTES)
        for begin in range(0, status.st_size, step):
            file.seek(begin)
            digest.update(file.read(_SAMPLE_BYTES))
    return path.name, status.st_size, status.st_mtime_ns, digest.hexdigest()


def _digest_of_library() -> str | None:
    """Digest of the C++ kernels, whose layouts the weights have; None without."""
    path = library_path()
    return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()


def _remove_abandoned(folder: Path) -> None:
    """Remove files of engines that ended while they wrote."""
    for path in folder.glob(f"*{UNFINISHED}"):
        if path.stat().st_mtime < time.time() - _ABANDONED_S:
            path.unlink(missing_ok=True)
