"""Requests of a command, before the engine accepts them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.cli.results import OwnFormat, ResultFormat
from penstock.config import vllm
from penstock.config.checks import did_you_mean
from penstock.contract import Part, SamplingParams
from penstock.engine.inputs.conversation import render_prompt
from penstock.engine.inputs.input_processor import AcceptedRequest, located
from penstock.engine.inputs.prompts import with_parts
from penstock.engine.session import Session
from penstock.errors import InvalidParameter, InvalidRequest

# Options of `render_prompt` beside `messages`, with their JSON types.
TEMPLATE_FIELDS: dict[str, tuple[type, str]] = {
    "tools": (list, "a list of objects"),
    "chat_template": (str, "text"),
    "chat_template_kwargs": (dict, "an object"),
    "add_generation_prompt": (bool, "true or false"),
    "continue_final_message": (bool, "true or false"),
}
_MOST_NAMED = 20


class Messages(NamedTuple):
    """Chat messages as a prompt. options: of `render_prompt`. cache_salt: of the prompt."""

    messages: Any
    options: dict[str, Any]
    cache_salt: Any = None


class Work(NamedTuple):
    """Request of a command. where: its place, for errors. format: of its results. error: why it cannot run, if so.

    priority: as in `Session.accept`.
    """

    prompt: Any
    sampling_params: SamplingParams
    where: str = ""
    format: ResultFormat = OwnFormat()
    error: InvalidRequest | None = None
    priority: Any = 0

    def accepted(self, session: Session, number: int, parts: Iterable[Part] = ()) -> AcceptedRequest:
        """Let the engine check the request. Raises InvalidRequest. number: index of the request. parts: its parts."""
        if self.error is not None:
            raise self.error
        prompt, params = self.prompt, self.sampling_params
        with located(self.where):
            if isinstance(prompt, Messages):
                rendered = render_prompt(session.tokenizer, prompt.messages, **prompt.options)
                prompt = {**rendered, "cache_salt": prompt.cache_salt}
            prompt, params = self.format.task(prompt, params, session.tokenizer)
        prompt = with_parts(prompt, parts)
        return session.accept(prompt, params, self.where, priority=self.priority, number=number)


def accept_all(
    session: Session,
    work: Sequence[Work],
    answered: Collection[int] = (),
    parts: Collection[Part] = (),
) -> tuple[dict[int, AcceptedRequest], dict[int, InvalidRequest]]:
    """Return the accepted requests, and the errors of the others, by index; without those in `answered`.

    parts: of all requests.
    """
    accepted: dict[int, AcceptedRequest] = {}
    refused: dict[int, InvalidRequest] = {}
    for index, item in enumerate(work):
        if index in answered:
            continue
        try:
            accepted[index] = item.accepted(session, index, parts)
        except InvalidRequest as error:
            refused[index] = error
    return accepted, refused


def raise_refusals(refused: Mapping[int, InvalidRequest], num_requests: int) -> None:
    """Raise an InvalidRequest with all errors, or the only one, if there are any."""
    errors = list(refused.values())
    if not errors:
        return
    if len(errors) == 1:
        raise errors[0]
    named = "\n".join(f"  {error}" for error in errors[:_MOST_NAMED])
    more = f"\n  and {len(errors) - _MOST_NAMED:,} more" if len(errors) > _MOST_NAMED else ""
    raise InvalidRequest(f"{len(errors):,} of {num_requests:,} requests cannot be answered:\n{named}{more}")


def unknown_field(name: str, value: Any, allowed: Sequence[str]) -> InvalidParameter:
    """Error for an unknown field, with a suggestion or all fields."""
    advice = did_you_mean(name, allowed, most=1) or f" Allowed: {', '.join(allowed)}."
    return InvalidParameter(f"There is no field {name} (given: {value!r}).{advice}")


def with_parameters(
    defaults: SamplingParams, fields: Mapping[str, Any], known: Collection[str], allowed: Sequence[str]
) -> SamplingParams:
    """Return `defaults` with the parameters of a line. known: allowed parameters; allowed: all fields, for errors.

    Raises InvalidParameter, and UnsupportedParameter for parameters of vLLM's that Penstock does not have.
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
