"""Collectives and point-to-point channels of processes of one machine, in shared memory: `csrc/collectives.h`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from penstock.errors import RanksDisagree, WaitTimeout
from penstock.kernels.native.operation_types import operation_types
from penstock.kernels.native.tracing import TracedTensor

# As the library tells it.
_FAILED_BEFORE = -(1 << 63)
# Kernels that every processor runs, for an operation that is the same in all of them.
_GENERIC = 2


class CollectiveKind(IntEnum):
    """Kinds of collectives, as numbered by the library. The source rank is added to BROADCAST."""

    GATHER = 0
    SUM = 1
    SUM_SCATTERED = 2
    MERGE_PARTS = 3
    BROADCAST = 4


class Collectives:
    """The library's functions for one rank of a group.

    address: of the shared memory, which begins with zeros. slot_bytes: what a rank gives at a time; a multiple of 8.
    timeout_s: how long others are waited for. spin_us: how long a rank that waits keeps its processor before it sleeps.
    arguments: the same as the library takes them. step_id: that they are at, for messages, if it is known.
    """

    def __init__(
        self, module: Any, address: int, rank: int, size: int, *, slot_bytes: int, timeout_s: float, spin_us: int
    ) -> None:
        self._module = module
        self._address, self._rank, self._size, self._timeout_s = address, rank, size, timeout_s
        self.arguments = (address, rank, size, slot_bytes, int(timeout_s * 1e6), spin_us)
        self.step_id: int | None = None
        self._failed_in = ""
        self._merge_choices = operation_types(module)["merge_choices"].number

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors, in place: float32, contiguous. Raises as `fail`."""
        if isinstance(tensor, TracedTensor):
            return tensor.origin.all_reduce(tensor, self)
        self.run("all_reduce", CollectiveKind.SUM, tensor, 1, tensor)
        return tensor

    def merge_choices(self, values_L: Tensor, token_ids_L: Tensor, first_token: int) -> tuple[Tensor, Tensor]:
        """The greedy choice of all ranks, int64 [L], and whether a row has none, bool [L]. Raises as `fail`.

        values_L: float32, each rank's largest logits. token_ids_L: int64, theirs among this rank's tokens, the first of
        which is `first_token` of the vocabulary; overwritten. All are contiguous.
        """
        if isinstance(values_L, TracedTensor):
            return values_L.origin.merge_choices(values_L, first_token, self)
        num_rows = values_L.shape[0]
        failed_L = torch.empty(num_rows, dtype=torch.bool)
        arguments = values_L, 1, token_ids_L, failed_L, *self.arguments, first_token
        status = self._module.operation(self._merge_choices, _GENERIC, num_rows, 1, *arguments)
        if status:
            self.fail("merge_choices", values_L.dtype, values_L.shape, status)
        return token_ids_L, failed_L

    def run(self, name: str, kind: int, given: Tensor, rows: int, result: Tensor) -> None:
        """Exchange bytes with all other ranks, which make the same call. given, result: contiguous. Raises as `fail`.

        name: of the call, for messages.
        """
        status: int = self._module.run_collective(*self.arguments, kind, given, given.nbytes, rows, result)
        if status:
            self.fail(name, given.dtype, given.shape, status)

    def fail(self, name: str, dtype: torch.dtype, shape: Sequence[int], status: int) -> None:
        """Raise the error for a status: WaitTimeout for a rank that did not come, RanksDisagree for one
        that made another call, or where the group is of no use any more after one of these.
        """
        if status == _FAILED_BEFORE:
            raise RanksDisagree(f"Rank {self._rank} cannot go on in {name}, since {self._failed_in} failed before.")
        num_calls = self._module.collective_calls(self._address, self._rank)
        step = "" if self.step_id is None else f", step {self.step_id}"
        call = self._failed_in = f"{name} (call {num_calls} of its group of {self._size}{step})"
        if status > 0:
            raise WaitTimeout(
                f"Rank {self._rank} waited {self._timeout_s:g} s in {call} for rank {status - 1}, "
                "which hangs or is gone."
            )
        raise RanksDisagree(
            f"Rank {self._rank} is in {call} with {dtype} {list(shape)}, while rank {-1 - status} makes "
            "another call. Every rank must make the same calls in the same order, with tensors of the same size."
        )


class Channels:
    """What one rank sends to another, which waits for it: the same shared memory for both.

    address: of `size` x `size` boxes, a row for each who sends, which begin with zeros. The rest as in `Collectives`.
    """

    def __init__(self, module: Any, address: int, rank: int, size: int, *, timeout_s: float, spin_us: int) -> None:
        self._module = module
        self._address, self._rank, self._size = address, rank, size
        self._timeout_s, self._spin_us = timeout_s, spin_us
        self._failed_in: str | None = None

    def send(self, tensor: Tensor, destination: int) -> None:
        """tensor: contiguous. Raises WaitTimeout where nobody makes room, RanksDisagree after a failure."""
        status = self._call(self._module.channel_send, "send", self._rank, destination, tensor)
        if status:
            self._fail(f"send to rank {destination}", destination, tensor, status)

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fill this tensor, contiguous. Raises WaitTimeout where nothing comes, RanksDisagree for another size."""
        status = self._call(self._module.channel_receive, "receive", source, self._rank, tensor)
        if status:
            self._fail(f"receive from rank {source}", source, tensor, status)

    def _call(self, function: Any, name: str, source: int, destination: int, tensor: Tensor) -> int:
        if self._failed_in is not None:
            raise RanksDisagree(f"Rank {self._rank} cannot go on in {name}, since {self._failed_in} failed before.")
        box = self._address + (source * self._size + destination) * int(self._module.channel_bytes())
        timeout_us = int(self._timeout_s * 1e6)
        status: int = function(box, tensor, tensor.nbytes, timeout_us, self._spin_us)
        return status

    def _fail(self, call: str, other: int, tensor: Tensor, status: int) -> None:
        call = self._failed_in = f"{call} of its group of {self._size}"
        if status > 0:
            raise WaitTimeout(
                f"Rank {self._rank} waited {self._timeout_s:g} s in {call} for rank {other}, which hangs or is gone."
            )
        raise RanksDisagree(
            f"Rank {self._rank} is in {call} with {tensor.dtype} {list(tensor.shape)}, while rank {other} makes "
            "another call. What is sent must have the size of what is received."
        )
