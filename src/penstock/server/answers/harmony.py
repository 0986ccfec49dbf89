"""Incremental parser of gpt-oss's answers: messages in the harmony format (`penstock.structured.harmony_messages`)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

from penstock.server.answers.call_parser import openai_call_id
from penstock.server.answers.events import StateParser, merged
from penstock.server.answers.markers import Markers
from penstock.server.answers.tool_format import CallableTool, ToolFormat
from penstock.server.requests.answer import (
    AnswerEvent,
    AnswerParser,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from penstock.structured.harmony_messages import (
    ANALYSIS,
    CALL,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    END,
    FINAL,
    MESSAGE,
    RETURN,
    ROLE,
    START,
    Header,
    Kind,
    call_header,
    read_header,
    split_message,
)


class _HarmonyCalls(ToolFormat):
    """Format of calls, of which free text has one at most: <|call|> ends an answer."""

    def free_text_with_calls(self, tools: Sequence[CallableTool], *, parallel: bool) -> dict[str, Any]:
        return ToolFormat.free_text_with_calls(self, tools, parallel=False)


# The end of a call is one of the tokens that end an answer.
HARMONY = _HarmonyCalls(
    head=call_header("{name}"),
    tail="",
    openers=(call_header("{name}").partition("{name}")[0],),
    closers=(CALL,),
    skipped=(call_header("{name}").partition("{name} ")[2],),
    bare_names=True,
)
_ENDS = (END, RETURN, CALL)
_HEADER_BEGINS = Markers([START, CHANNEL])
_HEADER_ENDS = Markers([MESSAGE, START, *_ENDS])
_TEXT_ENDS = Markers([START, CHANNEL, CONSTRAIN, MESSAGE, *_ENDS])
# What may follow the role in a header. Any other text there is a message without a header.
_BEHIND_ROLE = Markers(["to=", ROLE, *_TEXT_ENDS.texts])
_HEADER_WORDS = Markers([*_BEHIND_ROLE.texts, ANALYSIS, COMMENTARY, FINAL, "json", "code"])
# Characters of a header, beyond any that names a function.
_LONGEST_HEADER = 512


class _Text(Enum):
    """Use of a message's text. HELD: reasoning if another message follows, content if none does."""

    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    HELD = auto()


class HarmonyParser(StateParser):
    """Parser of one answer: analysis is reasoning, and so is what is for other tools than functions.

    content: parser of the text that is for the user. takes_calls: whether calls of functions are calls; they are
    reasoning otherwise. parallel: False drops calls after the first. opened: header of the message that the prompt
    leaves open.

    A message without <|message|> has the text behind the parts of its header. Where such a header names no channel, the
    text is content if the answer ends with it: a model that goes on has corrected itself.
    """

    def __init__(self, content: AnswerParser, *, takes_calls: bool, parallel: bool, opened: str = "") -> None:
        super().__init__(self._header if opened else self._before_header, opened)
        self._content = content
        self._takes_calls = takes_calls
        self._max_calls = None if parallel else 1
        self._text = _Text.CONTENT
        self._held = ""
        self._num_calls = 0
        # Call whose arguments are next: its function, whether it has begun, and whitespace that may end its arguments.
        self._function = ""
        self._has_begun = False
        self._blanks = ""

    def finish(self) -> list[AnswerEvent]:
        self._is_at_end = True
        events = self.push("")
        self._end_message()
        self._end_held(_Text.CONTENT)
        return merged([*events, *self._events, *self._content.finish()])

    def _before_header(self) -> bool:
        text = self._pending.lstrip()
        if not self._is_at_end and (not text or _HEADER_BEGINS.may_start(text)):
            return False
        self._pending = text
        self._state = self._header if _HEADER_BEGINS.at_start(text) else self._message
        return True

    def _header(self) -> bool:
        role = f"{START}{ROLE}"
        text = self._pending.removeprefix(role).lstrip()
        if self._pending.startswith(role) and not _BEHIND_ROLE.at_start(text) and not _BEHIND_ROLE.may_start(text):
            return self._begin_message(_Text.CONTENT, text)
        # The message's own <|start|> does not end its header.
        begin = len(START) if self._pending.startswith(START) else 0
        found = _HEADER_ENDS.find(self._pending, begin, _LONGEST_HEADER)
        if found is None:
            return self._malformed_header(_LONGEST_HEADER)
        if found.group() != MESSAGE:
            return self._malformed_header(found.start())
        header = read_header(self._pending[: found.start()])
        return self._begin_message(self._meaning(header), self._pending[found.end() :], header.function)

    def _malformed_header(self, end: int) -> bool:
        """Begin a message without <|message|>, whose text is behind its header. end: of the header and the text."""
        is_cut = len(self._pending) < end
        if is_cut and not self._is_at_end:
            return False
        header, text = split_message(self._pending[:end])
        text = text.lstrip()
        if is_cut and _HEADER_WORDS.may_start(text):
            # A header that is cut off says nothing.
            self._pending = ""
            return False
        is_unknown = not header.channel and not header.recipient and CHANNEL in self._pending[:end]
        meaning = _Text.HELD if is_unknown or not text else self._meaning(header)
        return self._begin_message(meaning, text + self._pending[end:], header.function)

    def _meaning(self, header: Header) -> _Text:
        if header.kind is Kind.CONTENT:
            return _Text.CONTENT
        return _Text.CALL if header.kind is Kind.CALL and self._takes_calls else _Text.REASONING

    def _begin_message(self, text: _Text, pending: str, function: str = "") -> bool:
        self._end_held(_Text.REASONING)
        self._text, self._function = text, function
        self._pending = pending
        self._state = self._message
        return bool(pending)

    def _message(self) -> bool:
        found = _TEXT_ENDS.find(self._pending)
        if found is None:
            self._take(self._take_free(_TEXT_ENDS))
            return False
        self._take(self._pending[: found.start()])
        begins_header = found.group() in _HEADER_BEGINS.texts
        self._pending = self._pending[found.start() if begins_header else found.end() :]
        if begins_header or found.group() in _ENDS:
            self._end_message()
        return True

    def _end_message(self) -> None:
        if self._text is _Text.CALL:
            self._end_call()
        # Text up to the next header.
        self._text, self._state = _Text.HELD, self._before_header

    def _take(self, text: str) -> None:
        """Take the next characters of the message."""
        match self._text:
            case _Text.HELD:
                self._held += text
            case _Text.CALL:
                self._take_arguments(text)
            case _:
                self._emit(text, self._text)

    def _emit(self, text: str, kind: _Text) -> None:
        if text:
            self._events += [ReasoningDelta(text)] if kind is _Text.REASONING else self._content.push(text)

    def _end_held(self, kind: _Text) -> None:
        held, self._held = self._held, ""
        self._emit(held if held.strip() else "", kind)

    def _take_arguments(self, text: str) -> None:
        text = self._blanks + text if self._has_begun else text.lstrip()
        arguments = text.rstrip()
        self._blanks = text[len(arguments) :]
        if arguments and not self._has_begun:
            self._has_begun = True
            self._add(ToolCallStart(self._num_calls, openai_call_id(), self._function))
        if arguments:
            self._add(ToolCallArguments(self._num_calls, arguments))

    def _end_call(self) -> None:
        if not self._has_begun:
            self._take_arguments("{}")
        self._num_calls += 1
        self._has_begun, self._blanks = False, ""

    def _add(self, event: AnswerEvent) -> None:
        if self._max_calls is None or self._num_calls < self._max_calls:
            self._events.append(event)
