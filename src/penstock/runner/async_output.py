"""A step's result on its way to the host."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from penstock.contract import LogprobsLists, ModelRunnerOutput
from penstock.device import Device
from penstock.kernels.sampling import LogprobsTensors
from penstock.runner.sampling.failures import Failure, describe_failure
from penstock.runner.sampling.prompt_logprobs import PendingPromptLogprobs
from penstock.runner.waiting import wait_until


def _ignore() -> None: ...


class AsyncOutput:
    """Begins the copy when it is made; `get_output` waits for it, once, and not for ever.

    It is made before the state is advanced, so the copy does not wait for that. Request ids are those at launch: slots
    may belong to others by the time the result is read.
    """

    def __init__(
        self,
        device: Device,
        *,
        step_id: int,
        req_ids: list[str],
        outcome: Tensor,
        logprobs: LogprobsTensors | None,
        prompt_logprobs: PendingPromptLogprobs | None = None,
        errors: dict[str, str],
        on_not_finite: Callable[[], None] = _ignore,
        rank: int,
    ) -> None:
        self.step_id = step_id
        self._req_ids = req_ids
        self._errors = errors
        self._rank = rank
        self._has_logprobs = logprobs is not None
        self._prompt_logprobs = prompt_logprobs
        self._on_not_finite = on_not_finite
        self._copy = device.download((outcome, *(logprobs or ())))

    def get_output(self, timeout_s: float) -> ModelRunnerOutput:
        """The step's result.

        Raises WaitTimeout when the device has not delivered it within `timeout_s` seconds.
        """
        if not self._is_done():
            wait_until(self._is_done, timeout_s, lambda: self._describe_wait(timeout_s))
        outcome, *logprobs = self._copy.tensors
        token_ids, counts, failures = outcome.tolist()
        return ModelRunnerOutput(
            step_id=self.step_id,
            req_ids=self._req_ids,
            sampled_token_ids=_token_lists(token_ids, counts),
            logprobs=_to_lists(LogprobsTensors(*logprobs)) if self._has_logprobs else None,
            prompt_logprobs={} if self._prompt_logprobs is None else self._prompt_logprobs.by_request(),
            errors=self._errors | self._failed(counts, failures) if any(failures) else self._errors,
            not_finite_req_ids=self._not_finite(failures) if any(failures) else [],
        )

    def _describe_wait(self, timeout_s: float) -> str:
        return (
            f"Rank {self._rank} waited {timeout_s:g} s in get_output for the device to deliver the tokens of step "
            f"{self.step_id} ({len(self._req_ids)} requests)."
        )

    def _is_done(self) -> bool:
        return self._copy.is_done() and (self._prompt_logprobs is None or self._prompt_logprobs.is_done())

    def _not_finite(self, failures: list[int]) -> list[str]:
        return [req_id for req_id, why in zip(self._req_ids, failures, strict=True) if why == Failure.NOT_FINITE]

    def _failed(self, num_sampled: list[int], failures: list[int]) -> dict[str, str]:
        if Failure.NOT_FINITE in failures:
            self._on_not_finite()
        # An unfinished prefill's token is void, but with NaN in its logits there is NaN in its KV, and it is lost.
        return {
            req_id: describe_failure(why)
            for req_id, count, why in zip(self._req_ids, num_sampled, failures, strict=True)
            if why == Failure.NOT_FINITE or (why and count)
        }


class EmptyOutput:
    """The result of a step that ran no token."""

    def __init__(self, step_id: int, errors: dict[str, str]) -> None:
        self.step_id = step_id
        self._errors = errors

    def get_output(self, timeout_s: float) -> ModelRunnerOutput:
        return ModelRunnerOutput(step_id=self.step_id, errors=self._errors)


def _token_lists(token_ids: list[int], num_sampled: list[int]) -> list[list[int]]:
    """A list per request: its token, or nothing if it sampled none."""
    if 0 not in num_sampled:
        return [[token_id] for token_id in token_ids]
    return [[token_id] if count else [] for token_id, count in zip(token_ids, num_sampled, strict=True)]


def _to_lists(logprobs: LogprobsTensors) -> LogprobsLists:
    return LogprobsLists(
        logprob_token_ids=logprobs.token_ids_RN.tolist(),
        logprobs=logprobs.logprobs_RN.tolist(),
        sampled_token_ranks=logprobs.ranks_R.tolist(),
    )
