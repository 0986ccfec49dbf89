"""Interface of custom logits processors. `docs/logits_processors.md` has an example."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from penstock.contract import SamplingParams
from penstock.device import Device
from penstock.step.logits_rows import LogitsRows


@dataclass(frozen=True, slots=True)
class ProcessorContext:
    """Properties of the runner that a processor serves.

    device: `device.torch_device` is where the logits are, and `device.upload` copies an array there without waiting.
    num_slots: slots are 0 to num_slots - 1. vocab_size: width of the logits.
    token_ids: int32 [num_slots, positions] on the device, read only: prompt and output of each slot's request, up to
        and including the position that `LogitsRows` gives. Later positions are stale.
    """

    device: Device
    num_slots: int
    vocab_size: int
    token_ids: Tensor


class LogitsProcessor(ABC):
    """Changes the logits of requests that want it, after penalties and before temperature; greedy ones too.

    One object serves one engine. A request keeps its slot as long as it runs, while its row differs from step to step,
    so per-request state is kept by slot. A preempted request is added again as a new one, with its output so far. With
    asynchronous scheduling the host does not know the last token yet when `apply` is called: read tokens from
    `context.token_ids`, on the device.

    name: key of the request's argument: `SamplingParams(extra_args={name: …})`.
    takes_drafts: `apply` changes a row depending on the row alone: its slot, its position, and the tokens up to there.
        Then a request may have several rows in a step, one after each of its drafts (`LogitsRows.drafts`), some of
        which are rejected later. If False, the request has one row, and its drafts are rejected.
    """

    name: ClassVar[str]
    takes_drafts: ClassVar[bool] = False

    def __init__(self, context: ProcessorContext) -> None:
        self.context = context

    @classmethod
    def validate(cls, params: SamplingParams) -> None:
        """Raise ValueError, saying what is allowed, to refuse a request.

        Called for every request when it is accepted, perhaps in another process than `add_request`.
        """
        return

    @abstractmethod
    def add_request(
        self, slot: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> bool:
        """Add a request; return whether `apply` gets its rows. The slot's previous state is void."""

    def remove_request(self, slot: int) -> None:
        """Remove the slot's request, for which `add_request` returned True."""
        return

    def is_needed(self, slots: np.ndarray) -> bool:
        """Whether a step with these slots (int64), whose requests want the processor, needs `apply`."""
        return True

    @abstractmethod
    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        """Transform float32 logits [rows, vocabulary] of the step's requests that want the processor.

        Each has one row, and more where `takes_drafts` is true. `logits` may be changed in place. Rows of unfinished
        prefills are included; their samples are discarded. If this raises, it is called again for each row alone, and
        the requests whose rows raise again end with the error: state must allow a second call.
        """
