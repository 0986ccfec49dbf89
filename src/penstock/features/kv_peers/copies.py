"""Blocks that waiting requests would hit and other engines have: they come to the folder first."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from penstock.config.kv_tiers import KVTierConfig
from penstock.contract import RpcCall
from penstock.scheduler.request import Request
from penstock.scheduler.services import SchedulerServices

if TYPE_CHECKING:
    from penstock.features.kv_peers.peers import Peers, PeerServer, Source

# Reason for which a request waits.
PEER = "blocks of another engine"


class Folder(Protocol):
    """The folder of this engine, as its scheduler's side knows it."""

    def paths_missing(self, request: Request) -> list[str]:
        """Paths of a request's blocks that neither the KV cache nor the folder has, of all ranks."""

    def paths_of_hit(self, request: Request, others: Collection[str]) -> list[str]:
        """Paths that the request's hit would have, if these others were in the folder too."""

    def note_copied(self, num_bytes: int) -> None:
        """Note bytes that have come."""

    def names_to_come(self) -> set[str]:
        """Names of the files that are about to be written; called by another thread."""


class Copies:
    """Copies of other engines' blocks: peers are asked once per request, which waits until its blocks have come.

    Raises ConfigError where the engine cannot listen at its address.
    """

    def __init__(self, services: SchedulerServices, folder: Folder) -> None:
        self._services, self._folder = services, folder
        tiers = services.config.kv_tiers
        assert tiers.folder is not None, "the feature is on"
        self._root: Path = tiers.folder
        # Preemptions of requests for which peers were asked.
        self._asked: dict[str, int] = {}
        # Requests for which blocks have come.
        self._served: set[str] = set()
        self._peers = self._connect(tiers) if tiers.kv_peers else None
        self._server = self._listen(tiers) if tiers.kv_listen is not None else None

    def begin(self, request: Request) -> bool:
        """Ask peers for the blocks of a waiting request; False if there is nothing to wait for."""
        peers = self._peers
        if peers is None or self._asked.get(request.req_id) == request.num_preemptions:
            return False
        self._asked[request.req_id] = request.num_preemptions
        if request.needs_all_of_prompt or not peers.can_be_asked:
            return False
        names = self._names(self._folder.paths_missing(request))
        if not names:
            return False
        peers.find(names, lambda source, there: self._soon(lambda: self._copy(request, source, there)))
        return True

    def has_served(self, request: Request) -> bool:
        """Whether blocks have come for a request."""
        return request.req_id in self._served

    def request_ended(self, request: Request) -> None:
        self._asked.pop(request.req_id, None)
        self._served.discard(request.req_id)

    def close(self) -> None:
        for side in (self._server, self._peers):
            if side is not None:
                side.close()

    def _copy(self, request: Request, source: Source, there: Collection[str]) -> None:
        """Copy what the request's hit would have of a peer's blocks."""
        names: list[str] = []
        if there and self._services.scheduler.holds(request.req_id):
            others = {str(self._root / name) for name in there}
            names = self._names(path for path in self._folder.paths_of_hit(request, others) if path in others)
        if not names:
            self._services.scheduler.ready(request.req_id, PEER)
            return
        assert self._peers is not None
        self._peers.copy(source, names, lambda num_bytes: self._soon(lambda: self._end_copy(request, num_bytes)))

    def _end_copy(self, request: Request, num_bytes: int) -> None:
        self._folder.note_copied(num_bytes)
        if num_bytes and self._services.scheduler.holds(request.req_id):
            self._served.add(request.req_id)
        self._services.scheduler.ready(request.req_id, PEER)

    def _names(self, paths: Iterable[str]) -> list[str]:
        return [os.path.relpath(path, self._root) for path in paths]

    def _soon(self, function: Callable[[], None]) -> None:
        self._services.call_soon(function)

    def _connect(self, tiers: KVTierConfig) -> Peers:
        from penstock.features.kv_peers.peers import Peers

        takes_other_ranks = tiers.kv_peers_other_ranks
        if takes_other_ranks:
            # Refuses a model whose blocks are no shares of heads.
            self._services.call_workers(RpcCall("kv_tier_folder"))
        return Peers(self._root, tiers.kv_peers, tiers.read_secret(), takes_other_ranks=takes_other_ranks)

    def _listen(self, tiers: KVTierConfig) -> PeerServer | None:
        """Answer other engines. Of engines beside each other, which have one folder, the first one does."""
        from penstock.features.kv_peers.peers import AddressTaken, PeerServer, serves_folder

        assert tiers.kv_listen is not None
        secret = tiers.read_secret()
        try:
            return PeerServer(self._root, tiers.kv_listen, secret, self._folder.names_to_come)
        except AddressTaken:
            is_alone = self._services.config.parallel.data_parallel_size == 1
            if is_alone or not serves_folder(self._root, tiers.kv_listen, secret):
                raise
            return None
