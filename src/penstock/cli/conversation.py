"""A conversation with a model, message by message."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import Any

import msgspec

from penstock.cli.media import Content
from penstock.contract import SamplingParams
from penstock.engine.inputs.conversation import render_prompt
from penstock.engine.inputs.input_processor import AcceptedRequest
from penstock.engine.inputs.prompts import PromptDict
from penstock.engine.output.outputs import RequestOutput
from penstock.engine.session import Session
from penstock.errors import ContextTooLong, InvalidParameter, InvalidRequest

# Sampling parameters that a chat refuses, with the reason.
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

# Tokens of the context that are kept free for an answer, by forgetting the oldest messages.
_ROOM_FOR_ANSWER = 64


class Conversation:
    """Messages of a conversation, and generation of the next answer.

    system: system message. chat_template: Jinja template instead of the model's own.
    messages: all messages, with the system message first.
    num_forgotten: messages that were dropped since they no longer fitted into the context.
    params: sampling parameters of the next answer.

    Raises InvalidRequest without a chat template.
    """

    def __init__(
        self, session: Session, params: SamplingParams, *, system: str | None = None, chat_template: str | None = None
    ) -> None:
        self.params = params
        self._first_params = params
        self.messages: list[dict[str, Any]] = []
        self.num_forgotten = 0
        self.last_output: RequestOutput | None = None
        self.max_model_len = session.max_model_len
        self._session = session
        self._template = chat_template
        self.system = system
        # Loads the template, or fails, before the first message.
        self._render([{"role": "user", "content": "Hello"}])

    @property
    def system(self) -> str | None:
        return str(self.messages[0]["content"]) if self._has_system() else None

    @system.setter
    def system(self, text: str | None) -> None:
        self.messages = self.messages[self._has_system() :]
        if text is not None:
            self.messages.insert(0, {"role": "system", "content": text})

    def reset(self) -> None:
        """Forget all messages except the system message."""
        self.messages = self.messages[: self._has_system()]

    def say(self, content: Content) -> Generator[str, None, None]:
        """Add a message and stream the answer. Closing the generator stops the answer.

        Raises InvalidRequest, and drops the message, if it cannot be answered.
        """
        self.messages.append({"role": "user", "content": content})
        try:
            request = self._accept()
        except InvalidRequest:
            self.messages.pop()
            raise
        yield from self._answer(request)

    def undo(self) -> Content | None:
        """Remove the last message and its answer; return the message's content."""
        if not self._is_answered():
            return None
        self.messages.pop()
        content: Content = self.messages.pop()["content"]
        return content

    def set_parameter(self, name: str, value: Any) -> None:
        """Change a sampling parameter. Raises InvalidParameter if it is invalid, also together with the others."""
        _check_known(name, value)
        if name in _MEANINGLESS:
            raise InvalidParameter(f"{name} cannot be set: {_MEANINGLESS[name]}.")
        self.params = msgspec.structs.replace(self.params, **{name: value})

    def unset_parameter(self, name: str) -> None:
        """Reset a sampling parameter to its initial value. Raises InvalidParameter."""
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
        """Create the request of the next answer, forgetting the oldest messages if it does not fit."""
        room = min(self.params.max_tokens or 1, _ROOM_FOR_ANSWER)
        while True:
            prompt = self._render(self.messages)
            if "multi_modal_data" in prompt:
                # How many tokens an image has is known when it is processed.
                try:
                    return self._session.accept(prompt, self.params)
                except ContextTooLong:
                    if self._forget_oldest():
                        continue
                    raise
            token_ids = self._session.tokenizer.encode(prompt["prompt"], add_special_tokens=False)
            is_too_long = len(token_ids) + room > self.max_model_len
            if not (is_too_long and self._forget_oldest()):
                return self._session.accept({**prompt, "prompt_token_ids": token_ids}, self.params)

    def _forget_oldest(self) -> bool:
        first = self._has_system()
        # The last message is to be answered.
        if len(self.messages) - first < 3:
            return False
        del self.messages[first : first + 2]
        self.num_forgotten += 2
        return True

    def _render(self, messages: list[dict[str, Any]]) -> PromptDict:
        return render_prompt(self._session.tokenizer, messages, chat_template=self._template)

    def _has_system(self) -> int:
        return int(bool(self.messages) and self.messages[0]["role"] == "system")

    def _is_answered(self) -> bool:
        return len(self.messages) > self._has_system() and self.messages[-1]["role"] == "assistant"


def _check_known(name: str, value: Any) -> None:
    if name not in SamplingParams.__struct_fields__:
        # Raises with a suggestion for a known misspelling.
        SamplingParams.from_dict({name: value})
        raise InvalidParameter(f"{name}={value!r} changes nothing: there is no such parameter.")
