"""From the `device` option to a device."""

from __future__ import annotations

import torch

from penstock.config import DeviceConfig
from penstock.device.base import Device
from penstock.errors import UnsupportedFeature


def create_device(config: DeviceConfig, local_rank: int = 0, num_local_ranks: int = 1) -> Device:
    """The device that the options ask for, or this rank's of those on this machine, which share a CPU.

    Raises UnsupportedFeature when it is not there.
    """
    has_cuda = torch.cuda.is_available()
    kind = config.device
    if kind == "auto":
        kind = "cuda" if has_cuda else "cpu"
    if kind == "cuda":
        if not has_cuda:
            raise UnsupportedFeature(
                f"device='cuda' is not available: torch {torch.__version__} sees no CUDA device. "
                "Use device='cpu', or install a CUDA build of torch on a machine with a GPU."
            )
        from penstock.device.cuda import CudaDevice

        return CudaDevice(local_rank)
    from penstock.device.cpu import CpuDevice

    return CpuDevice(config.num_threads, local_rank, num_local_ranks)
