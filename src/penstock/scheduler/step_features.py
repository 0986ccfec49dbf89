"""Scheduler side of features that add parts to the messages of steps and read parts of results."""

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
    """Interface of a feature in the scheduler."""

    def request_added(self, request: Request) -> None:  # noqa: B027
        """Note a new waiting request; the feature may call `wait_for` on it."""

    def admits(self, request: Request, in_step: Sequence[Request]) -> bool:
        """Whether the feature's budget admits a waiting request to a step with these requests so far.

        A request that is not admitted waits, and so do those after it.
        """
        return True

    def begin_admission(self, running: Sequence[Request]) -> None:  # noqa: B027
        """Note the running requests of a step, before waiting ones are admitted to it."""

    def skips(self, request: Request) -> str | None:
        """Reason for which a waiting request is skipped, until the feature calls `ready` with it; None admits it.

        Requests after it go on.
        """
        return None

    @abstractmethod
    def part_of_step(self, message: SchedulerOutput) -> Part | None:
        """Return the feature's part of a step's message before its launch; None without one."""

    def take_results(self, message: SchedulerOutput, results: ModelRunnerOutput) -> None:  # noqa: B027
        """Take in the parts of a step's results, before its tokens."""

    def workers_replaced(self) -> None:  # noqa: B027
        """Note that workers were replaced: results of earlier steps and the KV cache are lost."""


# Creates the feature for one scheduler.
StepFeatureFactory = Callable[["Scheduler"], StepFeature]
_registered: list[StepFeatureFactory] = []


def register_step_feature(factory: StepFeatureFactory) -> None:
    """Let every scheduler that is made from now on in this process have the feature. Plugins register functions or
    classes of their modules.

    Raises ConfigError for a lambda or a nested function.
    """
    register_once(_registered, factory)


def registered_step_features() -> tuple[StepFeatureFactory, ...]:
    """Return the registered factories, in order."""
    return tuple(_registered)
