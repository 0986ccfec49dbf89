"""Fingerprints of what a model computes with: its files, the options that change numbers, and the kernels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from penstock.config import EngineConfig, LoadConfig, ModelConfig
from penstock.device.capability import gpu_capability
from penstock.kernels.native import NATIVE, library_path
from penstock.loader.packed_header import Kernels
from penstock.worker.calibration_texts import GENERAL_TEXT

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
# Packages that read media, and make the inputs of encoders.
_MEDIA_PACKAGES = ("av", "numpy", "pillow", "soundfile", "torchvision", "transformers")


def made_of(model: ModelConfig, load: LoadConfig, device: str, *, has_times: bool = True) -> dict[str, Any]:
    """Describe all that a model's weights and numbers depend on, but for dtypes and ranks, as JSON has it.

    device: "cpu" or "cuda". has_times: whether files of another time of change are other files, which finds changes
    that the samples of their bytes miss; without, copies on other machines are equal.
    """
    options = {field.name: getattr(model, field.name) for field in fields(model)}
    texts = GENERAL_TEXT if model.calibration_file is None else model.calibration_file
    return {
        "kernels": asdict(Kernels.here(device)),
        "library": _digest_of_library(),
        "arithmetic": NATIVE is not None and NATIVE.prefers_bfloat16,
        "capability": gpu_capability() if device == "cuda" else None,
        "options": {name: value for name, value in options.items() if name not in _OTHER_OPTIONS},
        "context": model.planned_context,
        "load": (load.load_format, load.model_loader_extra_config),
        "files": [_stamp(path, has_times=has_times) for path in _files(model)],
        "calibration": hashlib.sha256(texts.read_bytes()).hexdigest() if texts.is_file() else None,
    }


def media_processing(config: EngineConfig) -> dict[str, Any]:
    """Describe what the inputs of media items depend on, besides the keys of the items; empty for a model of texts."""
    if config.model.multimodal is None:
        return {}
    versions: dict[str, str | None] = dict.fromkeys(_MEDIA_PACKAGES)
    for name in _MEDIA_PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "processor": config.model.mm_processor_kwargs,
        "reading": config.multimodal.media_io_kwargs,
        "packages": versions,
    }


def digest_of(parts: Mapping[str, Any]) -> str:
    """Digest of a description, as 32 hexadecimal digits."""
    written = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(written.encode()).hexdigest()[:32]


def _files(model: ModelConfig) -> Iterator[Path]:
    """Files of the model and of its tokenizer, which reads the calibration data."""
    for folder in dict.fromkeys((model.folder, model.tokenizer_folder)):
        for path in sorted(folder.iterdir()):
            if path.is_file() and not path.name.startswith(".") and path.suffix not in (".md", ".py", ".txt"):
                yield path


def stamps_of(folder: Path) -> list[tuple[str, int, int, str]]:
    """Name, size, 0, and digest of each file of a folder, equal for copies on other machines."""
    return [_stamp(path, has_times=False) for path in sorted(folder.glob("*")) if path.is_file()]


def _stamp(path: Path, *, has_times: bool) -> tuple[str, int, int, str]:
    """Name, size, time of change, and digest of evenly spread parts of a file: all of a small one."""
    status = path.stat()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        step = max(status.st_size // _NUM_SAMPLES, _SAMPLE_BYTES)
        for begin in range(0, status.st_size, step):
            file.seek(begin)
            digest.update(file.read(_SAMPLE_BYTES))
    return path.name, status.st_size, status.st_mtime_ns if has_times else 0, digest.hexdigest()


def _digest_of_library() -> str | None:
    """Digest of the C++ kernels, whose layouts and numbers the weights have; None without."""
    path = library_path()
    return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()
