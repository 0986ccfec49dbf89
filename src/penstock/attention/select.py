"""Which backend runs a layer on a device."""

from __future__ import annotations

import torch

from penstock.attention.base import AttentionBackend, LayerAttention
from penstock.attention.cpu_native import CpuNativeBackend
from penstock.attention.cpu_paged import CpuPagedBackend
from penstock.attention.reference import ReferenceBackend
from penstock.attention.torch_varlen import TorchVarlenBackend
from penstock.errors import ConfigError, UnsupportedFeature

BACKENDS: dict[str, type[AttentionBackend]] = {
    backend.name: backend for backend in (CpuNativeBackend, CpuPagedBackend, TorchVarlenBackend, ReferenceBackend)
}


def select_backend(
    layer: LayerAttention,
    *,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    candidates: tuple[str, ...],
    requested: str | None = None,
) -> tuple[type[AttentionBackend], dict[str, str]]:
    """The first of the device's candidates (best first) that can run the layer, and why the better ones cannot.

    Raises ConfigError for an unknown name, UnsupportedFeature when the requested one cannot run here.
    """
    if requested is not None and requested not in BACKENDS:
        raise ConfigError(f"attention_backend={requested!r} is not valid. Allowed: {', '.join(BACKENDS)}.")
    refusals: dict[str, str] = {}
    for name in candidates if requested is None else (requested,):
        why_not = BACKENDS[name].why_not(layer, dtype, device, block_size)
        if why_not is None:
            return BACKENDS[name], refusals
        refusals[name] = why_not
    reasons = "; ".join(f"{name}: {why}" for name, why in refusals.items())
    raise UnsupportedFeature(f"No attention backend can run layer {layer.name} on {device}. {reasons}.")
