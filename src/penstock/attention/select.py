"""Selection of the attention backend of a layer on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from penstock.attention.base import AttentionBackend, BringsBackend, CacheBackend, CacheLayer
from penstock.attention.cpu_native import CpuNativeBackend
from penstock.attention.cpu_paged import CpuPagedBackend
from penstock.attention.reference import ReferenceBackend
from penstock.attention.step import LayerAttention
from penstock.attention.torch_varlen import TorchVarlenBackend
from penstock.attention.triton_paged import TritonInvariantBackend, TritonPagedBackend
from penstock.contract import AttentionSpec, KVCacheSpec
from penstock.device.base import TORCH_DTYPES
from penstock.errors import ConfigError, UnsupportedFeature

BACKENDS: dict[str, type[AttentionBackend]] = {
    backend.name: backend
    for backend in (
        CpuNativeBackend,
        CpuPagedBackend,
        TritonPagedBackend,
        TritonInvariantBackend,
        TorchVarlenBackend,
        ReferenceBackend,
    )
}


def select_backend(
    *layers: LayerAttention,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    candidates: tuple[str, ...],
    requested: str | None = None,
) -> tuple[type[AttentionBackend], dict[str, str]]:
    """Return the first of the device's candidates (best first) that can run all layers, and why better ones cannot.

    Raises ConfigError for an unknown name, UnsupportedFeature when the requested backend cannot run here.
    """
    if requested is not None and requested not in BACKENDS:
        raise ConfigError(f"attention_backend={requested!r} is not valid. Allowed: {', '.join(BACKENDS)}.")
    # Checked once for layers that differ only in their names.
    distinct = {replace(layer, name=""): layer for layer in reversed(layers)}.values()
    refusals: dict[str, str] = {}
    for name in candidates if requested is None else (requested,):
        backend = BACKENDS[name]
        reasons = (_why_not(backend, layer, dtype, device, block_size) for layer in distinct)
        why_not = next((reason for reason in reasons if reason is not None), None)
        if why_not is None:
            return backend, refusals
        refusals[name] = why_not
    raise UnsupportedFeature(
        f"No attention backend can run layer {layers[0].name} on {device}. "
        f"{'; '.join(f'{name}: {why}' for name, why in refusals.items())}."
    )


def _why_not(
    backend: type[AttentionBackend], layer: LayerAttention, dtype: torch.dtype, device: torch.device, block_size: int
) -> str | None:
    if layer.context is not None and not backend.shares_positions:
        return f"it does not support decode_context_parallel_size={layer.context.group.size}"
    if layer.latent_size is not None and not backend.attends_latents:
        return "it does not support latent attention"
    if layer.alibi_slopes is not None and not backend.biases_distances:
        return "it does not support ALiBi"
    if layer.distance_biases is not None and not backend.biases_distances:
        return "it does not support biases by distance"
    if layer.context is not None and layer.alibi_slopes is not None:
        return f"it does not support ALiBi with decode_context_parallel_size={layer.context.group.size}"
    if layer.context is not None and layer.sinks is not None:
        return f"it does not support attention sinks with decode_context_parallel_size={layer.context.group.size}"
    return backend.why_not(layer, dtype, device, block_size)


def select_cache_backend(
    layers: Sequence[CacheLayer],
    spec: KVCacheSpec,
    *,
    device: torch.device,
    candidates: tuple[str, ...],
    requested: str | None = None,
) -> tuple[CacheBackend, dict[str, str]]:
    """Return the backend of one KV-cache group's layers, and why better backends cannot run them.

    Arguments and exceptions as in `select_backend`.
    """
    first = layers[0]
    if isinstance(first, BringsBackend):
        return first.make_backend(device), {}
    attention = [layer for layer in layers if isinstance(layer, LayerAttention)]
    assert len(attention) == len(layers), f"{first.name} is neither attention nor brings a backend"
    assert isinstance(spec, AttentionSpec), f"{first.name} is attention without an attention spec"
    backend, refusals = select_backend(
        *attention,
        dtype=TORCH_DTYPES[spec.dtype],
        device=device,
        block_size=spec.block_size,
        candidates=candidates,
        requested=requested,
    )
    return backend(attention[0]), refusals
