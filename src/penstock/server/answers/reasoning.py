"""Incremental parser of the reasoning before an answer."""

from __future__ import annotations

from penstock.config.reasoning import ReasoningMarkers
from penstock.server.answers.events import StateParser, merged
from penstock.server.answers.markers import Markers
from penstock.server.requests.answer import AnswerEvent, AnswerParser, ReasoningDelta


class ReasoningParser(StateParser):
    """Parser of reasoning, which gives the text behind it to the parser of the answer.

    reasons: whether the text begins within reasoning, as after a prompt that opened it. answer_begins: markers that end
    reasoning and belong to the answer. Whitespace around reasoning is dropped.
    """

    def __init__(
        self, markers: ReasoningMarkers, answer: AnswerParser, *, reasons: bool, answer_begins: tuple[str, ...] = ()
    ) -> None:
        super().__init__(self._reasoning if reasons else self._before_reasoning)
        self._start = Markers([markers.start])
        self._ends = Markers([markers.end, *answer_begins])
        self._answer_begins = answer_begins
        self._answer = answer
        self._is_at_start = True

    def finish(self) -> list[AnswerEvent]:
        self._is_at_end = True
        return merged([*self.push(""), *self._answer.finish()])

    def _before_reasoning(self) -> bool:
        text = self._pending.lstrip()
        if not self._is_at_end and (not text or self._start.may_start(text)):
            return False
        self._state = self._reasoning if self._start.at_start(text) else self._content
        return True

    def _reasoning(self) -> bool:
        if self._is_at_start and not self._skip_start():
            return False
        found = self._ends.find(self._pending)
        if found is None:
            self._emit(self._take_free(self._ends, keeps_blanks=True))
            return False
        self._emit(self._pending[: found.start()].rstrip())
        is_of_answer = found.group() in self._answer_begins
        self._pending = self._pending[found.start() if is_of_answer else found.end() :]
        self._state = self._behind_reasoning
        return True

    def _skip_start(self) -> bool:
        """Skip a start marker, which some models repeat after a prompt that ends with it. False if more must come."""
        text = self._pending.lstrip()
        if not self._is_at_end and (not text or self._start.may_start(text)):
            return False
        marker = self._start.at_start(text) or ""
        self._pending = text[len(marker) :].lstrip()
        self._is_at_start = bool(marker) and not self._pending
        return bool(self._pending)

    def _behind_reasoning(self) -> bool:
        self._pending = self._pending.lstrip()
        if self._pending:
            self._state = self._content
        return bool(self._pending)

    def _content(self) -> bool:
        self._events += self._answer.push(self._pending)
        self._pending = ""
        return False

    def _emit(self, text: str) -> None:
        if text:
            self._events.append(ReasoningDelta(text))
