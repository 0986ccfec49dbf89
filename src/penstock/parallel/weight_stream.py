"""Stream of weights from a trainer to the workers of an engine, in buckets, over a group apart from the engine's own.

Both sides know the dtypes and shapes of the tensors, in their order, before the first one is sent. Each bucket is one
broadcast of the tensors' bytes behind one of its header, by which a receiver notices tensors that are not as announced.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError, WeightTransferFailed
from penstock.parallel.connections import JOIN_TIMEOUT_S
from penstock.parallel.stateless_group import PyNcclCommunicator, StatelessProcessGroup

# Bytes of a bucket of several tensors; a larger tensor is a bucket of its own.
BUCKET_BYTES = 64 << 20
_TRAINER = 0


def join(
    init_info: Mapping[str, Any], rank: int, device: torch.device | str, timeout_s: float = JOIN_TIMEOUT_S
) -> PyNcclCommunicator:
    """Join the group of a trainer, rank 0, and workers; returns when all ranks are there.

    init_info: master_address, master_port, world_size. Raises ConfigError for a field that is missing or not valid,
    WaitTimeout where ranks do not come.
    """
    try:
        host, port = str(init_info["master_address"]), int(init_info["master_port"])
        world_size = int(init_info["world_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"init_info={dict(init_info)} is not valid ({error}). Needed: master_address, master_port, rank_offset, "
            "world_size."
        ) from error
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"world_size={world_size} of init_info is too small for rank {rank}. It counts the trainer and all workers."
        )
    group = StatelessProcessGroup.create(host, port, rank, world_size, store_timeout=timeout_s)
    return PyNcclCommunicator(group, device)


def send(communicator: PyNcclCommunicator, tensors: Iterable[Tensor], *, packed: bool = True) -> None:
    """Send tensors to all workers, which call `receive` with the same `packed`. packed: several tensors per bucket."""
    for bucket in _buckets(tensors, packed=packed):
        header = _header(bucket).to(communicator.device)
        communicator.broadcast(header, _TRAINER)
        data = [_bytes_of(tensor.to(communicator.device)) for tensor in bucket]
        communicator.broadcast(data[0] if len(data) == 1 else torch.cat(data), _TRAINER)


def receive(
    communicator: PyNcclCommunicator,
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[Sequence[int]],
    *,
    packed: bool = True,
) -> Iterator[Tensor]:
    """Tensors that the trainer sends, in order. They are valid until the next one is asked for.

    Raises WeightTransferFailed where the trainer sends other tensors than announced, or is gone; the group is closed
    then.
    """
    pairs = zip(dtypes, shapes, strict=True)
    announced = (torch.empty(tuple(shape), dtype=dtype, device="meta") for dtype, shape in pairs)
    for bucket in _buckets(announced, packed=packed):
        expected = _header(bucket).to(communicator.device)
        header = torch.empty_like(expected)
        communicator.broadcast(header, _TRAINER)
        if not torch.equal(header, expected):
            communicator.close()
            described = ", ".join(f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}" for one in bucket[:3])
            described += ", …" if len(bucket) > 3 else ""
            raise WeightTransferFailed(
                f"The trainer sends {int(header[0]):,} bytes with the checksum {int(header[1])}, instead of "
                f"{int(expected[0]):,} bytes with {int(expected[1])}: tensors of {described}. It "
                "must send the announced tensors in their order."
            )
        data = torch.empty(int(expected[0]), dtype=torch.uint8, device=communicator.device)
        communicator.broadcast(data, _TRAINER)
        for one, part in zip(bucket, data.split([one.nbytes for one in bucket]), strict=True):
            # A part may begin where its dtype's elements must not.
            whole = part if part.data_ptr() % max(1, one.element_size()) == 0 else part.clone()
            yield whole.view(one.dtype).view(one.shape)


def _buckets(tensors: Iterable[Tensor], *, packed: bool) -> Iterator[list[Tensor]]:
    """Tensors that are sent together: both sides form the same buckets."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if not tensor.numel():
            raise ConfigError(f"A tensor of the shape {list(tensor.shape)} has no elements, and cannot be sent.")
        if bucket and (not packed or size + tensor.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def _header(bucket: Sequence[Tensor]) -> Tensor:
    """Bytes of a bucket, and a checksum of its dtypes and shapes."""
    described = "; ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in bucket)
    return torch.tensor([sum(tensor.nbytes for tensor in bucket), zlib.crc32(described.encode())])


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
