"""Which dtype a model computes in, and which its weights are kept in. Needs no torch, as plans do without it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import env
from penstock.errors import UnsupportedFeature

if TYPE_CHECKING:
    import torch

_SUPPORTED = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """name: what the model computes in, with its activations, norms, biases and KV cache. reason: why, for people.
    weights: what its matrices are kept in; products widen them exactly where that is narrower than `name`.
    """

    name: str
    reason: str
    weights: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return _torch_dtype(self.name)

    @property
    def weights_torch_dtype(self) -> torch.dtype:
        return _torch_dtype(self.weights)


def choose_cpu_dtype(requested: str, checkpoint: str, stored: str | None = None) -> DtypeChoice:
    """float32, with the weights kept in the dtype that was asked for, or in the checkpoint's.

    checkpoint: what config.json names. stored: what the files' matrices are in, which counts where it is known.
    Without our C++ kernels weights are kept in what is computed in: float32, or what was asked for by name.
    Raises UnsupportedFeature when the checkpoint's dtype is not known.
    """
    checkpoint = stored or checkpoint
    if requested == "auto" and checkpoint not in _SUPPORTED:
        raise UnsupportedFeature(
            f"The checkpoint's dtype {checkpoint!r} is not supported. Supported: {', '.join(_SUPPORTED)}. "
            "Give dtype='float32' to convert its weights."
        )
    weights, reason = (checkpoint, "the checkpoint's own") if requested == "auto" else (requested, "as asked for")
    if weights == "float32":
        return DtypeChoice("float32", reason, "float32")
    if has_native_kernels() and not env.uses_torch_products():
        return DtypeChoice("float32", f"weights stay in {weights}, {reason}, and products widen them", weights)
    if requested == "auto":
        why = f"exact for {checkpoint} weights, and faster than {checkpoint} on this CPU"
        return DtypeChoice("float32", why, "float32")
    return DtypeChoice(requested, reason, requested)


def choose_cuda_dtype(requested: str, checkpoint: str) -> DtypeChoice:
    """The one that config.json names unless another is asked for; whether the GPU has it is not known here.

    Raises UnsupportedFeature when the checkpoint's dtype is not known.
    """
    name, reason = (checkpoint, "the checkpoint's own") if requested == "auto" else (requested, "as asked for")
    if name not in _SUPPORTED:
        raise UnsupportedFeature(
            f"The checkpoint's dtype {name!r} is not supported. Supported: {', '.join(_SUPPORTED)}."
        )
    return DtypeChoice(name, reason, name)


def choose_kv_cache_dtype(requested: str, model_dtype: str) -> str:
    """What keys and values are kept in: what is asked for, "auto" being what the model computes in."""
    return model_dtype if requested == "auto" else requested


def has_native_kernels() -> bool:
    """Whether our C++ kernels compute on the CPU: they were built and are wanted. Importing them would import torch."""
    built = (Path(__file__).parents[1] / "kernels" / "native").glob("_kernels*.*")
    return env.cpu_kernels() != "torch" and any(built)


def _torch_dtype(name: str) -> torch.dtype:
    from penstock.device.base import TORCH_DTYPES

    return TORCH_DTYPES[name]
