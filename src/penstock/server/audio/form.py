"""Fields of a transcription request, from its form."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.datastructures import UploadFile

from penstock.contract import SamplingParams
from penstock.contract.param_checks import shown
from penstock.engine.transcription.attempts import THRESHOLD_OPTIONS, temperatures_of, thresholds_of
from penstock.engine.transcription.transcriber import Asked
from penstock.engine.transcription.transcript import FORMATS
from penstock.server.http.errors import ApiError

# Fields that are sampling parameters, with their types.
_SAMPLING: dict[str, type[int | float]] = {
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
    "repetition_penalty": float,
}
_GRANULARITIES = "timestamp_granularities[]"
_FIELDS = (
    *("file", "model", "prompt", "response_format", "stream", "language", "max_completion_tokens", "temperature"),
    *(_GRANULARITIES, *THRESHOLD_OPTIONS),
)
_MOST_FIELDS = 32
_WITH_SEGMENTS = ("verbose_json", "srt", "vtt")


@dataclass(frozen=True, slots=True)
class TranscriptionForm:
    """Fields of a request. file: content. response_format: one of `FORMATS`."""

    file: bytes
    model: str | None
    response_format: str
    is_stream: bool
    asked: Asked

    @classmethod
    async def read(cls, http: Request, task: str) -> TranscriptionForm:
        """Read the form of a request. Raises ApiError for a field that is missing, unknown or not valid."""
        kind = http.headers.get("Content-Type", "")
        if not kind.lower().startswith("multipart/form-data"):
            raise ApiError(400, f"The Content-Type is {kind!r}. Allowed: multipart/form-data with a boundary.")
        async with http.form(max_files=1, max_fields=_MOST_FIELDS) as form:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise ApiError(400, "file is missing. Send the sound as a file of the form.", param="file")
            # A field may have several values, and a list's name ends in brackets.
            values: dict[str, list[str]] = defaultdict(list)
            for name, value in form.multi_items():
                if name != "file":
                    values["temperature" if name == "temperature[]" else name].append(str(value))
            return cls.of(await file.read(), {name: ",".join(some) for name, some in values.items()}, task)

    @classmethod
    def of(cls, file: bytes, fields: Mapping[str, str], task: str) -> TranscriptionForm:
        """Read the fields beside the file; commas are between the values of one. Raises as `read`."""
        for name in fields.keys() - {*_FIELDS, *_SAMPLING}:
            raise ApiError(400, f"There is no field {name}. Allowed: {', '.join((*_FIELDS, *_SAMPLING))}.", param=name)
        response_format = _choice(fields, "response_format", FORMATS)
        is_stream = _choice(fields, "stream", ("false", "true")) == "true"
        if is_stream and response_format in _WITH_SEGMENTS:
            message = f"response_format={response_format!r} cannot be streamed. Allowed with stream: json, text."
            raise ApiError(400, message, param="response_format")
        granularities = set(fields.get(_GRANULARITIES, "segment").split(","))
        if granularities - {"segment", "word"}:
            message = f"{_GRANULARITIES}={shown(fields[_GRANULARITIES])} is not valid. Allowed: segment, word."
            raise ApiError(400, message, param=_GRANULARITIES)
        words = "word" in granularities
        if words and response_format != "verbose_json":
            message = f"{_GRANULARITIES}=word needs response_format=verbose_json, and it is {response_format}."
            raise ApiError(400, message, param=_GRANULARITIES)
        temperatures = temperatures_of(fields.get("temperature") or "0")
        given = {name: _number(fields, name, float) for name in THRESHOLD_OPTIONS if name in fields}
        if is_stream and (given or len(temperatures) > 1):
            name = next(iter(given), "temperature")
            message = (
                f"{name}={shown(fields[name])}: a stream cannot take its text back. Allowed: one temperature, and "
            )
            raise ApiError(400, message + "no thresholds; or ask without stream.", param=name)
        numbers = {name: _number(fields, name, kind) for name, kind in _SAMPLING.items() if name in fields}
        if "max_completion_tokens" in fields:
            numbers["max_tokens"] = _number(fields, "max_completion_tokens", int)
        return cls(
            file=file,
            model=fields.get("model") or None,
            response_format=response_format,
            is_stream=is_stream,
            asked=Asked(
                task=task,
                language=fields.get("language") or None,
                prompt=fields.get("prompt") or None,
                timestamps=response_format in _WITH_SEGMENTS,
                words=words,
                temperatures=temperatures,
                thresholds=thresholds_of(temperatures, given),
                params=SamplingParams(**{"max_tokens": None, **numbers}),
            ),
        )


def _choice(fields: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    value = fields.get(name) or allowed[0]
    if value.lower() not in allowed:
        raise ApiError(400, f"{name}={shown(value)} is not valid. Allowed: {', '.join(allowed)}.", param=name)
    return value.lower()


def _number(fields: Mapping[str, str], name: str, kind: type[int | float]) -> Any:
    try:
        return kind(fields[name])
    except ValueError:
        raise ApiError(400, f"{name}={shown(fields[name])} is no number.", param=name) from None
