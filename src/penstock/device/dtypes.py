"""Choice of the compute dtype and of the weights' dtype. Does not need torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import UnsupportedFeature
from penstock.system import env

if TYPE_CHECKING:
    import torch

_SUPPORTED = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """name: dtype of computation, activations, norms, biases and KV cache. reason: for the log.
    weights: dtype of the weight matrices. Where it is narrower than `name`, products widen them exactly, or compute in
    bfloat16 arithmetic (`layers.linear`).
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
    """Choose float32 for computation, and the requested or the checkpoint's dtype for weights.

    checkpoint: dtype in config.json. stored: dtype of the matrices in the weight files, which takes precedence if
    known. Without the C++ kernels weights have the compute dtype: float32, or the requested one. Raises
    UnsupportedFeature for an unknown dtype of the checkpoint.
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
        return DtypeChoice("float32", f"weights stay in {weights}, {reason}", weights)
    if requested == "auto":
        why = f"exact for {checkpoint} weights, and faster than {checkpoint} on this CPU"
        return DtypeChoice("float32", why, "float32")
    return DtypeChoice(requested, reason, requested)


def choose_cuda_dtype(requested: str, checkpoint: str) -> DtypeChoice:
    """Choose the dtype of config.json unless another is requested; does not check the GPU's support.

    Raises UnsupportedFeature for an unknown dtype of the checkpoint.
    """
    name, reason = (checkpoint, "the checkpoint's own") if requested == "auto" else (requested, "as asked for")
    if name not in _SUPPORTED:
        raise UnsupportedFeature(
            f"The checkpoint's dtype {name!r} is not supported. Supported: {', '.join(_SUPPORTED)}."
        )
    return DtypeChoice(name, reason, name)


def has_native_kernels() -> bool:
    """Whether the C++ kernels are built and enabled, found without importing torch."""
    built = (Path(__file__).parents[1] / "kernels" / "native").glob("_kernels*.*")
    return env.cpu_kernels() != "torch" and any(built)


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype
