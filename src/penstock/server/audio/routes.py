"""Routes `/v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from penstock.engine.output.outputs import RequestOutput
from penstock.engine.transcription.attempts import THRESHOLD_OPTIONS
from penstock.engine.transcription.speech_tokens import TASKS
from penstock.engine.transcription.transcriber import Rounds, Speech, Transcriber
from penstock.engine.transcription.transcript import usage_of
from penstock.errors import UnsupportedFeature
from penstock.server.audio.form import TranscriptionForm
from penstock.server.http.body import BodyRoute
from penstock.server.http.connection import DONE, event
from penstock.server.http.errors import ApiError, json_response, refusals
from penstock.server.protocol.responses import errors, form_of_file
from penstock.server.requests.generation import Generation, Submission
from penstock.server.routes.common import answer, served_model, whole_outputs
from penstock.server.served_model import ServedModel

_Result = TypeVar("_Result")
router = APIRouter(route_class=BodyRoute)
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The transcript, in the form of response_format."},
    **errors(400, 401, 404, 408, 413, 429, 500, 503),
}
_FORM = form_of_file(
    {
        **{name: {"type": "string"} for name in ("model", "language", "prompt", "response_format")},
        "stream": {"type": "boolean"},
        "timestamp_granularities[]": {"type": "array", "items": {"type": "string", "enum": ["segment", "word"]}},
        "temperature": {"anyOf": [{"type": "number"}, {"type": "string"}]},
        **{name: {"type": "number"} for name in THRESHOLD_OPTIONS},
    }
)


@router.post("/v1/audio/transcriptions", responses=_RESPONSES, openapi_extra=_FORM)
async def create_transcription(http: Request) -> Response:
    """Transcribe speech."""
    return await _transcribe(http, TASKS[0])


@router.post("/v1/audio/translations", responses=_RESPONSES, openapi_extra=_FORM)
async def create_translation(http: Request) -> Response:
    """Translate speech into English."""
    return await _transcribe(http, TASKS[1])


async def _transcribe(http: Request, task: str) -> Response:
    with refusals(["file", "language", "task"], {}):
        form = await TranscriptionForm.read(http, task)
        model = await served_model(http).named(form.model)
        transcriber = _transcriber(http, model)
        speech = await asyncio.to_thread(transcriber.speech, form.file, form.asked, "file")
        id = f"transcription-{uuid.uuid4().hex}"
        if form.is_stream:
            language = await _run(http, Rounds(speech.language()), id)
            submissions = [Submission(*one, f"{id}-{index}") for index, one in enumerate(speech.round(language))]
            return await answer(http, model, submissions, _Events(speech), is_stream=True, timeout_s=None)
        transcript = await _run(http, Rounds(speech.transcription()), id)
    written = transcript.written(form.response_format)
    return PlainTextResponse(written) if isinstance(written, str) else json_response(written)


def _transcriber(http: Request, model: ServedModel) -> Transcriber:
    """The app's transcriber. Raises ApiError for a model that is none of speech."""
    state = http.app.state
    if not hasattr(state, "transcriber"):
        try:
            state.transcriber = Transcriber(model.engine.config, model.tokenizer, model.max_model_len)
        except UnsupportedFeature as error:
            raise ApiError(400, str(error), param="model") from error
    transcriber: Transcriber = state.transcriber
    return transcriber


async def _run(http: Request, rounds: Rounds[_Result], id: str) -> _Result:
    """Run rounds of prompts at the engine, and return their result; a thread makes them. id: of the requests."""
    outputs: Sequence[RequestOutput] = ()
    number = 0
    while (prompts := await asyncio.to_thread(rounds.after, outputs)) is not None:
        submissions = [Submission(*one, f"{id}-{number}-{index}") for index, one in enumerate(prompts)]
        outputs = await whole_outputs(http, submissions, None, served_model(http).parts)
        number += 1
    return rounds.result


class _Events:
    """Events of a stream: texts of the pieces in their order, then all of it."""

    def __init__(self, speech: Speech) -> None:
        self._speech = speech

    async def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Body of a whole answer, which a stream has none of."""
        raise NotImplementedError("streams only")

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Events of OpenAI's API: `transcript.text.delta`, and at the end `transcript.text.done`."""
        waiting: dict[int, str] = defaultdict(str)
        ended: set[int] = set()
        number, text = 0, ""
        async for index, output in generation.outputs():
            completion = output.outputs[0]
            waiting[index] += completion.text
            if completion.finish_reason is not None:
                ended.add(index)
            while number < len(self._speech.pieces):
                delta = waiting.pop(number, "")
                delta = delta if text else delta.lstrip()
                if delta:
                    text += delta
                    yield event({"type": "transcript.text.delta", "delta": delta})
                if number not in ended:
                    break
                number += 1
        yield event({"type": "transcript.text.done", "text": text.strip(), "usage": usage_of(self._speech.duration)})
        yield DONE
