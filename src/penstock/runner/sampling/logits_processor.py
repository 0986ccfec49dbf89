"""The interface of custom logits processors. `docs/logits_processors.md` explains it with an example."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from penstock.contract import SamplingParams
from penstock.device import Device
from penstock.runner.logits_rows import LogitsRows


@dataclass(frozen=True, slots=True)
class ProcessorContext:
    """What a processor may know of the runner that it serves.

    device: `device.torch_device` is where the logits are, and `device.upload` carries an array there without waiting.
    num_slots: slots are 0 to num_slots - 1. vocab_size: width of the logits.
    token_ids: int32 [num_slots, positions] on the device, read only: the prompt and output of each slot's request, up
        to and including the position that `LogitsRows` gives. What comes after it is stale.
    """

    device: Device
    num_slots: int
    vocab_size: int
    token_ids: Tensor


class LogitsProcessor(ABC):
    """Changes the logits of requests that want it, after penalties and before temperature; greedy ones too.

    One object serves one engine. A request keeps its slot as long as it runs, while its row differs from step to step,
    so whatever belongs to a request is kept by slot. A request that was preempted comes back as a new one, with its
    output so far. With asynchronous scheduling the host does not know the last token yet when `apply` is called: read
    tokens from `context.token_ids`, on the device.

    name: how requests speak to the processor: `SamplingParams(extra_args={name: …})`.
    takes_drafts: whether what `apply` does to a row follows from the row alone: its slot, its position, and the tokens
        up to there. Then a request may have several rows in a step, one after each of its drafts (`LogitsRows.drafts`),
        of which some will turn out never to have been. Where that is not so, it has one row, and its drafts are
        rejected.
    """

    name: ClassVar[str]
    takes_drafts: ClassVar[bool] = False

    def __init__(self, context: ProcessorContext) -> None:
        self.context = context

    @classmethod
    def validate(cls, params: SamplingParams) -> None:
        """Raise ValueError, saying what is allowed, for a request that cannot be served; it is then refused.

        Called for every request, when it is accepted, perhaps in another process than `add_request`.
        """
        return

    @abstractmethod
    def add_request(
        self, slot: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> bool:
        """Take over a new request, and say whether `apply` should see it. What the slot held before is void."""

    def remove_request(self, slot: int) -> None:
        """The slot's request, for which `add_request` returned True, is gone."""
        return

    def is_needed(self, slots: np.ndarray) -> bool:
        """Whether a step with these requests (int64) needs `apply`; asked for those that want the processor."""
        return True

    @abstractmethod
    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        """float32 [rows, vocabulary] in and out, for the requests of the step that want the processor; each has a
        row, and more of them where `takes_drafts` is true.

        `logits` may be changed in place. Rows of prompts that are not fully computed come too; what is drawn from them
        is thrown away. If this raises, it is called again for each row alone, and the requests whose rows raise again
        end with the error: so change nothing that a second call would not find as it should be.
        """
