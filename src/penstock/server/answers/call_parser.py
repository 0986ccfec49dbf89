"""Incremental parser of tool calls in the text of a model."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass

from penstock.server.answers.events import StateParser
from penstock.server.answers.json_scanner import CallObject, CallState, ValueScanner
from penstock.server.answers.markers import Markers
from penstock.server.requests.answer import AnswerEvent, ContentDelta, ToolCallArguments, ToolCallStart

_NAME = re.compile(r"[\w.:/-]+")
# Behind a call, beside whitespace. A brace is a frequent mistake.
_BETWEEN_CALLS = ",;}"
_LONGEST_NAME = 256
_ID_CHARACTERS = string.ascii_letters + string.digits + "_- "


def openai_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def mistral_call_id() -> str:
    """Id of nine letters and digits, the only ones that Mistral's templates take."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """Syntax by which tool calls are found in a model's text.

    After one of `openers` come calls, single ones or in lists, each a JSON object with one of `name_keys` and one of
    `argument_keys`, or with `bare_names` a name before its arguments. `skipped` are texts between these parts. A closer
    ends the calls.
    id_marker: one of `skipped`, behind which the model writes an id of the call.
    starts: first character of an answer that is calls without an opener, which only count with the name of a tool.
    make_id: makes the id of a call.
    """

    openers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    starts: str = ""
    bare_names: bool = False
    id_marker: str = ""
    name_keys: tuple[str, ...] = ("name",)
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    make_id: Callable[[], str] = openai_call_id

    @property
    def markers(self) -> Collection[str]:
        return (*self.openers, *self.closers, *self.skipped)


class CallParser(StateParser):
    """Incremental parser of one answer's tool calls. names: those of the tools.

    Text that turns out to be no call becomes content with all its characters. Whitespace around calls is dropped, and
    so is a further call that is cut off before its arguments.
    """

    def __init__(self, syntax: CallSyntax, names: Collection[str], *, parallel: bool) -> None:
        super().__init__(self._content)
        self._syntax = syntax
        self._names = names
        self._max_calls = None if parallel else 1
        self._openers = Markers(syntax.openers)
        self._content_markers = Markers((*syntax.openers, *syntax.closers))
        self._markers = Markers(syntax.markers)
        self._inner_markers = Markers((*syntax.closers, *syntax.skipped))
        self._may_start = bool(syntax.starts)
        self._num_calls = 0
        self._drops_blanks = False
        # Characters since the end of the content, until a call begins.
        self._candidate = ""
        self._needs_known_name = False
        self._is_list = False
        self._num_in_section = 0
        self._call: CallObject = self._new_call()
        self._value = ValueScanner()
        self._name = ""
        self._has_begun = False

    def finish(self) -> list[AnswerEvent]:
        self._is_at_end = True
        if self._is_behind_call() and self._markers.may_start(self._pending.lstrip()):
            self._pending = ""
        while self._state():
            pass
        # An open call that has begun, or is behind others, is one that was cut off.
        if not self._num_calls and not self._has_begun:
            self._emit_content(self._candidate + self._pending)
        self._pending = self._candidate = ""
        return self._take_events()

    def _is_behind_call(self) -> bool:
        return self._drops_blanks if self._state == self._content else self._num_in_section > 0

    # Content, up to a marker.

    def _content(self) -> bool:
        if self._may_start and self._starts_calls():
            return True
        if self._drops_blanks:
            self._pending = self._pending.lstrip()
            self._drops_blanks = not self._pending
        found = self._content_markers.find(self._pending)
        if found is not None:
            return self._open(found)
        self._emit_content(self._take_free(self._content_markers, keeps_blanks=True))
        return False

    def _starts_calls(self) -> bool:
        text = self._pending.lstrip()
        if not text:
            return False
        self._may_start = False
        if text[0] not in self._syntax.starts:
            return False
        self._needs_known_name = True
        self._begin_section(self._pending[: len(self._pending) - len(text)])
        self._pending = text
        return True

    def _open(self, found: re.Match[str]) -> bool:
        before, marker = self._pending[: found.start()], found.group()
        self._pending = self._pending[found.end() :]
        content = before.rstrip()
        self._emit_content(content)
        self._may_start = False
        if marker in self._openers.texts:
            self._needs_known_name = False
            self._begin_section(before[len(content) :] + marker)
            self._on_marker(marker)
        elif not self._num_calls:
            self._emit_content(before[len(content) :] + marker)
        return True

    def _emit_content(self, text: str) -> None:
        if text:
            self._events.append(ContentDelta(text))

    # Between calls.

    def _begin_section(self, opening: str) -> None:
        self._candidate = opening
        self._is_list = False
        self._num_in_section = 0
        self._state = self._between

    def _between(self) -> bool:
        """Begin a call, or end the calls, by the next characters."""
        self._skip_blanks(_BETWEEN_CALLS if self._num_in_section else "")
        if not self._pending or self._is_undecided():
            return False
        marker, char = self._inner_markers.at_start(self._pending), self._pending[0]
        if marker is None:
            opener = self._openers.at_start(self._pending)
            marker = opener if self._num_in_section and not self._needs_known_name else None
        if marker is not None:
            self._take(len(marker))
            if marker in self._syntax.closers:
                return self._end_section()
            self._on_marker(marker)
        elif char in "[]" and self._is_list == (char == "]"):
            self._is_list = char == "["
            self._take(1)
        elif char == "{":
            self._begin_call(self._object)
        elif self._syntax.bare_names and _NAME.match(char):
            self._begin_call(self._bare_name)
        else:
            return self._end_section()
        return True

    def _on_marker(self, marker: str) -> None:
        """Change the state at a marker that begins or separates calls, in parsers of other bodies."""

    def _is_undecided(self) -> bool:
        if self._is_at_end:
            return False
        return self._inner_markers.may_start(self._pending) or self._openers.may_start(self._pending)

    def _end_section(self) -> bool:
        self._state = self._content
        self._drops_blanks = self._num_in_section > 0
        if not self._num_in_section:
            self._emit_content(self._candidate)
        self._candidate = ""
        return True

    def _skip_blanks(self, others: str) -> None:
        rest = self._pending.lstrip(" \t\r\n" + others)
        self._take(len(self._pending) - len(rest))

    def _take(self, num_characters: int) -> None:
        if not self._has_begun:
            self._candidate += self._pending[:num_characters]
        self._pending = self._pending[num_characters:]

    # Calls.

    def _new_call(self) -> CallObject:
        return CallObject(self._syntax.name_keys, self._syntax.argument_keys)

    def _begin_call(self, state: Callable[[], bool]) -> None:
        self._call, self._state, self._has_begun = self._new_call(), state, False

    def _object(self) -> bool:
        end = self._call.scan(self._pending, 0)
        self._take(end)
        call = self._call
        if call.name is not None and not self._has_begun and (call.has_arguments or call.state is CallState.DONE):
            if self._needs_known_name and call.name not in self._names:
                return self._fail()
            self._begin(call.name)
        if self._has_begun:
            self._emit_arguments(call.take())
        if call.state is CallState.DONE and not call.has_arguments:
            self._emit_arguments("{}")
        if call.state is CallState.OPEN:
            return False
        return self._end_call() if call.state is CallState.DONE else self._fail()

    def _bare_name(self) -> bool:
        found = _NAME.match(self._pending)
        assert found is not None, "the state begins at a name"
        name = found.group()
        if len(name) > _LONGEST_NAME:
            return self._fail()
        if len(name) == len(self._pending):
            return False
        self._name = name
        self._take(len(name))
        self._state = self._before_arguments
        return True

    def _before_arguments(self) -> bool:
        self._skip_blanks("")
        if not self._pending or self._is_undecided():
            return False
        marker = self._inner_markers.at_start(self._pending)
        if marker is not None and marker in self._syntax.skipped:
            self._take(len(marker))
            if marker == self._syntax.id_marker:
                self._state = self._model_id
        elif self._pending[0] == "{":
            self._value = ValueScanner()
            self._begin(self._name)
            self._state = self._arguments
        else:
            return self._fail()
        return True

    def _model_id(self) -> bool:
        """Skip the id that the model gives to its call."""
        rest = self._pending.lstrip(_ID_CHARACTERS)
        self._take(len(self._pending) - len(rest))
        if rest:
            self._state = self._before_arguments
        return bool(rest)

    def _arguments(self) -> bool:
        end = self._value.scan(self._pending, 0)
        self._emit_arguments(self._pending[:end])
        self._take(end)
        return self._end_call() if self._value.done else False

    def _begin(self, name: str) -> None:
        self._has_begun = True
        self._candidate = ""
        if not self._is_dropped():
            self._events.append(ToolCallStart(self._num_calls, self._syntax.make_id(), name))

    def _emit_arguments(self, text: str) -> None:
        if text and not self._is_dropped():
            self._events.append(ToolCallArguments(self._num_calls, text))

    def _is_dropped(self) -> bool:
        return self._max_calls is not None and self._num_calls >= self._max_calls

    def _end_call(self) -> bool:
        self._num_calls += 1
        self._num_in_section += 1
        self._has_begun = False
        self._state = self._between
        return True

    def _fail(self) -> bool:
        """Go on with content after a malformed call, which is content up to here unless it has begun."""
        self._num_calls += self._has_begun
        self._has_begun = False
        self._emit_content(self._candidate)
        self._candidate = ""
        self._state = self._content
        return True
