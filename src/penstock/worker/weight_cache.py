"""Weight cache: weights on disk as an engine packed them, which later engines read.

An entry belongs to one checkpoint, by names, sizes, modification times and a sample of the bytes of its files, to the
options that change weights, and to the build of the kernels; others are never read. An entry that is damaged is written
anew. Weights that exceed the memory stay in their entry, mapped.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.config import LoadConfig, ModelConfig
from penstock.config.load import STATES
from penstock.device import Device, DtypeChoice
from penstock.device.dtypes import has_native_kernels
from penstock.errors import CheckpointError, OutOfMemory, UnsupportedArgument
from penstock.layers.linear import weights_size_bytes
from penstock.loader.live_memory import LiveMemory
from penstock.loader.loader import build_model, load_model, load_without_memory, restore
from penstock.loader.packed_files import UNFINISHED, filling_file, metadata_of, read_header, read_state, write_tensors
from penstock.loader.packed_header import LAYOUT_VERSION
from penstock.loader.packed_state import PackedState
from penstock.loader.quantized.choose import choose_rounding
from penstock.loader.weight_files import WeightFiles, damaged
from penstock.models.causal_lm import CausalLM
from penstock.models.registry import runs_through_transformers
from penstock.observability.units import format_bytes
from penstock.parallel import ParallelState
from penstock.system.env import uses_torch_products
from penstock.version import __version__
from penstock.worker.calibration import calibration_texts
from penstock.worker.fingerprint import digest_of, made_of
from penstock.worker.memory_plan import most_for_weights, offloaded_bytes

logger = logging.getLogger(__name__)
# Space of the file system that an entry leaves free.
_RESERVE_BYTES = 1 << 30
# Age from which on a file that was never finished is removed.
_ABANDONED_S = 3600.0
# Bytes of a value in the widest form of weights.
_WIDEST_BYTES = 4
_OFFLOADED_TO = "Name a folder with more room (weight_cache_dir), or leave cpu_offload_gb out, if the weights fit."


class WeightCache:
    """Cache of a rank's weights. Ranks of a group read entries together, or load together.

    Without `weight_cache_dir`, and for weights that are neither quantised nor stay in files, it loads.

    mapped: addresses of the entry that the last model's weights stay in; empty without.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        load_config: LoadConfig,
        parallel: ParallelState,
        device: Device,
        dtype: DtypeChoice,
        memory_fraction: float | None = None,
    ) -> None:
        self._model, self._load, self._parallel = model_config, load_config, parallel
        self._device, self._dtype, self._memory_fraction = device, dtype, memory_fraction
        self.mapped = range(0)

    def load(self, load: Callable[[], CausalLM], *, keeps_inputs: bool) -> CausalLM:
        """Return the model of the cache, else that of `load`, which is written then.

        keeps_inputs: as in `load_for_device`. Raises OutOfMemory where weights cannot stay in a file as they have to.
        """
        check_offload(self._load)
        if self._load.weight_cache_dir is None:
            return load()
        offloaded = self._offloaded_bytes()
        if not offloaded and not self._is_quantized():
            return load()
        folder = Path(self._load.weight_cache_dir).expanduser()
        path = folder / f"{self._key(keeps_inputs)}-rank-{self._parallel.rank}.safetensors"
        begin = time.monotonic()
        model = self._read(path, offloaded)
        # A rank that loads alone would wait for the others, which calibrate together.
        if all(self._gathered(model is not None)) and model is not None:
            logger.info("Weight cache: read %s in %.1f s", path, time.monotonic() - begin)
            return model
        model = None
        if not offloaded or self._calibrates(keeps_inputs):
            loaded = load()
            self._write(path, loaded)
            if not offloaded:
                return loaded
            del loaded
        else:
            self._fill(path)
        model = self._read(path, offloaded)
        if model is None:
            raise OutOfMemory(f"{path} cannot be read again, in which weights have to stay. {_OFFLOADED_TO}")
        return model

    def _gathered(self, value: bool) -> list[bool]:
        """Values of the ranks of this one's groups."""
        groups = self._parallel.tensor, self._parallel.pipeline
        return [one for group in groups for one in group.gather_values(value)]

    def _offloaded_bytes(self) -> int:
        """Bytes of weights that stay in the entry: those asked for, else what exceeds the memory. Of any rank, if of
        one, so that all have entries.
        """
        if self._load.cpu_offload_gb or not may_offload(self._model, self._load, self._device.kind):
            return self._load.offloaded_bytes
        memory = self._device.memory_snapshot()
        most = most_for_weights(self._memory_fraction, memory.total, memory.free, memory.used_by_process)
        size = 0
        if self._num_values() * _WIDEST_BYTES > most:
            size = weights_size_bytes(self._unloaded())
        offloaded = offloaded_bytes(0, size, most)
        return max(offloaded, int(any(self._gathered(offloaded > 0))))

    def _unloaded(self) -> CausalLM:
        dtypes = self._dtype.torch_dtype, self._dtype.weights_torch_dtype
        return load_without_memory(self._model, self._load, self._parallel, self._device.kind, *dtypes)[0]

    def _is_quantized(self) -> bool:
        is_read = self._load.load_format not in ("dummy", *STATES) and not runs_through_transformers(self._model)
        return is_read and choose_rounding(self._model, self._load, self._device.kind) is not None

    def _read(self, path: Path, offloaded: int) -> CausalLM | None:
        if not path.is_file():
            return None
        files = WeightFiles((path,))
        try:
            header = read_header(files)
            if header is None:
                raise damaged(path, "it has no header of packed weights")
            state = read_state(files, header, offloaded)
            model = self._restore(state)
        except CheckpointError as error:
            logger.warning("Weight cache: %s is not used, and written anew. %s", path, error)
            return None
        begin = min((tensor.data_ptr() for tensor in state.tensors.values()), default=0)
        self.mapped = range(begin, begin + path.stat().st_size) if offloaded else range(0)
        return model

    def _restore(self, state: PackedState) -> CausalLM:
        dtypes = self._dtype.torch_dtype, self._dtype.weights_torch_dtype
        device = self._device.torch_device
        return restore(state, self._model, self._parallel, self._device.kind, device, *dtypes)

    def _calibrates(self, keeps_inputs: bool) -> bool:
        """Whether loading runs the float model for calibration. Raises OutOfMemory without memory for that."""
        arguments = self._model, self._load, self._parallel, self._device, self._dtype
        if calibration_texts(*arguments, keeps_inputs=keeps_inputs) is None:
            return False
        needed = self._num_values() * self._dtype.weights_torch_dtype.itemsize
        free = self._device.memory_snapshot().free
        if needed > free:
            raise OutOfMemory(
                f"quantization_calibration={self._model.quantization_calibration!r} runs the float model in memory, "
                f"which takes {format_bytes(needed)}, but only {format_bytes(free)} are free. Use "
                "quantization_calibration='none', by which weights are quantised layer by layer."
            )
        return True

    def _num_values(self) -> int:
        return sum(parameter.numel() for parameter in build_model(self._model, self._parallel).parameters())

    def _fill(self, path: Path) -> None:
        """Load the weights into a new entry, layer by layer, without memory for all of them.

        Raises OutOfMemory without room on the disk.
        """
        kind, dtypes = self._device.kind, (self._dtype.torch_dtype, self._dtype.weights_torch_dtype)
        begin = time.monotonic()
        logger.info("Weight cache: loading the weights into %s, layer by layer", path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(path.parent)
            state = self._packed(self._unloaded())
            # Scales of a KV cache come with the checkpoint, after the layers.
            forms = {name: tensor for name, tensor in state.tensors.items() if tensor.is_meta}
            with filling_file(path, forms, metadata_of(state)) as tensors:
                for name, buffer in build_model(self._model, self._parallel).named_buffers():
                    if name in tensors:
                        tensors[name].copy_(buffer)
                live = self._restore(PackedState(state.header, tensors, in_place=tensors))
                memory = LiveMemory(live)
                load_model(self._model, self._load, self._parallel, torch.device(kind), *dtypes, memory=memory)
                loaded = self._packed(live)
                is_complete = _are_in(tensors, loaded) and metadata_of(loaded) == metadata_of(state)
            if not is_complete:  # a layer has another form than without values
                write_tensors(path, loaded.tensors, metadata_of(loaded))
        except OSError as error:
            free = format_bytes(shutil.disk_usage(path.parent).free) if path.parent.is_dir() else "nothing"
            raise OutOfMemory(f"{path} cannot be written: {error}; {free} is free there. {_OFFLOADED_TO}") from error
        logger.info("Weight cache: wrote %s in %.1f s", path, time.monotonic() - begin)

    def _packed(self, model: CausalLM) -> PackedState:
        with torch.no_grad():
            return PackedState.of(model, self._model, self._device.kind, (self._dtype.name, self._dtype.weights))

    def _write(self, path: Path, model: CausalLM) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(path.parent)
            state = self._packed(model)
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


def check_offload(load: LoadConfig) -> None:
    """Raise UnsupportedArgument if weights are asked to stay in a file, and there are no C++ kernels to read them."""
    if load.cpu_offload_gb and not _has_kernels():
        raise UnsupportedArgument(
            f"cpu_offload_gb={load.cpu_offload_gb!r}: the C++ kernels are off, and torch's products need weights in "
            "memory. Leave it out."
        )


def may_offload(model: ModelConfig, load: LoadConfig, kind: str) -> bool:
    """Whether weights may stay in a file of `weight_cache_dir`. kind: of the device."""
    is_kept = load.weight_cache_dir is not None and load.load_format not in ("dummy", *STATES)
    return is_kept and kind == "cpu" and not runs_through_transformers(model) and _has_kernels()


def _has_kernels() -> bool:
    return has_native_kernels() and not uses_torch_products()


def _are_in(tensors: Mapping[str, Tensor], state: PackedState) -> bool:
    """Whether a state consists of these tensors."""
    places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    return places == {name: tensor.data_ptr() for name, tensor in state.tensors.items()}


def _remove_abandoned(folder: Path) -> None:
    """Remove files of engines that ended while they wrote."""
    for path in folder.glob(f"*{UNFINISHED}"):
        if path.stat().st_mtime < time.time() - _ABANDONED_S:
            path.unlink(missing_ok=True)
