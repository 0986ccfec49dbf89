"""Order of steps: each is executed once, then sampled once, before the next one with tokens."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from penstock.contract import SchedulerOutput
from penstock.errors import LifecycleError


class _Waiting(Protocol):
    @property
    def req_ids(self) -> list[str]: ...


_Step = TypeVar("_Step", bound=_Waiting)


class StepOrder(Generic[_Step]):
    """The steps between `execute_model` and `sample_tokens`. A step without tokens has no `req_ids`.

    Sampling appends a step's tokens, and steps may share their input buffers: so a step with tokens can only begin when
    the one before is sampled.

    last_step_id: of the last step that began. is_in_step: whether one began and is not sampled.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, _Step] = {}
        self.last_step_id = -1
        self.is_in_step = False

    def begin(self, output: SchedulerOutput) -> None:
        """Register a step as executed. Raises LifecycleError, and changes nothing, where it is out of order."""
        step_id = output.step_id
        if step_id <= self.last_step_id:
            raise LifecycleError(self._describe_late(step_id))
        if self._waiting and output.num_scheduled_tokens:
            self._require_sampled(output)
        self.last_step_id, self.is_in_step = step_id, True

    def wait(self, step_id: int, step: _Step) -> None:
        """Keep an executed step until it is sampled."""
        self._waiting[step_id] = step

    def take(self, step_id: int) -> _Step:
        """Return the step to be sampled. Raises LifecycleError where it is out of order."""
        step = self._waiting.pop(step_id, None)
        if step is None:
            raise LifecycleError(
                f"sample_tokens names step {step_id}, which is not waiting to be sampled. "
                f"Waiting: {sorted(self._waiting) or 'none'}. Every step is executed once, then sampled once."
            )
        if self._waiting and (first := next(iter(self._waiting))) < step_id:
            self._waiting[step_id] = step
            raise LifecycleError(
                f"sample_tokens names step {step_id}, but it is the turn of step {first} "
                f"({_named(self._waiting[first].req_ids)})."
            )
        self.is_in_step = bool(self._waiting)
        return step

    def _describe_late(self, step_id: int) -> str:
        if step_id in self._waiting:
            return f"Step {step_id} was executed before and is still waiting for sample_tokens."
        return (
            f"Step {step_id} came after step {self.last_step_id}. Steps are executed in the order of their ids, each "
            "once."
        )

    def _require_sampled(self, output: SchedulerOutput) -> None:
        for step_id, step in self._waiting.items():
            shared = [req_id for req_id in step.req_ids if req_id in output.num_scheduled_tokens]
            if shared:
                raise LifecycleError(
                    f"Step {output.step_id} needs the tokens of step {step_id} ({_named(shared)}), which was not "
                    "sampled yet."
                )
            if step.req_ids:
                raise LifecycleError(
                    f"Step {output.step_id} came while the inputs of step {step_id} ({_named(step.req_ids)}) are in "
                    "use: it was not sampled yet."
                )


def _named(req_ids: list[str]) -> str:
    return f"requests {', '.join(req_ids)}" if req_ids else "no requests"
