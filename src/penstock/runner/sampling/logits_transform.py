"""Interface of logits transforms: per-slot parameters, and one operation on the step's logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from torch import Tensor

from penstock.contract import NewRequestData, Part, Parts, SchedulerOutput
from penstock.kernels.bound_step import StepOutcome
from penstock.runner.sampling.verification import Verification
from penstock.step.logits_rows import LogitsRows


class LogitsTransform(ABC):
    """Holds its own parameters by slot and is skipped when no request of the step needs it.

    is_of_model: what it forbids is impossible by the model's own rules. Such a transform comes before all others, and
    raw logits are those after it.
    """

    is_of_model: ClassVar[bool] = False

    @abstractmethod
    def add_request(self, slot: int, request: NewRequestData) -> None:
        """Add a request, with its output before a preemption; the slot's previous state is overwritten.

        Raises InvalidParameter for values that cannot be served; the request ends with that error.
        """

    def remove_request(self, slot: int) -> None:
        """Remove the slot's request; the slot may be reused at once."""
        return

    def takes_drafts(self, slot: int, verification: Verification) -> bool:
        """Whether rows after the drafts of the slot's request can be sampled; if not, all its drafts are rejected."""
        return True

    def begin_step(self, parts: Parts | None, slot_of: Mapping[str, int]) -> None:
        """Take the features' parts for the sampling of the next step (`SamplingInput`).

        Called where a request of the runner needs a transform. slot_of: by request id.
        """
        return

    def dummy_request(self, request: NewRequestData) -> NewRequestData:
        """Return a dummy request as one that needs the transform, for warm-up."""
        return request

    def dummy_part(self, message: SchedulerOutput) -> Part | None:
        """Return the part for the sampling of a step of dummy requests, its `awaiting_req_ids`; None without one."""
        return None

    @abstractmethod
    def is_needed(self, slots_np: np.ndarray) -> bool:
        """Whether `apply` could change rows of these slots; decided on the host without waiting."""

    @abstractmethod
    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        """Transform float32 logits [rows, vocabulary], possibly in place; other requests' rows stay as they are.

        The tokens before a row, its drafts among them, are in the runner's token table up to the row's position. State
        that the transform keeps of a request's tokens excludes drafts until `advance`.
        """

    def advance(self, slots: Tensor, slots_np: np.ndarray, outcome: StepOutcome) -> None:
        """Update state on the device with the sampled tokens of the step's requests; the next step overwrites them."""
        return
