"""One request of a command, before an engine has seen it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.cli.results import OwnFormat, ResultFormat
from penstock.config import vllm
from penstock.config.checks import did_you_mean
from penstock.contract import SamplingParams
from penstock.engine.conversation import render_prompt
from penstock.engine.input_processor import AcceptedRequest, located
from penstock.engine.session import Session
from penstock.errors import InvalidParameter, InvalidRequest

# What `messages` may come with: of `render_prompt`, with the type of JSON that it takes.
TEMPLATE_FIELDS: dict[str, tuple[type, str]] = {
    "tools": (list, "a list of objects"),
    "chat_template": (str, "text"),
    "chat_template_kwargs": (dict, "an object"),
    "add_generation_prompt": (bool, "true or false"),
    "continue_final_message": (bool, "true or false"),
}
_MOST_NAMED = 20


class Messages(NamedTuple):
    """A conversation to be answered. options: of `render_prompt`. cache_salt: of the prompt."""

    messages: Any
    options: dict[str, Any]
    cache_salt: Any = None


class Work(NamedTuple):
    """One request. where: what errors call it. format: how it is answered. error: why it cannot run, if so.

    priority: of `Session.accept`.
    """

    prompt: Any
    sampling_params: SamplingParams
    where: str = ""
    format: ResultFormat = OwnFormat()
    error: InvalidRequest | None = None
    priority: Any = 0

    def accepted(self, session: Session, number: int) -> AcceptedRequest:
        """The request, checked by the engine. Raises InvalidRequest, and what reading it raised.

        number: place among the requests, from 0.
        """
        if self.error is not None:
            raise self.error
        with located(self.where):
            prompt = self.prompt
            if isinstance(prompt, Messages):
                rendered = render_prompt(session.tokenizer, prompt.messages, **prompt.options)
                prompt = {**rendered, "cache_salt": prompt.cache_salt}
        return session.accept(prompt, self.sampling_params, self.where, priority=self.priority, number=number)


def accept_all(
    session: Session, work: Sequence[Work], answered: Collection[int] = ()
) -> tuple[dict[int, AcceptedRequest], dict[int, InvalidRequest]]:
    """The requests that can run, and why the others cannot, by their number from 0; without those in `answered`."""
    accepted: dict[int, AcceptedRequest] = {}
    refused: dict[int, InvalidRequest] = {}
    for index, item in enumerate(work):
        if index in answered:
            continue
        try:
            accepted[index] = item.accepted(session, index)
        except InvalidRequest as error:
            refused[index] = error
    return accepted, refused


def raise_refusals(refused: Mapping[int, InvalidRequest], num_requests: int) -> None:
    """Raise InvalidRequest that names what is wrong, or the one error itself, if there are any."""
    errors = list(refused.values())
    if not errors:
        return
    if len(errors) == 1:
        raise errors[0]
    named = "\n".join(f"  {error}" for error in errors[:_MOST_NAMED])
    more = f"\n  and {len(errors) - _MOST_NAMED:,} more" if len(errors) > _MOST_NAMED else ""
    raise InvalidRequest(f"{len(errors):,} of {num_requests:,} requests cannot be answered:\n{named}{more}")


def unknown_field(name: str, value: Any, allowed: Sequence[str]) -> InvalidParameter:
    """The error for a field that does not exist, with the one that was meant, perhaps, or else all."""
    advice = did_you_mean(name, allowed, most=1) or f" Allowed: {', '.join(allowed)}."
    return InvalidParameter(f"There is no field {name} (given: {value!r}).{advice}")


def with_parameters(
    defaults: SamplingParams, fields: Mapping[str, Any], known: Collection[str], allowed: Sequence[str]
) -> SamplingParams:
    """The parameters of a line, in place of the defaults. known: those that it may have; allowed: all of its fields.

    Raises InvalidParameter; UnsupportedParameter for those of vLLM's that Penstock does not have.
    """
    own = vllm.parameters_as_ours(fields, SamplingParams.__struct_fields__)
    for key, value in own.items():
        if key not in known:
            raise unknown_field(key, value, allowed)
    return msgspec.structs.replace(defaults, **own)


def take_template_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Take the options of `render_prompt` out of a line's fields. Raises InvalidParameter."""
    options = {key: fields.pop(key) for key in TEMPLATE_FIELDS if key in fields}
    for key, value in options.items():
        kind, allowed = TEMPLATE_FIELDS[key]
        if value is not None and not isinstance(value, kind):
            raise InvalidParameter(f"{key}={value!r} is not valid. Allowed: {allowed}.")
    return {key: value for key, value in options.items() if value is not None}
