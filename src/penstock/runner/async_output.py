"""Outputs of a step: copies from the device to the host in flight, or results ready on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
from torch import Tensor

from penstock.contract import LogprobsLists, ModelRunnerOutput, Part, Parts, SampledOutput
from penstock.device import Device
from penstock.device.base import wait_until
from penstock.kernels.bound_step import StepOutcome, TokensOnHost
from penstock.kernels.sampling import LogprobsTensors
from penstock.runner.sampling.failures import Failure, describe_failure
from penstock.runner.sampling.prompt_logprobs import PendingPromptLogprobs
from penstock.runner.slot_owner import PendingPart


class StepOutput(Protocol):
    """Result of a step, on its way from the device to the host."""

    @property
    def step_id(self) -> int: ...

    def get_output(self, timeout_s: float) -> ModelRunnerOutput:
        """The step's result. Raises WaitTimeout when the device has not delivered it within `timeout_s` seconds."""


class AsyncOutput:
    """The step's sampled tokens, copied to the host asynchronously from construction on; `get_output` waits once.

    It is made before the state is advanced, so the copy does not wait for that. Request ids are those at launch: slots
    may belong to other requests by the time the result is read.
    """

    def __init__(
        self,
        device: Device,
        *,
        step_id: int,
        req_ids: list[str],
        outcome: StepOutcome,
        first_rows: np.ndarray | None = None,
        on_host: TokensOnHost | None = None,
        logprobs: LogprobsTensors | None,
        prompt_logprobs: PendingPromptLogprobs | None = None,
        errors: dict[str, str],
        processor_names: Sequence[str] = (),
        rank: int,
    ) -> None:
        self.step_id = step_id
        self._req_ids = req_ids
        self._errors = errors
        self._rank = rank
        self._has_logprobs = logprobs is not None
        self._prompt_logprobs = prompt_logprobs
        self._processor_names = processor_names
        self._on_host = on_host
        self._first_rows = first_rows
        self._copy = device.download((*(logprobs or ()), *((outcome.table_RX,) if on_host is None else ())))

    def get_output(self, timeout_s: float) -> SampledOutput:
        """The step's result.

        Raises WaitTimeout when the device has not delivered it within `timeout_s` seconds.
        """
        if not self._is_done():
            wait_until(self._is_done, timeout_s, lambda: self._describe_wait(timeout_s))
        tensors = self._copy.tensors
        token_ids, failures = _to_host(tensors[-1]) if self._on_host is None else self._on_host
        return SampledOutput(
            step_id=self.step_id,
            req_ids=self._req_ids,
            sampled_token_ids=token_ids,
            logprobs=self._logprobs(LogprobsTensors(*tensors[:3]), token_ids) if self._has_logprobs else None,
            prompt_logprobs={} if self._prompt_logprobs is None else self._prompt_logprobs.by_request(),
            errors=self._errors if failures is None else self._errors | self._failed(token_ids, failures),
            not_finite_req_ids=[] if failures is None else self._failed_by(Failure.NOT_FINITE, failures),
            invalid_req_ids=[] if failures is None else self._failed_by(Failure.NOTHING_LEFT, failures),
        )

    def _logprobs(self, logprobs: LogprobsTensors, token_ids: list[list[int]]) -> LogprobsLists:
        """Log-probabilities of the sampled tokens, a row each: unfinished prefills and rejected drafts have none."""
        firsts = range(len(token_ids)) if self._first_rows is None else self._first_rows.tolist()
        rows = [
            first + number for first, sampled in zip(firsts, token_ids, strict=True) for number in range(len(sampled))
        ]
        if len(rows) < len(logprobs.ranks_R):
            logprobs = LogprobsTensors(*(column[rows] for column in logprobs))
        return _to_lists(logprobs)

    def _describe_wait(self, timeout_s: float) -> str:
        return (
            f"Rank {self._rank} waited {timeout_s:g} s in get_output for the device to deliver the tokens of step "
            f"{self.step_id} ({len(self._req_ids)} requests)."
        )

    def _is_done(self) -> bool:
        return self._copy.is_done() and (self._prompt_logprobs is None or self._prompt_logprobs.is_done())

    def _failed_by(self, cause: Failure, failures: list[int]) -> list[str]:
        return [req_id for req_id, why in zip(self._req_ids, failures, strict=True) if why == cause]

    def _failed(self, token_ids: list[list[int]], failures: list[int]) -> dict[str, str]:
        # An unfinished prefill's token is void, but with NaN in its logits there is NaN in its KV, and it is lost.
        return {
            req_id: describe_failure(why, self._processor_names)
            for req_id, sampled, why in zip(self._req_ids, token_ids, failures, strict=True)
            if why == Failure.NOT_FINITE or (why and sampled)
        }


class ReadyOutput(msgspec.Struct, frozen=True, gc=False):
    """A result without a copy in flight: the step ran no token, or its tokens are in host memory already."""

    output: ModelRunnerOutput

    @property
    def step_id(self) -> int:
        return self.output.step_id

    def get_output(self, timeout_s: float = 0.0) -> ModelRunnerOutput:
        return self.output


class OutputWithParts(msgspec.Struct, frozen=True, gc=False):
    """A result with the parts that worker-side features (`SlotOwner.part_of_results`) add."""

    result: StepOutput
    parts: Sequence[Part | PendingPart]

    @property
    def step_id(self) -> int:
        return self.result.step_id

    def get_output(self, timeout_s: float) -> ModelRunnerOutput:
        output = self.result.get_output(timeout_s)
        parts = (part if isinstance(part, Part) else part.get(timeout_s) for part in self.parts)
        return msgspec.structs.replace(output, parts=Parts.of(parts))


def _to_host(table_RX: Tensor) -> TokensOnHost:
    # Column by column, as a list of Python is made faster than an array is searched.
    table = table_RX.numpy()
    token_ids, num_sampled, failures = table[:, :-3].tolist(), table[:, -3].tolist(), table[:, -1].tolist()
    if num_sampled.count(table.shape[1] - 3) < len(num_sampled):
        token_ids = [row[:count] for row, count in zip(token_ids, num_sampled, strict=True)]
    return token_ids, failures if any(failures) else None


def _to_lists(logprobs: LogprobsTensors) -> LogprobsLists:
    return LogprobsLists(
        logprob_token_ids=logprobs.token_ids_RN.tolist(),
        logprobs=logprobs.logprobs_RN.tolist(),
        sampled_token_ranks=logprobs.ranks_R.tolist(),
    )
