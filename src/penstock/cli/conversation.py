"""A conversation with a model, message by message."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import Any

import msgspec

from penstock.contract import SamplingParams
from penstock.engine.conversation import render_prompt
from penstock.engine.input_processor import AcceptedRequest
from penstock.engine.outputs import RequestOutput
from penstock.engine.prompts import PromptDict
from penstock.engine.session import Session
from penstock.errors import InvalidParameter, InvalidRequest

# Parameters that are of no use to a chat, with the reason.
_MEANINGLESS = {
    "n": "a conversation goes on from one answer",
    "logprobs": "a chat shows no log-probabilities; penstock generate --logprobs does",
    "prompt_logprobs": "a chat shows no log-probabilities; a line of penstock generate --input may ask for them",
    "detokenize": "an answer without text could not be shown",
    "truncate_prompt_tokens": "a chat forgets its oldest messages by itself, and whole ones",
    "bad_words_token_ids": "the engine makes it of bad_words",
    "all_stop_token_ids": "the engine makes it of stop_token_ids",
    "output_kind": "an answer is shown as it comes",
}

# Tokens that an answer should have room for before the oldest messages are forgotten for it.
_ROOM_FOR_ANSWER = 64


class Conversation:
    """What was said, and what is to be said next.

    system: what the model is told beforehand. chat_template: a Jinja template instead of the model's own.
    messages: with the system's first, if there is one.
    num_forgotten: messages that no longer fitted into the context, and were left out for good.
    params: of the next answer; at first, and for a parameter that is unset, those that were given.

    Raises InvalidRequest when there is no template.
    """

    def __init__(
        self, session: Session, params: SamplingParams, *, system: str | None = None, chat_template: str | None = None
    ) -> None:
        self.params = params
        self._first_params = params
        self.messages: list[dict[str, str]] = []
        self.num_forgotten = 0
        self.last_output: RequestOutput | None = None
        self.max_model_len = session.max_model_len
        self._session = session
        self._template = chat_template
        self.system = system
        # What is slow to load, or missing, shows now.
        self._render([{"role": "user", "content": "Hello"}])

    @property
    def system(self) -> str | None:
        return self.messages[0]["content"] if self._has_system() else None

    @system.setter
    def system(self, text: str | None) -> None:
        self.messages = self.messages[self._has_system() :]
        if text is not None:
            self.messages.insert(0, {"role": "system", "content": text})

    def reset(self) -> None:
        """Forget what was said, but for the system's message."""
        self.messages = self.messages[: self._has_system()]

    def say(self, text: str) -> Generator[str, None, None]:
        """Say something, and take the answer as it comes. A generator that is closed early stops the answer there.

        Raises InvalidRequest, and forgets what was said, when there can be no answer.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            request = self._accept()
        except InvalidRequest:
            self.messages.pop()
            raise
        yield from self._answer(request)

    def undo(self) -> str | None:
        """Take back the last message and its answer; returns the message."""
        if not self._is_answered():
            return None
        self.messages.pop()
        return self.messages.pop()["content"]

    def set_parameter(self, name: str, value: Any) -> None:
        """Change a sampling parameter. Raises InvalidParameter if it cannot be, or not with the others."""
        _check_known(name, value)
        if name in _MEANINGLESS:
            raise InvalidParameter(f"{name} cannot be set: {_MEANINGLESS[name]}.")
        self.params = msgspec.structs.replace(self.params, **{name: value})

    def unset_parameter(self, name: str) -> None:
        """Change a sampling parameter back to what it was at first. Raises InvalidParameter."""
        _check_known(name, "default")
        self.params = msgspec.structs.replace(self.params, **{name: getattr(self._first_params, name)})

    def _answer(self, request: AcceptedRequest) -> Generator[str, None, None]:
        pieces: list[str] = []
        try:
            with closing(self._session.run([request])) as steps:
                for progress in steps:
                    output = progress.take_output()
                    self.last_output = output
                    text = output.outputs[0].text
                    if text:
                        pieces.append(text)
                        yield text
        finally:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def _accept(self) -> AcceptedRequest:
        """The request for the next answer, forgetting the oldest exchanges if need be."""
        room = min(self.params.max_tokens or 1, _ROOM_FOR_ANSWER)
        while True:
            prompt = self._render(self.messages)
            token_ids = self._session.tokenizer.encode(prompt["prompt"], add_special_tokens=False)
            is_too_long = len(token_ids) + room > self.max_model_len
            if not (is_too_long and self._forget_oldest()):
                return self._session.accept({**prompt, "prompt_token_ids": token_ids}, self.params)

    def _forget_oldest(self) -> bool:
        first = self._has_system()
        # The last message is the one to be answered.
        if len(self.messages) - first < 3:
            return False
        del self.messages[first : first + 2]
        self.num_forgotten += 2
        return True

    def _render(self, messages: list[dict[str, str]]) -> PromptDict:
        return render_prompt(self._session.tokenizer, messages, chat_template=self._template)

    def _has_system(self) -> int:
        return int(bool(self.messages) and self.messages[0]["role"] == "system")

    def _is_answered(self) -> bool:
        return len(self.messages) > self._has_system() and self.messages[-1]["role"] == "assistant"


def _check_known(name: str, value: Any) -> None:
    if name not in SamplingParams.__struct_fields__:
        # It knows what may have been meant.
        SamplingParams.from_dict({name: value})
        raise InvalidParameter(f"{name}={value!r} changes nothing: there is no such parameter.")
