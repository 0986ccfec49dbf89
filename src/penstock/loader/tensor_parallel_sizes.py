"""Possible tensor-parallel sizes of a model, found by building it for each on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from penstock.errors import UnsupportedFeature
from penstock.parallel import ONE_RANK, ParallelState
from penstock.parallel.group import OneRank
from penstock.parallel.share import Indivisible

_LARGEST_TRIED = 64


class UnjoinedGroup(OneRank):
    """Rank of a group without other ranks, to build layers for; collectives cannot run."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self.size, self.rank = size, rank


class _TriedGroup(UnjoinedGroup):
    """Group of a size tried after another was refused."""


@contextmanager
def naming_sizes(parallel: ParallelState, build: Callable[[ParallelState], object]) -> Iterator[None]:
    """Add the smaller possible sizes to the refusal of this tensor-parallel size.

    Raises UnsupportedFeature in place of Indivisible.
    """
    try:
        yield
    except Indivisible as error:
        if isinstance(parallel.tensor, _TriedGroup):
            raise
        size = parallel.tensor.size
        accepted = [tried for tried in range(1, min(size, _LARGEST_TRIED + 1)) if _accepts(build, parallel, tried)]
        raise UnsupportedFeature(
            f"tensor_parallel_size={size} is not possible for this model: {error} "
            f"Smaller sizes that all of its layers accept: {', '.join(map(str, accepted))}."
        ) from error


def _accepts(build: Callable[[ParallelState], object], parallel: ParallelState, size: int) -> bool:
    try:
        build(replace(parallel, tensor=_TriedGroup(size), context=ONE_RANK))
    except UnsupportedFeature:
        return False
    return True
