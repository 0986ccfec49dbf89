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

# Status of the library after an earlier failure.
_FAILED_BEFORE = -(1 << 63)
# Instruction set that every CPU supports, for operations that are the same in all of them.
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

    address: of the shared memory, initialised with zeros. slot_bytes: bytes that a rank exchanges at a time; a multiple
    of 8. timeout_s: timeout of waiting for other ranks. spin_us: time that a waiting rank spins before it sleeps.
    arguments: the library arguments of the group. step_id: the current step for error messages, if known.
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
        """All-reduce (sum), in place: float32, contiguous. Raises as `fail`."""
        if isinstance(tensor, TracedTensor):
            return tensor.origin.all_reduce(tensor, self)
        self.run("all_reduce", CollectiveKind.SUM, tensor, 1, tensor)
        return tensor

    def merge_choices(self, values_L: Tensor, token_ids_L: Tensor, first_token: int) -> tuple[Tensor, Tensor]:
        """Merge the greedy choices of all ranks: int64 [L], and whether a row has none, bool [L]. Raises as `fail`.

        values_L: float32, maxima of this rank's logits. token_ids_L: int64, their indices in this rank's vocabulary
        shard, which begins at `first_token`; overwritten. All are contiguous.
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
        """Run a collective of bytes; all ranks make the same call. given, result: contiguous. Raises as `fail`.

        name: of the call, for messages.
        """
        status: int = self._module.run_collective(*self.arguments, kind, given, given.nbytes, rows, result)
        if status:
            self.fail(name, given.dtype, given.shape, status)

    def fail(self, name: str, dtype: torch.dtype, shape: Sequence[int], status: int) -> None:
        """Raise the error of a status.

        WaitTimeout for a rank that did not arrive, RanksDisagree for a rank in another call or a group that has failed.
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
    """Point-to-point channels between ranks in shared memory.

    address: of `size` x `size` channels, a row per sender, initialised with zeros. The other arguments
    are those of `Collectives`.
    """

    def __init__(self, module: Any, address: int, rank: int, size: int, *, timeout_s: float, spin_us: int) -> None:
        self._module = module
        self._address, self._rank, self._size = address, rank, size
        self._timeout_s, self._spin_us = timeout_s, spin_us
        self._failed_in: str | None = None

    def send(self, tensor: Tensor, destination: int) -> None:
        """Send a contiguous tensor.

        Raises WaitTimeout for a receiver that is not there, RanksDisagree after a failure.
        """
        status = self._call(self._module.channel_send, "send", self._rank, destination, tensor)
        if status:
            self._fail(f"send to rank {destination}", destination, tensor, status)

    def receive(self, tensor: Tensor, source: int) -> None:
        """Receive into a contiguous tensor. Raises WaitTimeout without a sender, RanksDisagree for another size."""
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
