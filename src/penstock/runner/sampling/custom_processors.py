"""Custom logits processors; a failure in one ends only the requests that use it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from penstock.contract import NewRequestData
from penstock.errors import ConfigError, LogitsProcessorError, is_for_the_program
from penstock.kernels.sampling import can_be_drawn
from penstock.runner.sampling.logits_processor import LogitsProcessor, ProcessorContext
from penstock.runner.sampling.logits_transform import LogitsTransform
from penstock.runner.sampling.verification import Verification
from penstock.step.logits_rows import LogitsRows

logger = logging.getLogger(__name__)


class CustomProcessors(LogitsTransform):
    """The processors in their order; each gets the rows of the requests that want it.

    Raises ConfigError for a processor whose constructor fails.
    """

    def __init__(self, context: ProcessorContext, classes: Iterable[type[LogitsProcessor]]) -> None:
        self._context = context
        self._processors = [_make(processor_class, context) for processor_class in classes]
        self._wants = np.zeros((len(self._processors), context.num_slots), dtype=np.bool_)
        self._errors: dict[int, str] = {}
        self._spoilt_by: Tensor | None = None

    @property
    def names(self) -> list[str]:
        """Names for errors."""
        return [f"{processor.name!r} ({type(processor).__qualname__})" for processor in self._processors]

    def add_request(self, slot: int, request: NewRequestData) -> None:
        self._wants[:, slot] = False
        params, prompt = request.sampling_params, request.prompt_token_ids
        for index, processor in enumerate(self._processors):
            try:
                wants = processor.add_request(slot, params, prompt, request.output_token_ids)
            except BaseException as error:
                if is_for_the_program(error):
                    raise
                raise LogitsProcessorError(_describe(processor, "add_request", error)) from error
            self._wants[index, slot] = bool(wants)

    def remove_request(self, slot: int) -> None:
        if not self._processors:
            return
        for index in np.flatnonzero(self._wants[:, slot]).tolist():
            processor = self._processors[index]
            try:
                processor.remove_request(slot)
            except BaseException as error:  # the request has finished: the failure can only be logged
                if is_for_the_program(error):
                    raise
                logger.exception("Logits processor %r failed in remove_request", processor.name)
        self._wants[:, slot] = False

    def takes_drafts(self, slot: int, verification: Verification) -> bool:
        """Whether all processors that the slot's request wants support rows after drafts."""
        wanted = np.flatnonzero(self._wants[:, slot]).tolist()
        return all(self._processors[index].takes_drafts for index in wanted)

    def is_needed(self, slots_np: np.ndarray) -> bool:
        return bool(self._wants[:, slots_np].any())

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        self._spoilt_by = None
        for number, wants in enumerate(self._wants):
            which = np.flatnonzero(wants[rows.slots_np])
            if len(which):
                self._apply_one(number, logits, rows, which)
        return logits

    def take_errors(self) -> dict[int, str]:
        """Return and clear the errors since the last call, by row of the step."""
        errors, self._errors = self._errors, {}
        return errors

    def take_spoilt_by(self) -> Tensor | None:
        """Number (from 1) of the processor that left the row without a drawable token, else 0; int64 [rows].

        None where no processor ran since the last call.
        """
        spoilt_by, self._spoilt_by = self._spoilt_by, None
        return spoilt_by

    def _apply_one(self, number: int, logits: Tensor, rows: LogitsRows, which: np.ndarray) -> None:
        """Apply a processor to these rows, in place; rows for which it raises keep their logits."""
        processor = self._processors[number]
        try:
            if not processor.is_needed(rows.slots_np[which]):
                return
            self._change(number, logits, rows, which)
        except BaseException as error:
            if is_for_the_program(error):
                raise
            if len(which) == 1:
                logger.warning("Logits processor %r ends a request", processor.name, exc_info=error)
                self._errors[int(which[0])] = _describe(processor, "apply", error)
                return
            for row in which:
                self._apply_one(number, logits, rows, np.array([row]))

    def _change(self, number: int, logits: Tensor, rows: LogitsRows, which: np.ndarray) -> None:
        index = self._context.device.upload(which)
        before = logits.index_select(0, index)
        could_be_drawn = can_be_drawn(before)
        with torch.no_grad():
            after = self._processors[number].apply(before, rows.select(which, index))
        if not isinstance(after, Tensor) or after.shape != before.shape or after.dtype != torch.float32:
            found = f"{after.dtype} {list(after.shape)}" if isinstance(after, Tensor) else type(after).__name__
            raise TypeError(f"it returned {found} instead of float32 logits {list(before.shape)}")
        logits.index_copy_(0, index, after)
        if self._spoilt_by is None:
            self._spoilt_by = index.new_zeros(len(logits))
        is_spoilt = could_be_drawn & ~can_be_drawn(after)
        self._spoilt_by.index_copy_(0, index, is_spoilt * (number + 1))


def _make(processor_class: type[LogitsProcessor], context: ProcessorContext) -> LogitsProcessor:
    try:
        return processor_class(context)
    except Exception as error:
        raise ConfigError(
            f"Logits processor {processor_class.name!r} cannot be made: {type(error).__name__}: {error}. Repair it, or "
            "leave it out of logits_processors."
        ) from error


def _describe(processor: LogitsProcessor, method: str, error: BaseException) -> str:
    return f"Logits processor {processor.name!r} failed in {method}: {type(error).__name__}: {error}"
