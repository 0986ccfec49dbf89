"""Steps that repeat an earlier one: the same requests, each with one more token, and nothing of theirs in between."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.scheduler.step import Step


class DecodeSteps:
    """Whether the last step of some requests may be repeated, and which of them need a block for it.

    That step samples one token for each of its requests, which are all that run, or a part that takes turns with
    others. It may be repeated for as long as no request comes, goes or is preempted, and none of them reaches its
    limit, which is known beforehand: `num_left` times.

    step: the last one. runs_ahead: whether it may be repeated before its results are there.
    due: rows whose requests need a block for the next step, by the `num_left` at that time.
    """

    __slots__ = ("due", "num_left", "runs_ahead", "step")

    def __init__(self, step: Step, *, runs_ahead: bool, num_steps: int) -> None:
        """num_steps: after which the decision may be another one."""
        self.step = step
        self.runs_ahead = runs_ahead
        rows = zip(step.requests, step.num_computed_tokens, strict=True)
        self.num_left = min(num_steps, *(request.length_limit - 1 - num_tokens for request, num_tokens in rows))
        self.due: dict[int, list[int]] = {}
        self._note_capacity(range(len(step.requests)))

    def advance(self, step: Step) -> None:
        """Note the step that repeats the last one."""
        self.step = step
        rows = self.due.pop(self.num_left, None)
        self.num_left -= 1
        if rows is not None:
            self._note_capacity(rows)

    def _note_capacity(self, rows: Iterable[int]) -> None:
        for row in rows:
            num_steps = self.step.requests[row].kv_capacity - self.step.num_computed_tokens[row]
            self.due.setdefault(self.num_left - num_steps, []).append(row)
