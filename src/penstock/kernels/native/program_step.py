"""Inputs of a recorded program in one step. Suffix: R requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.native.attention import StepRequests
from penstock.kernels.paged_attention import VISIBLE_ENDS


@dataclass(frozen=True, slots=True)
class StepTokens:
    """A step's inputs, as library arguments.

    inputs: step inputs by name, contiguous, an element or a row per token. num_rows: tokens, padding included.
    num_tokens: actual tokens, which come first. groups: by KV-cache group.
    last: with a narrowed output, of each request's last token: the row (int64 [R], ascending), the position (int64
    [R]), the numbers 0 to R (int32), and the request's length (int32 [R]).
    """

    inputs: Mapping[str, Tensor]
    num_rows: int
    num_tokens: int
    groups: Sequence[StepRequests] = ()
    last: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    @property
    def num_outputs(self) -> int:
        """Number of rows of the output."""
        return self.num_rows if self.last is None else self.last[0].shape[0]

    def arguments(self, names: Sequence[str], num_threads: int) -> list[int]:
        """Library arguments of the step. names: of the inputs, by their numbers."""
        ends = self.inputs.get(VISIBLE_ENDS)
        return [
            self.num_rows,
            self.num_tokens,
            num_threads,
            *([0] * 5 if self.last is None else [*[tensor.data_ptr() for tensor in self.last], self.num_outputs]),
            len(names),
            *[self.inputs[name].data_ptr() for name in names],
            len(self.groups),
            *[argument for requests in self.groups for argument in requests.arguments],
            0 if ends is None else ends.data_ptr(),
        ]
