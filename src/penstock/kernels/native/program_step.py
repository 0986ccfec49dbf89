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
class StepTokens:
    """Where a step's tokens are.

    positions_T: int64, contiguous. num_tokens: those that are no padding, which come first. groups: by KV-cache group.
    last: of each request's last token, where no other output is asked for, the row (int64 [R], rising), the position
    (int64 [R]), the numbers from 0 to R (int32), and the request's positions up to it (int32 [R]).
    """

    positions_T: Tensor
    num_tokens: int
    groups: Sequence[StepRequests]
    last: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    @property
    def num_outputs(self) -> int:
        """Rows of the output."""
        return (self.positions_T if self.last is None else self.last[0]).shape[0]

    def arguments(self, num_threads: int) -> list[int]:
        """As the library takes it."""
        return [
            self.positions_T.data_ptr(),
            self.positions_T.shape[0],
            self.num_tokens,
            num_threads,
            *([0] * 5 if self.last is None else [*[tensor.data_ptr() for tensor in self.last], self.num_outputs]),
            len(self.groups),
            *[argument for requests in self.groups for argument in requests.arguments],
        ]


class BoundChoices:
    """A program that takes tokens to tokens, with all that it reads and writes: it runs again without being told more.

    Every run writes the choices after all tokens anew, and `states`, what else is wanted: float32 [T, width] each.
    """

    def __init__(
        self,
        run: Callable[[int], None],
        arguments: StoredArguments,
        chosen: ChosenTokens,
        states: Sequence[Tensor],
        keeps_alive: tuple[object, ...],
    ) -> None:
        self._run = run
        self._address = arguments.address
        self._chosen = chosen
        self.states = states
        self._keeps_alive = (arguments, *keeps_alive)

    def run(self) -> ChosenTokens:
        """One step, from what the step's tensors hold by then. The next one overwrites the result."""
        self._run(self._address)
        return self._chosen
