"""Messages of the harmony format, in which gpt-oss answers: their markers and headers, as text and as tokens.

    <|start|>ROLE to=RECIPIENT<|channel|>CHANNEL to=RECIPIENT <|constrain|>TYPE<|message|>TEXT<|end|>

The prompt ends with the first "<|start|>assistant". A message has at most one recipient, in either place. The last
message ends with <|return|>, or with <|call|> for a call. (OpenAI 2025,
https://cookbook.openai.com/articles/openai-harmony)
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Self

from penstock.errors import InvalidParameter
from penstock.structured.backend import TextTokenizer

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
ROLE = "assistant"
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
# Recipients: of calls, before the function's name, and of messages that are for the user.
FUNCTIONS = "functions."
_USERS = ("", "user", "all")

_PART = re.compile(
    rf"\s*(?:<\|start\|>(?P<role>(?:{ROLE})+|[^\s<]*)"
    r"|(?:to=|(?=functions\.))(?P<recipient>[^\s<{]*)"
    rf"|<\|channel\|>\s*(?P<channel>{ANALYSIS}|{COMMENTARY}|{FINAL})?"
    r"|<\|constrain\|>\s*[A-Za-z]*"
    r"|(?:json|code)\b)"
)


class Kind(Enum):
    """Meaning of a message's text."""

    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class Header(NamedTuple):
    """Header of a message. role, recipient, channel: empty where the header has none that is known."""

    role: str = ""
    recipient: str = ""
    channel: str = ""

    @property
    def function(self) -> str:
        """Name of the function that the message calls; empty if it calls none."""
        return self.recipient.removeprefix(FUNCTIONS) if self.recipient.startswith(FUNCTIONS) else ""

    @property
    def kind(self) -> Kind:
        """Meaning of the text behind a whole header. Text for other tools, or of another role, is reasoning."""
        if self.role not in ("", ROLE):
            return Kind.REASONING
        if self.function:
            return Kind.CALL
        is_for_user = self.recipient in _USERS and self.channel != ANALYSIS
        return Kind.CONTENT if is_for_user else Kind.REASONING


def read_header(text: str) -> Header:
    """Read a header by its parts, in any order and with any words between them.

    Of several channels or recipients the last one counts.
    """
    return functools.reduce(_with_part, _PART.finditer(text), Header())


def split_message(text: str) -> tuple[Header, str]:
    """Read a message without <|message|>: its header, and the text behind the header's parts."""
    header, end = Header(), 0
    while (part := _PART.match(text, end)) is not None:
        header, end = _with_part(header, part), part.end()
    return header, text[end:]


def _with_part(header: Header, part: re.Match[str]) -> Header:
    found = {name: value for name, value in part.groupdict().items() if value}
    if found.get("role", "").startswith(ROLE):
        found["role"] = ROLE
    return header._replace(**found)


def call_header(name: str) -> str:
    """Header of a call as the format's documentation writes it, from the message's start on."""
    return f"{START}{ROLE}{CHANNEL}{COMMENTARY} to={FUNCTIONS}{name} {CONSTRAIN}json{MESSAGE}"


class _Message(NamedTuple):
    """Tokens of a message: `header` up to <|message|>, which the text follows. begin, end: positions among tokens."""

    begin: int
    end: int
    header: tuple[int, ...]
    has_text: bool


@dataclass(frozen=True, slots=True)
class HarmonyTokens:
    """Token ids of the markers. encode, decode: with special tokens as such."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    start: int
    channel: int
    constrain: int
    message: int
    end: int
    return_: int
    call: int

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> Self:
        """Raises InvalidParameter for a tokenizer without the markers."""
        ids: list[int] = []
        for marker in (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL):
            encoded = tokenizer.encode(marker, add_special_tokens=False)
            if len(encoded) != 1:
                raise InvalidParameter(
                    f"reasoning_parser='openai_gptoss' needs a tokenizer with the token {marker}, which this model's "
                    "has not. Use the parser of the model's family, or 'custom'."
                )
            ids += encoded
        return cls(
            lambda text: tokenizer.encode(text, add_special_tokens=False),
            lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=False),
            *ids,
        )

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a message."""
        return self.end, self.return_, self.call

    def opened(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """Tokens of the model's message that a prompt leaves open, from <|start|> on; empty if it leaves none."""
        for position in range(len(prompt_token_ids) - 1, -1, -1):
            if prompt_token_ids[position] in self.ends:
                break
            if prompt_token_ids[position] == self.start:
                opened = list(prompt_token_ids[position:])
                return opened if read_header(self._header_of(opened)).role == ROLE else []
        return []

    def opened_header(self, prompt_token_ids: Sequence[int]) -> str:
        """Header of the model's message that a prompt leaves open, with <|message|> if its text has begun."""
        return self._header_of(self.opened(prompt_token_ids))

    def _header_of(self, opened: Sequence[int]) -> str:
        end = opened.index(self.message) + 1 if self.message in opened else len(opened)
        return self.decode(opened[:end])

    def num_reasoning_tokens(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> int:
        """Number of an output's tokens in messages that are reasoning, headers and ends included."""
        opened = self.opened(prompt_token_ids)
        messages = self._messages([*opened, *token_ids])
        return sum(
            message.end - max(message.begin, len(opened))
            for message in messages
            if message.has_text and read_header(self.decode(message.header)).kind is Kind.REASONING
        )

    def _messages(self, token_ids: Sequence[int]) -> Iterator[_Message]:
        begin, text_at = 0, None
        for position, token_id in enumerate([*token_ids, None]):
            is_end = token_id is None or token_id in self.ends
            if token_id == self.message and text_at is None:
                text_at = position
            elif is_end or (token_id in (self.start, self.channel) and text_at is not None):
                end = min(position + is_end, len(token_ids))
                header = tuple(token_ids[begin : position if text_at is None else text_at])
                yield _Message(begin, end, header, text_at is not None)
                begin, text_at = end, None
