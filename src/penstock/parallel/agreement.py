"""What all ranks must agree on before a step runs: whether they run the same one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.contract import SchedulerOutput
from penstock.errors import RanksDisagree
from penstock.parallel.group import Group


class StepFacts(NamedTuple):
    """A step, in what would make ranks wait for each other for ever, or mix up tensors, if it differed."""

    step_id: int
    num_tokens: int
    num_reqs: int


class Agreement(Protocol):
    def on_step(self, output: SchedulerOutput) -> None:
        """Called by every rank once in every step, whatever way the step goes. Raises RanksDisagree."""


class NoAgreement:
    """One rank agrees with itself."""

    def on_step(self, output: SchedulerOutput) -> None: ...


NO_AGREEMENT = NoAgreement()


@dataclass(frozen=True, slots=True)
class GroupAgreement:
    """Asks the ranks of a group."""

    group: Group

    def on_step(self, output: SchedulerOutput) -> None:
        if self.group.meetings is not None:
            self.group.meetings.step_id = output.step_id
        facts = StepFacts(output.step_id, output.total_num_scheduled_tokens, len(output.num_scheduled_tokens))
        by_rank = self.group.gather_values(facts)
        most, _ = Counter(by_rank).most_common(1)[0]
        others = [
            f"rank {rank} runs step {fact.step_id} with {fact.num_tokens} tokens of {fact.num_reqs} requests"
            for rank, fact in enumerate(by_rank)
            if fact != most
        ]
        if others:
            raise RanksDisagree(
                f"Step {output.step_id}: {'; '.join(others)}, where the first of the others runs step {most.step_id} "
                f"with {most.num_tokens} tokens of {most.num_reqs} requests. Every rank must be given every step, "
                "in the same order."
            )
