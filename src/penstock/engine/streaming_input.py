"""A request that grows while it is served: its prompt comes in parts, and each part is answered in turn.

To the core a turn is the same request once more, removed and added again with a longer prompt: what was said before,
answers included, and the new part. The prefix cache has most of it. The last token of an answer was sampled and never
read by the model, and often is only what ended the turn, so it is left out of the next prompt, as in vLLM.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import aclosing
from typing import NamedTuple, TypeAlias

from penstock.contract import RequestOutputKind, SamplingParams
from penstock.engine.outputs import CompletionOutput, Logprob, RequestOutput
from penstock.engine.prompts import Prompt
from penstock.errors import InvalidParameter, InvalidRequest


class StreamingInput(NamedTuple):
    """A part of a prompt, and how it is to be answered; None takes the request's own parameters."""

    prompt: Prompt
    sampling_params: SamplingParams | None = None


# Serves one turn, given its whole prompt.
Turn: TypeAlias = Callable[[list[int], SamplingParams], AsyncGenerator[RequestOutput, None]]


async def generate_in_turns(
    inputs: AsyncIterable[StreamingInput],
    params: SamplingParams,
    encode_part: Callable[[Prompt, bool], Awaitable[list[int]]],
    run_turn: Turn,
) -> AsyncGenerator[RequestOutput, None]:
    """Answer each part when the one before has been answered; the last output, when no more parts come, is `finished`.

    params: for parts that bring none; its output_kind is the whole request's.
    encode_part: tokens of a part, given it and whether it is the first.
    run_turn: must give cumulative outputs for cumulative or final ones, and deltas for deltas.
    Raises InvalidRequest for a bad part, or when there is none.
    """
    context: list[int] = []
    said = _Said(params.output_kind)
    last: RequestOutput | None = None
    async for part in inputs:
        if not isinstance(part, StreamingInput):
            raise InvalidRequest(f"The prompt's stream gave a {type(part).__name__}. Allowed: StreamingInput.")
        turn_params = params if part.sampling_params is None else part.sampling_params
        _check(turn_params)
        context = context + await encode_part(part.prompt, last is None)
        async with aclosing(run_turn(context, turn_params)) as outputs:
            async for output in outputs:
                last = said.add(output)
                if params.output_kind is not RequestOutputKind.FINAL_ONLY:
                    yield last
        context = context + said.end_turn()[:-1]
        if last is not None and last.outputs[0].finish_reason in ("abort", "error"):
            break
    if last is None:
        raise InvalidRequest("The prompt's stream ended without a part. Give at least one.")
    yield said.final(last)


class _Said:
    """What has been answered in the turns before, to be put in front of cumulative outputs."""

    def __init__(self, kind: RequestOutputKind) -> None:
        self._is_delta = kind is RequestOutputKind.DELTA
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative_logprob = 0.0
        self._turn: list[CompletionOutput] = []

    def add(self, output: RequestOutput) -> RequestOutput:
        """The output of a turn as one of the whole request, which goes on."""
        completion = output.outputs[0]
        self._turn = [*self._turn, completion] if self._is_delta else [completion]
        output.finished = False
        if not self._is_delta:
            output.outputs = [self._with_earlier(completion)]
        return output

    def end_turn(self) -> list[int]:
        """Remember the turn's answer, and return its tokens."""
        token_ids = [token_id for completion in self._turn for token_id in completion.token_ids]
        self._text += "".join(completion.text for completion in self._turn)
        self._token_ids += token_ids
        for completion in self._turn:
            self._logprobs += completion.logprobs or []
        if self._turn:
            self._cumulative_logprob += self._turn[-1].cumulative_logprob or 0.0
        self._turn = []
        return token_ids

    def final(self, last: RequestOutput) -> RequestOutput:
        """The last output once more, as that of a finished request."""
        final = copy.copy(last)
        final.finished = True
        if self._is_delta:
            ended = copy.copy(last.outputs[0])
            ended.text, ended.token_ids, ended.logprobs = "", [], None if ended.logprobs is None else []
            final.outputs = [ended]
        return final

    def _with_earlier(self, completion: CompletionOutput) -> CompletionOutput:
        whole = copy.copy(completion)
        whole.text = self._text + completion.text
        whole.token_ids = self._token_ids + completion.token_ids
        if completion.logprobs is not None:
            whole.logprobs = self._logprobs + completion.logprobs
            whole.cumulative_logprob = self._cumulative_logprob + (completion.cumulative_logprob or 0.0)
        return whole


def _check(params: SamplingParams) -> None:
    if isinstance(params, SamplingParams) and params.n > 1:
        raise InvalidParameter(f"n={params.n} is not valid. Allowed: 1 for a prompt that comes in parts.")
