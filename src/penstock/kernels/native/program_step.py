"""What a recorded program is run with: the step's tokens, and where its results go.

Suffixes: T tokens of the step, R requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.native.attention import StepRequests
from penstock.kernels.native.stored import StoredArguments
from penstock.kernels.sampling import ChosenTokens


@dataclass(frozen=True, slots=True)
class LastRows:
    """The last token of every request. rows, positions: int64 [R], rising rows. query_start_loc: int32, 0 to R."""

    rows: Tensor
    positions: Tensor
    query_start_loc: Tensor

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """As the library takes it."""
        addresses = self.rows.data_ptr(), self.positions.data_ptr(), self.query_start_loc.data_ptr()
        return *addresses, self.rows.shape[0]


# What `LastRows.arguments` are where the hidden states of all tokens are asked for.
_ALL_ROWS = (0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Where a step's tokens are.

    positions_T: int64, contiguous. num_tokens: those that are no padding, which come first. groups: by KV-cache group.
    last: the only rows whose output is asked for.
    """

    positions_T: Tensor
    num_tokens: int
    groups: Sequence[StepRequests]
    last: LastRows | None = None

    def arguments(self, num_threads: int) -> list[int]:
        """As the library takes it."""
        return [
            self.positions_T.data_ptr(),
            self.positions_T.shape[0],
            self.num_tokens,
            num_threads,
            *(_ALL_ROWS if self.last is None else self.last.arguments),
            len(self.groups),
            *[argument for requests in self.groups for argument in requests.arguments],
        ]


class BoundChoices:
    """A program that takes tokens to tokens, with all that it reads and writes: it runs again without being told more.

    Every run writes the choices after all tokens anew.
    """

    def __init__(
        self,
        run: Callable[[int], None],
        arguments: StoredArguments,
        chosen: ChosenTokens,
        keeps_alive: tuple[object, ...],
    ) -> None:
        self._run = run
        self._address = arguments.address
        self._chosen = chosen
        self._keeps_alive = (arguments, *keeps_alive)

    def run(self) -> ChosenTokens:
        """One step, from what the step's tensors hold by then. The next one overwrites the result."""
        self._run(self._address)
        return self._chosen
