"""Creation of the device that the `device` option names."""

from __future__ import annotations

import torch

from penstock.config import DeviceConfig
from penstock.device.base import Device
from penstock.errors import ConfigError, UnsupportedFeature


def create_device(
    config: DeviceConfig, local_rank: int = 0, num_local_ranks: int = 1, *, batch_invariant: bool = False
) -> Device:
    """Create the configured device, for this rank of those on this machine, which share a CPU.

    batch_invariant: as in `ModelConfig`. Raises as `gpu_of_rank`, and ConfigError for options that the device lacks.
    """
    gpu = gpu_of_rank(config, local_rank, num_local_ranks)
    if gpu is not None:
        from penstock.device.cuda import INVARIANT_BACKENDS, CudaDevice

        if batch_invariant and config.attention_backend not in (None, *INVARIANT_BACKENDS):
            raise ConfigError(
                f"attention_backend={config.attention_backend!r} is not valid with batch_invariant=True on a GPU. "
                f"Allowed: {', '.join(INVARIANT_BACKENDS)}; or leave it out."
            )
        return CudaDevice(gpu.index or 0, config.float32_matmul_precision, batch_invariant=batch_invariant)
    if config.float32_matmul_precision != "highest":
        raise ConfigError(
            f"float32_matmul_precision={config.float32_matmul_precision!r} is for a GPU, and this engine runs on the "
            "CPU, whose products are exact float32. Leave it out."
        )
    from penstock.device.cpu import CpuDevice

    return CpuDevice(config.num_threads, local_rank, num_local_ranks)


def gpu_of_rank(config: DeviceConfig, local_rank: int = 0, num_local_ranks: int = 1) -> torch.device | None:
    """Return this rank's GPU; None for the CPU.

    Raises UnsupportedFeature without a GPU, ConfigError with fewer GPUs than ranks.
    """
    has_cuda = torch.cuda.is_available()
    if config.device == "cpu" or (config.device == "auto" and not has_cuda):
        return None
    if not has_cuda:
        raise UnsupportedFeature(
            f"device='cuda' is not available: torch {torch.__version__} sees no CUDA device. "
            "Use device='cpu', or install a CUDA build of torch on a machine with a GPU."
        )
    num_visible = torch.cuda.device_count()
    if local_rank >= num_visible:
        raise ConfigError(
            f"Rank {local_rank} of the {num_local_ranks} on this machine needs CUDA device {local_rank}, and this "
            f"process sees {num_visible}. Use fewer ranks, or show it more devices (CUDA_VISIBLE_DEVICES)."
        )
    return torch.device("cuda", local_rank)
