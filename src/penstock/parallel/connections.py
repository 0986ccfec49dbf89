"""Connections between ranks on several machines, over gloo, without torch's global process group."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

from penstock.errors import PenstockError, RanksDisagree, UnsupportedFeature, WaitTimeout, WorkerError, same_error
from penstock.parallel.blocking_ranks import FailedWait, find_missing
from penstock.system import env

# Tensors by rank.
ByRank: TypeAlias = Mapping[int, Tensor]
# Timeout for all ranks to join.
JOIN_TIMEOUT_S = 300.0
_POLL_S = 0.02
# Grace period for the failed waits of other ranks, as a share of the timeout, within limits. It ends before the step
# times out.
_GRACE_SHARE, _LEAST_GRACE_S, _MOST_GRACE_S = 0.1, 0.25, 2.0
# Text of gloo's timeout errors: gloo has one type for all errors.
_TIMED_OUT = "timed out"


class RankConnections:
    """Connections of one rank to all others.

    store: a store of these ranks alone. address: this machine's address for the other ranks. timeout_s: timeout of a
    message.

    A lost rank raises WorkerError at once, a hanging one WaitTimeout, and ranks in different calls RanksDisagree; all
    errors name the rank, the call and the step. After any of them every call raises RanksDisagree, since messages may
    be incomplete.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        address: str,
        timeout_s: float,
        join_timeout_s: float = JOIN_TIMEOUT_S,
    ) -> None:
        self.rank, self.size, self.store = rank, size, store
        # Step in flight, for errors.
        self.step_id: int | None = None
        # Whether this rank waits for others now; read by other threads.
        self.is_waiting = False
        self._timeout_s = timeout_s
        self._failure: PenstockError | None = None
        self._closes_with_it: list[Callable[[], None]] = []
        wait_for_all(store, rank, size, join_timeout_s)
        options = gloo_options(address, join_timeout_s)
        self._gloo: ProcessGroupGloo | None = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)

    def exchange(self, call: str, tag: int, sent: ByRank, received: ByRank) -> None:
        """Send a tensor to each rank of `sent` and receive one from each of `received`; all are contiguous.

        tag: fewer than 31 bits, equal on both sides, different for all messages in flight and for messages of different
        sizes, for which gloo ends the process.
        """
        sendings = [(rank, self.start_sending(call, tag, tensor, rank)) for rank, tensor in sent.items()]
        receivings = [(rank, self.start_receiving(call, tag, tensor, rank)) for rank, tensor in received.items()]
        deadline = time.monotonic() + self._timeout_s
        for rank, work in (*receivings, *sendings):
            self.finish(call, work, rank, deadline, also=list(received))

    def start_sending(self, call: str, tag: int, tensor: Tensor, rank: int) -> Work | None:
        """Start a send; `finish` must follow, and the tensor must not change until then."""
        return self._start(call, "send", tag, tensor, rank)

    def start_receiving(self, call: str, tag: int, tensor: Tensor, rank: int) -> Work | None:
        """Start a receive; `finish` must follow, and the tensor is filled by then."""
        return self._start(call, "recv", tag, tensor, rank)

    def finish(
        self, call: str, work: Work | None, rank: int, deadline: float | None = None, also: Sequence[int] = ()
    ) -> None:
        """Wait for a send or receive. deadline: in `time.monotonic`'s seconds; None is one timeout from now.

        also: other ranks of the same exchange, for errors.
        """
        if work is None:
            return
        left_s = self._timeout_s if deadline is None else max(0.001, deadline - time.monotonic())
        self.is_waiting = True
        try:
            work.wait(timedelta(seconds=left_s))
        except RuntimeError as error:
            self._fail(call, rank, also, error)
        finally:
            self.is_waiting = False

    def close(self) -> None:
        """Close all connections, which ends the waits of other ranks for this one."""
        gloo, self._gloo = self._gloo, None
        if gloo is not None:
            for close in self._closes_with_it:
                close()
            gloo.abort()

    def on_close(self, close: Callable[[], None]) -> None:
        """Register a function that `close` calls first."""
        self._closes_with_it.append(close)

    def _start(self, call: str, what: str, tag: int, tensor: Tensor, rank: int) -> Work | None:
        if self._failure is not None:
            raise RanksDisagree(f"Rank {self.rank} cannot go on in {self._named(call)}, after this: {self._failure}")
        if self._gloo is None:
            raise RanksDisagree(f"Rank {self.rank} cannot go on in {self._named(call)}: its connections were closed.")
        # Meta tensors only measure a step's memory.
        if tensor.numel() == 0 or tensor.is_meta:
            return None
        try:
            work: Work = getattr(self._gloo, what)([tensor], rank, tag)
        except RuntimeError as error:
            self._fail(call, rank, (), error)
        return work

    def _fail(self, call: str, rank: int, also: Sequence[int], error: RuntimeError) -> NoReturn:
        """Raise the error of a failed wait, with the rank that blocks the others."""
        grace_s = min(_MOST_GRACE_S, max(_LEAST_GRACE_S, _GRACE_SHARE * self._timeout_s))
        has_lost = _TIMED_OUT not in str(error).lower()
        own = FailedWait(self.rank, call, [rank] if has_lost else sorted({rank, *also}), has_lost)
        missing, others = find_missing(self.store, own, grace_s)
        reports = "".join(f" Rank {other.rank} has found out in {other.call}." for other in others)
        who = f"rank {', '.join(map(str, missing))}"
        if not missing:
            self._failure = RanksDisagree(
                f"Rank {self.rank} is in {self._named(call)}, while "
                f"{', '.join(f'rank {other.rank} is in {other.call}' for other in others)}: none can go on. Every "
                "rank must make the same calls in the same order, with tensors of the same size."
            )
        elif all(other.has_lost for other in others) and has_lost:
            self._failure = WorkerError(
                f"Rank {self.rank} lost {who} in {self._named(call)}: {shortened(error)}.{reports}",
                method=call,
                rank=missing[0],
                cause_type="ConnectionLost",
            )
        else:
            self._failure = WaitTimeout(
                f"Rank {self.rank} waited {self._timeout_s:g} s in {self._named(call)} for {who}, which hangs or is "
                f"gone.{reports}"
            )
        raise same_error(self._failure) from error

    def _named(self, call: str) -> str:
        return call if self.step_id is None else f"{call}, step {self.step_id}"


def open_store(host: str, port: int, *, is_host: bool, timeout_s: float = JOIN_TIMEOUT_S) -> TCPStore:
    """Open the store by which ranks find each other. is_host: whether this process hosts it, while it keeps the object.

    port: 0 lets the host choose; the store's `port` is the result. Raises WaitTimeout without a host.
    """
    try:
        return TCPStore(
            host,
            port,
            is_master=is_host,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise WaitTimeout(
            f"Process {os.getpid()} did not find the other ranks at {host}:{port} within {timeout_s:g} s: "
            f"{shortened(error)}"
        ) from error


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to a host. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def gloo_options(address: str, timeout_s: float) -> Any:
    """Return gloo options with the address to listen at. Raises UnsupportedFeature.

    torch has no public API for it: without options gloo takes the address of the machine's name.
    """
    interface = env.gloo_interface()
    try:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        device = {"hostname": address} if interface is None else {"interface": interface}
        options._devices = [ProcessGroupGloo.create_device(**device)]
        options._timeout = timedelta(seconds=timeout_s)
    except AttributeError as error:
        raise UnsupportedFeature(
            f"torch {torch.__version__} has no options of gloo as Penstock knows them ({error}), by which ranks of "
            "several machines say where they listen. Install a torch that has, such as 2.11 to 2.13, or use "
            "distributed_executor_backend='mp' on one machine."
        ) from error
    return options


def wait_for_all(store: Store, rank: int, size: int, timeout_s: float) -> None:
    """Barrier over the store. Raises WaitTimeout, with the missing ranks."""
    store.set(f"here/{rank}", "")
    deadline = time.monotonic() + timeout_s
    while late := _absent(store, range(size)):
        if time.monotonic() > deadline:
            raise WaitTimeout(
                f"Rank {rank} waited {timeout_s:g} s at its start for rank {', '.join(map(str, late))}, of {size}."
            )
        time.sleep(_POLL_S)


def _absent(store: Store, ranks: Iterable[int]) -> list[int]:
    return [rank for rank in ranks if not store.check([f"here/{rank}"])]


def shortened(error: RuntimeError) -> str:
    """Return gloo's error text without its source location and advice."""
    text = str(error).splitlines()[0]
    return text.rpartition("] ")[2].partition(". This is typically")[0] if text.startswith("[") else text
