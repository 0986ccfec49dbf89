"""Incremental parser of gpt-oss's answers in the harmony format: messages with a channel each.

    <|start|>assistant<|channel|>CHANNEL to=RECIPIENT <|constrain|>json<|message|>TEXT<|end|>

The prompt ends with the first "<|start|>assistant"; the last message ends with <|return|>, or with <|call|> for a call.
A recipient may also stand before the channel. (OpenAI 2025, https://cookbook.openai.com/articles/openai-harmony)
"""

from __future__ import annotations

import re
from collections.abc import Callable

from penstock.config.reasoning import HARMONY_ANALYSIS
from penstock.server.answers.events import merged
from penstock.server.answers.markers import Markers
from penstock.server.answers.tool_format import ToolFormat
from penstock.server.requests.answer import AnswerEvent, AnswerParser, ReasoningDelta

_MESSAGE = "<|message|>"
_ANALYSIS, _FUNCTIONS = "analysis", "functions."
_CALL_ENDS = "<|call|>"
_CALL_BEGINS = f"<|start|>assistant<|channel|>commentary to={_FUNCTIONS}"
_CALL_ARGUMENTS = f"<|constrain|>json{_MESSAGE}"
# Calls as the model writes them, but for the end, which is one of its tokens that end an answer.
HARMONY = ToolFormat(
    head=f"{_CALL_BEGINS}{{name}} {_CALL_ARGUMENTS}",
    tail="",
    openers=(_CALL_BEGINS,),
    closers=(_CALL_ENDS,),
    skipped=(_CALL_ARGUMENTS,),
    bare_names=True,
)
_HEADER_BEGINS = Markers(["<|start|>", "<|channel|>"])
_MESSAGE_ENDS = Markers(["<|end|>", "<|return|>", _CALL_ENDS, *_HEADER_BEGINS.texts])
_CHANNEL = re.compile(r"<\|channel\|>\s*([^\s<]+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class HarmonyParser:
    """Parser of one answer: analysis is reasoning, and so is what is for other tools than functions.

    The text of other messages goes to the parser of the answer, calls of functions as in `HARMONY`. reasons: whether
    the text begins within analysis, as after a prompt that opened it. Text without a header is content.
    """

    def __init__(self, answer: AnswerParser, *, reasons: bool) -> None:
        self._answer = answer
        self._events: list[AnswerEvent] = []
        self._pending = HARMONY_ANALYSIS if reasons else ""
        self._is_at_end = False
        self._is_reasoning = False
        self._is_call = False
        # State: takes what it can from the pending text; whether it went on.
        self._state: Callable[[], bool] = self._before_header

    def push(self, text: str) -> list[AnswerEvent]:
        self._pending += text
        while self._pending and self._state():
            pass
        events, self._events = merged(self._events), []
        return events

    def finish(self) -> list[AnswerEvent]:
        self._is_at_end = True
        return merged([*self.push(""), *self._answer.finish()])

    def _before_header(self) -> bool:
        text = self._pending.lstrip()
        if not self._is_at_end and (not text or _HEADER_BEGINS.may_start(text)):
            return False
        self._is_reasoning = self._is_call = False
        self._state = self._header if _HEADER_BEGINS.at_start(text) else self._message
        return True

    def _header(self) -> bool:
        header, message, rest = self._pending.partition(_MESSAGE)
        if not message:
            # A header that is cut off says nothing.
            self._pending = "" if self._is_at_end else self._pending
            return False
        self._pending = rest
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._is_call = recipient is not None and recipient[1].startswith(_FUNCTIONS)
        is_for_others = recipient is not None and not self._is_call
        self._is_reasoning = is_for_others or (not self._is_call and channel is not None and channel[1] == _ANALYSIS)
        if recipient is not None and self._is_call:
            self._emit(f"{_CALL_BEGINS}{recipient[1].removeprefix(_FUNCTIONS)} {_CALL_ARGUMENTS}")
        self._state = self._message
        return True

    def _message(self) -> bool:
        found = _MESSAGE_ENDS.find(self._pending)
        if found is None:
            kept = 0 if self._is_at_end else _MESSAGE_ENDS.num_kept(self._pending)
            free = self._pending[: len(self._pending) - kept]
            self._emit(free)
            self._pending = self._pending[len(free) :]
            return False
        self._emit(self._pending[: found.start()])
        if self._is_call:
            self._emit(_CALL_ENDS)
        begins_header = found.group() in _HEADER_BEGINS.texts
        self._pending = self._pending[found.start() if begins_header else found.end() :]
        self._state = self._before_header
        return True

    def _emit(self, text: str) -> None:
        if not text:
            return
        self._events += [ReasoningDelta(text)] if self._is_reasoning else self._answer.push(text)
