"""Trainer's side of weight transfers.

    sender = GroupSender.join({"master_address": "127.0.0.1", "master_port": 29600, "world_size": 2})
    sender.send(model.named_parameters())

`update_info` of a sender is what `update_weights` of the engine takes, beside which the sender sends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.features.weight_transfer.backends import places_of
from penstock.parallel.connections import JOIN_TIMEOUT_S
from penstock.parallel.stateless_group import PyNcclCommunicator
from penstock.parallel.weight_stream import join, send

NamedTensors = Iterable[tuple[str, Tensor]]


def announced(tensors: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
    """Names, dtypes and shapes of tensors, for `update_weights`."""
    return {
        "names": [name for name, _ in tensors],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
        "shapes": [list(tensor.shape) for _, tensor in tensors],
    }


def trainer_init(
    init_info: Mapping[str, Any], device: torch.device | str | None = None, timeout_s: float = JOIN_TIMEOUT_S
) -> PyNcclCommunicator:
    """Join the group of `init_weight_transfer_engine` as the trainer; returns when all workers are there.

    device: of the trainer's tensors; None for the current CUDA device, or else the CPU.
    """
    if device is None:
        has_cuda = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")
    return join(init_info, 0, device, timeout_s)


def send_weights(group: PyNcclCommunicator, tensors: NamedTensors, packed: bool = True) -> None:
    """Send tensors to the workers, which receive the same by `update_weights`. packed: several per bucket."""
    send(group, (tensor for _, tensor in tensors), packed=packed)


def packed_nccl_broadcast_producer(
    iterator: Iterable[Any], group: PyNcclCommunicator, src: int, post_iter_func: Callable[[Any], Tensor], **_: Any
) -> None:
    """As `send_weights`, by vLLM's name. post_iter_func: tensor of an item of the iterator."""
    assert src == 0, "the trainer is rank 0"
    send(group, map(post_iter_func, iterator))


class GroupSender:
    """Sends weights over a group of the trainer and all workers (backends "gloo" and "nccl")."""

    def __init__(self, group: PyNcclCommunicator) -> None:
        self._group = group

    @classmethod
    def join(cls, init_info: Mapping[str, Any], device: torch.device | str = "cpu") -> GroupSender:
        """As `trainer_init`."""
        return cls(trainer_init(init_info, device))

    def update_info(self, tensors: NamedTensors) -> dict[str, Any]:
        """Announcement of the tensors, which the workers need before `send`."""
        return {**announced(list(tensors)), "packed": True}

    def send(self, tensors: NamedTensors) -> None:
        """Send the announced tensors, while the workers receive them."""
        send_weights(self._group, tensors)

    def close(self) -> None:
        """Leave the group."""
        self._group.close()


class SharedMemorySender:
    """Shares weights in a file in memory (backend "ipc"). path: such as one in /dev/shm; removed by `close`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def send(self, tensors: NamedTensors) -> dict[str, Any]:
        """Copy tensors into the memory, and return their `update_info`. They must stay there until they were taken."""
        given = list(tensors)
        places = places_of([tensor.nbytes for _, tensor in given])
        memory = torch.from_file(str(self._path), shared=True, size=places[-1], dtype=torch.uint8)
        for (_, tensor), begin in zip(given, places, strict=False):
            flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
            memory[begin : begin + len(flat)].copy_(flat)
        return {**announced(given), "path": str(self._path)}

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


class FileSender:
    """Writes weights into a safetensors file (backend "files")."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def send(self, tensors: NamedTensors) -> dict[str, Any]:
        """Write tensors, and return their `update_info`."""
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors}, self._path, {"format": "pt"})
        return {"paths": [str(self._path)]}
