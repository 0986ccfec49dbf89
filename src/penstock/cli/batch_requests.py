"""Reader of OpenAI's batch format."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.cli.batch_results import BatchFormat, Endpoint
from penstock.cli.work import TEMPLATE_FIELDS, Messages, Work, take_template_fields, unknown_field, with_parameters
from penstock.contract import SamplingParams
from penstock.contract import param_checks as check
from penstock.engine.inputs.input_processor import located
from penstock.errors import InvalidParameter, InvalidRequest

logger = logging.getLogger(__name__)

_LINE_FIELDS = ("custom_id", "method", "url", "body")
# A request in Penstock's own format has one of these.
_OWN_FIELDS = ("prompt", "prompt_token_ids", "messages")
_URLS = {endpoint.value: endpoint for endpoint in Endpoint}
# Sampling parameters with the same meaning in a body. The others have other names or meanings there, or none.
_SAMPLING_FIELDS = frozenset(SamplingParams.__struct_fields__) - {
    "logprobs",
    "prompt_logprobs",
    "detokenize",
    "output_kind",
    "bad_words_token_ids",
    "all_stop_token_ids",
}
_CHAT_FIELDS = ("messages", *TEMPLATE_FIELDS, "max_completion_tokens", "top_logprobs")
_FIELDS = {
    endpoint: ("model", *own, "logprobs", "response_format", "cache_salt", "priority", *sorted(_SAMPLING_FIELDS))
    for endpoint, own in ((Endpoint.CHAT, _CHAT_FIELDS), (Endpoint.COMPLETION, ("prompt",)))
}
# Fields without an effect on the answer.
_WITHOUT_EFFECT = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
)
# Fields with a single supported behaviour, and the values that ask for it.
_ONLY: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "modalities": (["text"],),
}

_RESPONSE_FORMAT = "response_format"
# Required fields of response_format, by type. None: a structural tag, whose fields are checked with it.
_FORMAT_FIELDS: dict[str, tuple[str, ...] | None] = {
    "text": (),
    "json_object": (),
    "json_schema": ("json_schema",),
    "grammar": ("grammar",),
    "structural_tag": None,
}
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")


def read_batch_lines(
    lines: Sequence[tuple[str, dict[str, Any] | InvalidRequest]],
    names: Mapping[str, str],
    defaults: SamplingParams,
    model: str,
) -> dict[str, Work]:
    """Read the requests of lines in this format, and of broken lines beside them.

    lines: place of each line, for errors, and its fields, or why it has none. names: custom_id of lines without fields,
    if it could be read. defaults: of parameters that a body does not have. model: the running model. A file for
    one other model is answered by it, with a warning; among several names only the running model's is accepted.

    Returns the requests by place; errors are in their `Work.error`.
    """
    if not names and not any(_is_batch_line(fields) for _, fields in lines):
        return {}
    reader = _Reader(defaults, names, model, {_model_of(fields) for _, fields in lines} - {None})
    return {where: reader.read(where, fields) for where, fields in lines if _is_ours(fields)}


class _Reader:
    """Reader of the lines of a file. named: models of its requests."""

    def __init__(self, defaults: SamplingParams, names: Mapping[str, str], model: str, named: set[Any]) -> None:
        self._defaults = defaults
        self._names = names
        self._model = model
        self._answers_any = len(named) <= 1
        self._where_of: dict[str, str] = {}
        if self._answers_any and named - {model}:
            logger.warning("The requests are for the model %r; %r answers them.", *named, model)

    def read(self, where: str, fields: dict[str, Any] | InvalidRequest) -> Work:
        given = {} if isinstance(fields, InvalidRequest) else fields
        name = given.get("custom_id", self._names.get(where))
        form = BatchFormat(name, _URLS.get(_text(given.get("url"))) or Endpoint.CHAT, self._model)
        try:
            with located(where):
                if isinstance(fields, InvalidRequest):
                    raise fields
                prompt, params, priority = self._read(where, fields)
        except InvalidRequest as error:
            return Work(None, self._defaults, where, form, error)
        form = msgspec.structs.replace(form, num_logprobs=params.logprobs, skips_special=params.skip_special_tokens)
        return Work(prompt, params, where, form, priority=priority)

    def _read(self, where: str, fields: dict[str, Any]) -> tuple[Any, SamplingParams, Any]:
        endpoint = self._check_line(where, fields)
        body = {key: value for key, value in _whole_body(fields["body"]).items() if value is not None}
        self._check_model(body.pop("model", None))
        choice = body.get("tool_choice")
        _take_only(body)
        cache_salt, priority = body.pop("cache_salt", None), body.pop("priority", 0)
        if endpoint is Endpoint.CHAT:
            prompt: Any = _take_messages(body, cache_salt, with_tools=choice != "none")
            params = _chat_params(body)
        else:
            prompt = {**_take_prompt(body), "cache_salt": cache_salt}
            params = {"logprobs": body.pop("logprobs", None)}
        params |= _take_response_format(body)
        known = _SAMPLING_FIELDS | params.keys()
        return prompt, with_parameters(self._defaults, {**body, **params}, known, _FIELDS[endpoint]), priority

    def _check_line(self, where: str, fields: dict[str, Any]) -> Endpoint:
        for key, value in fields.items():
            if key not in _LINE_FIELDS:
                raise unknown_field(key, value, _LINE_FIELDS)
        name = fields.get("custom_id")
        if not isinstance(name, str):
            raise InvalidRequest(f"custom_id={name!r} is not valid. Allowed: text, which the answer is found by.")
        first = self._where_of.setdefault(name, where)
        if first != where:
            raise InvalidRequest(f"custom_id={name!r} is that of {first} too. Give each request one of its own.")
        method, url = fields.get("method", "POST"), _text(fields.get("url"))
        if method != "POST":
            raise InvalidRequest(f"method={method!r} is not valid. Allowed: 'POST'.")
        if url not in _URLS:
            raise InvalidRequest(f"url={fields.get('url')!r} is not valid. Allowed: {', '.join(_URLS)}.")
        if not isinstance(fields.get("body"), dict):
            raise InvalidRequest(f"body={fields.get('body')!r} is not valid. Allowed: an object with the request.")
        return _URLS[url]

    def _check_model(self, named: Any) -> None:
        if named is None or named == self._model or (self._answers_any and isinstance(named, str)):
            return
        raise InvalidRequest(
            f"model={named!r} is not the one that runs. Allowed: {self._model!r}, none, or the same in all requests."
        )


def _is_batch_line(fields: dict[str, Any] | InvalidRequest) -> bool:
    return not isinstance(fields, InvalidRequest) and not fields.keys().isdisjoint(_LINE_FIELDS)


def _is_ours(fields: dict[str, Any] | InvalidRequest) -> bool:
    """Whether a line is answered in the batch format: all but requests in Penstock's own format."""
    return isinstance(fields, InvalidRequest) or _is_batch_line(fields) or fields.keys().isdisjoint(_OWN_FIELDS)


def _model_of(fields: dict[str, Any] | InvalidRequest) -> str | None:
    body = None if isinstance(fields, InvalidRequest) else fields.get("body")
    return (_text(body.get("model")) or None) if isinstance(body, dict) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _whole_body(body: dict[str, Any]) -> dict[str, Any]:
    """Merge the fields of `extra_body` into a body, as clients do."""
    extra = body.get("extra_body")
    if extra is None:
        return body
    if not isinstance(extra, dict):
        raise InvalidParameter(f"extra_body={extra!r} is not valid. Allowed: an object with fields of the body.")
    return {**{key: value for key, value in body.items() if key != "extra_body"}, **extra}


def _take_only(body: dict[str, Any]) -> None:
    """Remove fields without an effect. Raises InvalidParameter for unsupported values."""
    for key in _WITHOUT_EFFECT & body.keys():
        del body[key]
    for key in _ONLY.keys() & body.keys():
        value = body.pop(key)
        if value not in _ONLY[key]:
            raise InvalidParameter(f"{key}={value!r} is not available. Allowed: {' or '.join(map(repr, _ONLY[key]))}.")


def _take_messages(body: dict[str, Any], cache_salt: Any, *, with_tools: bool) -> Messages:
    if "messages" not in body:
        raise InvalidRequest("messages is missing. Give the conversation.")
    options = take_template_fields(body)
    if not with_tools:
        options.pop("tools", None)
    return Messages(body.pop("messages"), options, cache_salt)


def _take_prompt(body: dict[str, Any]) -> dict[str, Any]:
    """Take the prompt, text or token ids, or a list of one."""
    prompt = body.pop("prompt", None)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        (prompt,) = prompt
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, list) and not any(isinstance(part, (str, list)) for part in prompt):
        return {"prompt_token_ids": prompt}
    several = isinstance(prompt, list)
    given = f"prompt has {len(prompt)} prompts" if several else f"prompt={prompt!r} is not valid"
    raise InvalidRequest(f"{given}. Allowed: one prompt per line, text or token ids.")


def _chat_params(body: dict[str, Any]) -> dict[str, Any]:
    """Take the fields that are named differently in a chat, as sampling parameters."""
    params: dict[str, Any] = {}
    if "max_completion_tokens" in body:
        params["max_tokens"] = body.pop("max_completion_tokens")
        body.pop("max_tokens", None)
    wants, most = body.pop("logprobs", False), body.pop("top_logprobs", None)
    check.check_flag("logprobs", wants)
    if most is not None:
        check.check_integer("top_logprobs", most, 0, None, "0 or more")
        if not wants:
            raise check.invalid("top_logprobs", most, "only with logprobs=true")
    params["logprobs"] = (most or 0) if wants else None
    return params


def _take_response_format(body: dict[str, Any]) -> dict[str, Any]:
    """Take `response_format` out of a body, as sampling parameters; empty if it has none.

    The type "text" removes the command line's constraint. Raises InvalidParameter.
    """
    if _RESPONSE_FORMAT not in body:
        return {}
    given = body.pop(_RESPONSE_FORMAT)
    if "structured_outputs" in body:
        raise InvalidParameter(f"There are {_RESPONSE_FORMAT} and structured_outputs. Give one of them.")
    return {"structured_outputs": _constraint(given)}


def _constraint(given: Any) -> dict[str, Any] | None:
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(kind, str) or kind not in _FORMAT_FIELDS:
        types = ", ".join(map(repr, _FORMAT_FIELDS))
        raise InvalidParameter(
            f"{_RESPONSE_FORMAT}={given!r} is not available. Allowed: an object whose type is one of {types}."
        )
    fields = _FORMAT_FIELDS[kind]
    if fields is not None:
        _check_fields(_RESPONSE_FORMAT, given, ("type", *fields), fields)
    if kind == "json_schema":
        schema = given["json_schema"]
        _check_fields(f"{_RESPONSE_FORMAT}.json_schema", schema, _SCHEMA_FIELDS, ("schema",))
        return {"json": schema["schema"]}
    if kind == "json_object":
        return {"json_object": True}
    if kind == "grammar":
        return {"grammar": given["grammar"]}
    return {"structural_tag": given} if kind == "structural_tag" else None


def _check_fields(name: str, given: Any, allowed: tuple[str, ...], needed: tuple[str, ...]) -> None:
    if not isinstance(given, dict):
        raise InvalidParameter(f"{name}={given!r} is not valid. Allowed: an object with {', '.join(allowed)}.")
    for field in given:
        if field not in allowed:
            raise InvalidParameter(f"{name} has a field {field!r}. Allowed: {', '.join(allowed)}.")
    for field in needed:
        if given.get(field) is None:
            raise InvalidParameter(f"{name}.{field} is missing. Give it, beside {', '.join(allowed)}.")
