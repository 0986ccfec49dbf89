"""Which dtype a model computes in. Needs no torch, so that a plan can be made without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import UnsupportedFeature

if TYPE_CHECKING:
    import torch

_SUPPORTED = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """The dtype that the model computes in, and why."""

    name: str
    reason: str

    @property
    def torch_dtype(self) -> torch.dtype:
        from penstock.device.base import TORCH_DTYPES

        return TORCH_DTYPES[self.name]


def choose_cpu_dtype(requested: str, checkpoint: str) -> DtypeChoice:
    """float32 unless something else is asked for.

    Raises UnsupportedFeature when the checkpoint's dtype is not known.
    """
    if requested != "auto":
        return DtypeChoice(requested, "as asked for")
    if checkpoint not in _SUPPORTED:
        raise UnsupportedFeature(
            f"The checkpoint's dtype {checkpoint!r} is not supported. Supported: {', '.join(_SUPPORTED)}. "
            "Give dtype='float32' to convert its weights."
        )
    if checkpoint == "float32":
        return DtypeChoice("float32", "the checkpoint's own")
    return DtypeChoice("float32", f"exact for {checkpoint} weights, and faster than {checkpoint} on this CPU")


def choose_cuda_dtype(requested: str, checkpoint: str) -> DtypeChoice:
    """The checkpoint's own unless another is asked for; whether the GPU has it is not known here.

    Raises UnsupportedFeature when the checkpoint's dtype is not known.
    """
    name, reason = (checkpoint, "the checkpoint's own") if requested == "auto" else (requested, "as asked for")
    if name not in _SUPPORTED:
        raise UnsupportedFeature(
            f"The checkpoint's dtype {name!r} is not supported. Supported: {', '.join(_SUPPORTED)}."
        )
    return DtypeChoice(name, reason)
