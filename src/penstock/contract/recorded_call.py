"""Calls of features' worker sides in recordings: what of a call a file keeps, and how a replay repeats it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import ClassVar, Self

from penstock.contract.parts import Part
from penstock.contract.rpc import RpcCall


class RecordedCall(Part, frozen=True, kw_only=True):
    """Call that changes what later steps compute.

    methods: names of the worker methods whose calls are recorded. method: that of this call.
    """

    methods: ClassVar[Sequence[str]] = ()
    method: str

    @classmethod
    @abstractmethod
    def of(cls, call: RpcCall) -> Self:
        """Convert a call of one of the methods."""

    @property
    @abstractmethod
    def place(self) -> Hashable:
        """Place in the worker's state that the call sets. A recording begins with the last earlier call of each."""

    @property
    def empties_place(self) -> bool:
        """Whether workers that begin need no call for the place any more."""
        return False

    @property
    def is_whole(self) -> bool:
        """Whether a replay can repeat the call; False for one that is too large for a recording."""
        return True

    @abstractmethod
    def redacted(self) -> Self:
        """The call without a user's data."""

    @abstractmethod
    def repetition(self) -> RpcCall:
        """The call of workers that may be on another machine."""
