"""Features with a side of their own in the scheduler: they add parts to the messages of steps, and read results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.contract import ModelRunnerOutput, Part, SchedulerOutput

if TYPE_CHECKING:
    from penstock.scheduler.scheduler import Scheduler


class StepFeature(ABC):
    """The scheduler's side of a feature."""

    @abstractmethod
    def part_of_step(self, message: SchedulerOutput) -> Part | None:
        """The part for the workers of a step that is about to be launched; None where the feature has none for it."""

    def take_results(self, message: SchedulerOutput, results: ModelRunnerOutput) -> None:  # noqa: B027
        """Take in the parts of a step's results, before its tokens are."""


# Makes a feature of one scheduler.
StepFeatureFactory = Callable[["Scheduler"], StepFeature]
_registered: list[StepFeatureFactory] = []


def register_step_feature(factory: StepFeatureFactory) -> None:
    """Let every scheduler that is made from now on in this process have the feature. A plugin may call it again."""
    if factory not in _registered:
        _registered.append(factory)


def registered_step_features() -> tuple[StepFeatureFactory, ...]:
    """Factories of the features that plugins registered, in order."""
    return tuple(_registered)
