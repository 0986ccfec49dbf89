"""Request intake of an asynchronous engine: requests are checked and tokenised without blocking an event loop."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from penstock.contract import PoolingParams, SamplingParams
from penstock.contract.param_checks import shown
from penstock.engine.inputs.input_processor import AcceptedRequest, InputProcessor
from penstock.engine.inputs.prompts import Prompt, PromptDict
from penstock.errors import InvalidParameter

_Result = TypeVar("_Result")
_NUM_THREADS = 2


class RequestIntake:
    """Runs an `InputProcessor` for event loops: in the loop if it is quick, else in a thread.

    check_running: raises the error that ended the engine.
    """

    def __init__(self, processor: InputProcessor, check_running: Callable[[], None]) -> None:
        self._processor = processor
        self._check_running = check_running
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="penstock-intake")

    async def process(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        request_id: str | None,
        priority: int,
    ) -> AcceptedRequest:
        """Check a prompt and its parameters, and create the request; raises what `InputProcessor.process` does.

        request_id: None makes one up.
        """
        name = checked_id(request_id)
        is_quick = self._processor.is_quick(prompt, params)
        # The seed follows the order of arrival, not the timing of the threads.
        number = None if is_quick else self._processor.take_number()
        loaded = await self._processor.media_intake.load_async(prompt)

        def work() -> AcceptedRequest:
            return self._processor.process(loaded, params, request_id=name, priority=priority, number=number)

        return work() if is_quick else await self.in_thread(work)

    async def encode_part(self, part: Prompt, params: SamplingParams, is_first: bool) -> list[int]:
        """Tokenise a part of a streamed prompt; raises what `InputProcessor.encode_part` does."""
        if self._processor.is_quick(part, params):
            return self._processor.encode_part(part, is_first)
        return await self.in_thread(lambda: self._processor.encode_part(part, is_first))

    async def encode_media_prompt(self, prompt: PromptDict, *, add_special_tokens: bool) -> list[int]:
        """Tokenise a text with media; raises what `InputProcessor.encode_media_prompt` and `MediaIntake.load` do."""
        loaded: Any = await self._processor.media_intake.load_async(prompt)
        return await self.in_thread(
            lambda: self._processor.encode_media_prompt(loaded, add_special_tokens=add_special_tokens)
        )

    async def in_thread(self, work: Callable[[], _Result]) -> _Result:
        """Result of work that would block the event loop."""
        self._check_running()
        return await asyncio.wrap_future(self._threads.submit(work))

    def shutdown(self) -> None:
        """End the threads after their current work, without waiting."""
        self._processor.media_intake.shutdown()
        self._threads.shutdown(wait=False)


def checked_id(request_id: Any) -> str:
    """Return the caller's request id, or a new one for None. Raises InvalidParameter for what is not a text."""
    if request_id is None:
        return f"request-{uuid.uuid4().hex}"
    if not isinstance(request_id, str) or not request_id:
        raise InvalidParameter(
            f"request_id={shown(request_id)} is not valid. Allowed: a text that is not empty, or None."
        )
    return request_id
