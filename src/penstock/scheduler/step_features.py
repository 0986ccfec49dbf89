"""Features with a side of their own in the scheduler: they add parts to the messages of steps, and read results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from penstock.contract import ModelRunnerOutput, Part, SchedulerOutput
from penstock.contract.registration import register_once

if TYPE_CHECKING:
    from penstock.scheduler.request import Request
    from penstock.scheduler.scheduler import Scheduler


class StepFeature(ABC):
    """The scheduler's side of a feature."""

    def request_added(self, request: Request) -> None:  # noqa: B027
        """Look at a request that waits from now on; it may be made to wait for something of the feature's."""

    def admits(self, request: Request, in_step: Sequence[Request]) -> bool:
        """Whether a budget of the feature's lets a waiting request begin in a step that runs these others so far.

        A request that is not admitted waits, and so do those behind it.
        """
        return True

    @abstractmethod
    def part_of_step(self, message: SchedulerOutput) -> Part | None:
        """The part for the workers of a step that is about to be launched; None where the feature has none for it."""

    def take_results(self, message: SchedulerOutput, results: ModelRunnerOutput) -> None:  # noqa: B027
        """Take in the parts of a step's results, before its tokens are."""

    def workers_replaced(self) -> None:  # noqa: B027
        """Expect no results of earlier steps: they are lost with the workers, as is the KV cache."""


# Makes a feature of one scheduler.
StepFeatureFactory = Callable[["Scheduler"], StepFeature]
_registered: list[StepFeatureFactory] = []


def register_step_feature(factory: StepFeatureFactory) -> None:
    """Let every scheduler that is made from now on in this process have the feature. Plugins register functions or
    classes of their modules.

    Raises ConfigError for a lambda or a nested function.
    """
    register_once(_registered, factory)


def registered_step_features() -> tuple[StepFeatureFactory, ...]:
    """Factories of the features that plugins registered, in order."""
    return tuple(_registered)
