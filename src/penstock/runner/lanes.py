"""Where the steps that are under way at once have their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.contract import SchedulerOutput
from penstock.runner.fast_paths import PlainPath
from penstock.runner.input_batch import BatchBuilder


class Lane(NamedTuple):
    """One step's inputs, which the next step of the lane overwrites, and what is kept for one that repeats it."""

    batcher: BatchBuilder
    paths: PlainPath


class Lanes:
    """As many as there may be steps whose outcome is not known here: one, but where a later stage samples."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        # The one that was used last comes last.
        self._lanes = list(lanes)

    @property
    def current(self) -> Lane:
        """That of the last step."""
        return self._lanes[-1]

    def turn_to(self, output: SchedulerOutput) -> None:
        """Give a step the lane of the one that it repeats, or else the lane whose step is the longest ago.

        One without tokens, which may come before the last one is sampled, takes none.
        """
        lanes = self._lanes
        if len(lanes) > 1 and output.num_scheduled_tokens:
            found = next((lane for lane in lanes if lane.paths.has_kept(output.repeats_step_id)), lanes[0])
            lanes.remove(found)
            lanes.append(found)

    def unbind(self) -> None:
        """The model, or its weights, may be others from now on."""
        for lane in self._lanes:
            lane.paths.unbind()
