"""Connections between ranks that are processes of any machines, by gloo, without torch's global process group."""

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

from penstock.config import env
from penstock.errors import PenstockError, RanksDisagree, UnsupportedFeature, WaitTimeout, WorkerError, same_error
from penstock.parallel.blocking_ranks import VainWait, find_missing

# Tensors by rank.
ByRank: TypeAlias = Mapping[int, Tensor]
# How long ranks that are started together may differ in when they come.
JOIN_TIMEOUT_S = 300.0
_POLL_S = 0.02
# How long ranks that wait in vain may differ in when they find out: a share of how long they wait, within limits. They
# say it before whoever waits for them all loses patience.
_GRACE_SHARE, _LEAST_GRACE_S, _MOST_GRACE_S = 0.1, 0.25, 2.0
# What gloo says at the end of a wait, whatever else it may raise: it has one type for all errors.
_TIMED_OUT = "timed out"


class RankConnections:
    """One rank's connections to all others.

    store: that all ranks have, and nobody else. address: of this machine, by which the others reach it. timeout_s: how
    long a message is waited for.

    A rank that is gone is WorkerError at once, one that is silent WaitTimeout, and ranks that wait for each other are
    RanksDisagree; all name whom, the call and the step. Nothing can be said after any of them, since messages may be
    half said: RanksDisagree too.
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
        # The step that runs, for messages.
        self.step_id: int | None = None
        # For others at this moment, as whoever looks from another thread sees it.
        self.is_waiting = False
        self._timeout_s = timeout_s
        self._failure: PenstockError | None = None
        self._closes_with_it: list[Callable[[], None]] = []
        _wait_for_all(store, rank, size, join_timeout_s)
        options = _gloo_options(address, join_timeout_s)
        self._gloo: ProcessGroupGloo | None = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)

    def exchange(self, call: str, tag: int, given: ByRank, received: ByRank) -> None:
        """Send others what is given for them, and fill what is to come from them; all tensors are contiguous.

        tag: of less than 31 bits, the same on both sides of a message and on no other that may be on its way, and never
        the same for messages of different sizes: gloo ends the process for those.
        """
        sendings = [(rank, self.start_sending(call, tag, tensor, rank)) for rank, tensor in given.items()]
        receivings = [(rank, self.start_receiving(call, tag, tensor, rank)) for rank, tensor in received.items()]
        deadline = time.monotonic() + self._timeout_s
        for rank, work in (*receivings, *sendings):
            self.finish(call, work, rank, deadline, also=list(received))

    def start_sending(self, call: str, tag: int, tensor: Tensor, rank: int) -> Work | None:
        """`finish` must follow; the tensor stays as it is until then."""
        return self._start(call, "send", tag, tensor, rank)

    def start_receiving(self, call: str, tag: int, tensor: Tensor, rank: int) -> Work | None:
        """`finish` must follow; the tensor is filled until then."""
        return self._start(call, "recv", tag, tensor, rank)

    def finish(
        self, call: str, work: Work | None, rank: int, deadline: float | None = None, also: Sequence[int] = ()
    ) -> None:
        """Wait for what was started. deadline: of `time.monotonic`; None is one timeout from now.

        also: other ranks that have had as long to come.
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
        """End all connections; whoever waits for this rank is told."""
        gloo, self._gloo = self._gloo, None
        if gloo is not None:
            for close in self._closes_with_it:
                close()
            gloo.abort()

    def on_close(self, close: Callable[[], None]) -> None:
        """Call this too."""
        self._closes_with_it.append(close)

    def _start(self, call: str, what: str, tag: int, tensor: Tensor, rank: int) -> Work | None:
        if self._failure is not None:
            raise RanksDisagree(f"Rank {self.rank} cannot go on in {self._named(call)}, after this: {self._failure}")
        if self._gloo is None:
            raise RanksDisagree(f"Rank {self.rank} cannot go on in {self._named(call)}: its connections were closed.")
        # Without memory there is nothing to say: all ranks only see what their steps would take.
        if tensor.numel() == 0 or tensor.is_meta:
            return None
        try:
            work: Work = getattr(self._gloo, what)([tensor], rank, tag)
        except RuntimeError as error:
            self._fail(call, rank, (), error)
        return work

    def _fail(self, call: str, rank: int, also: Sequence[int], error: RuntimeError) -> NoReturn:
        """Raise what is the matter: with this rank, with the others that are waited for, or whoever those wait for."""
        grace_s = min(_MOST_GRACE_S, max(_LEAST_GRACE_S, _GRACE_SHARE * self._timeout_s))
        has_lost = _TIMED_OUT not in str(error).lower()
        own = VainWait(self.rank, call, [rank] if has_lost else sorted({rank, *also}), has_lost)
        missing, others = find_missing(self.store, own, grace_s)
        told = "".join(f" Rank {other.rank} has found out in {other.call}." for other in others)
        who = f"rank {', '.join(map(str, missing))}"
        if not missing:
            self._failure = RanksDisagree(
                f"Rank {self.rank} is in {self._named(call)}, while "
                f"{', '.join(f'rank {other.rank} is in {other.call}' for other in others)}: all wait in vain. Every "
                "rank must make the same calls in the same order, with tensors of the same size."
            )
        elif all(other.has_lost for other in others) and has_lost:
            self._failure = WorkerError(
                f"Rank {self.rank} lost {who} in {self._named(call)}: {_shortened(error)}.{told}",
                method=call,
                rank=missing[0],
                cause_type="ConnectionLost",
            )
        else:
            self._failure = WaitTimeout(
                f"Rank {self.rank} waited {self._timeout_s:g} s in {self._named(call)} for {who}, which hangs or is "
                f"gone.{told}"
            )
        raise same_error(self._failure) from error

    def _named(self, call: str) -> str:
        return call if self.step_id is None else f"{call}, step {self.step_id}"


def open_store(host: str, port: int, *, is_host: bool, timeout_s: float = JOIN_TIMEOUT_S) -> TCPStore:
    """What ranks find each other by. is_host: whether this process keeps it, for as long as it holds it.

    port: 0 lets the host choose; its `port` is what it has chosen. Raises WaitTimeout where nobody keeps it.
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
            f"{_shortened(error)}"
        ) from error


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to another, or to itself by that name. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _gloo_options(address: str, timeout_s: float) -> Any:
    """For a group that listens at this address. Raises UnsupportedFeature.

    torch has no public name for it: without options gloo takes the address that the machine's name has.
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


def _wait_for_all(store: Store, rank: int, size: int, timeout_s: float) -> None:
    """Raise WaitTimeout, with the ranks that have not come."""
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


def _shortened(error: RuntimeError) -> str:
    """gloo's words without the place in its source, and without its advice."""
    text = str(error).splitlines()[0]
    return text.rpartition("] ")[2].partition(". This is typically")[0] if text.startswith("[") else text
