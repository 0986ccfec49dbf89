"""Check that all ranks run the same step."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from penstock.contract import SchedulerOutput, encode
from penstock.errors import RanksDisagree
from penstock.parallel.group import Group


class StepFacts(NamedTuple):
    """Properties of a step that must be equal on all ranks, or ranks would deadlock or mix up tensors."""

    step_id: int
    num_tokens: int
    num_reqs: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class GroupAgreement:
    """Compares the step among the ranks of a group.

    others: further groups of this rank, which note the step id for their errors. compares_all: whether all of the
    step is compared, for ranks whose engines schedule by themselves.
    """

    group: Group
    others: tuple[Group, ...] = ()
    compares_all: bool = False

    def on_step(self, output: SchedulerOutput) -> None:
        """Check a step; every rank calls it exactly once per step. Raises RanksDisagree."""
        for group in (self.group, *self.others):
            group.note_step(output.step_id)
        facts = StepFacts(
            output.step_id,
            output.total_num_scheduled_tokens,
            len(output.num_scheduled_tokens),
            _digest(output) if self.compares_all else "",
        )
        by_rank = self.group.gather_values(facts, StepFacts)
        most, _ = Counter(by_rank).most_common(1)[0]
        others = [
            f"rank {rank} runs step {fact.step_id} with {fact.num_tokens} tokens of {fact.num_reqs} requests"
            f"{fact.digest and f' ({fact.digest})'}"
            for rank, fact in enumerate(by_rank)
            if fact != most
        ]
        if others:
            raise RanksDisagree(
                f"Step {output.step_id}: {'; '.join(others)}, where the first of the others runs step {most.step_id} "
                f"with {most.num_tokens} tokens of {most.num_reqs} requests{most.digest and f' ({most.digest})'}. "
                "Every rank must be given every step, in the same order."
            )


def _digest(output: SchedulerOutput) -> str:
    """Return a digest of a whole step, independent of the order of its sets."""
    unordered = sorted(output.finished_req_ids), sorted(output.preempted_req_ids)
    ordered = msgspec.structs.replace(output, finished_req_ids=set(), preempted_req_ids=set())
    return hashlib.blake2b(encode(ordered) + repr(unordered).encode(), digest_size=8).hexdigest()
