"""Streaming input: a request whose prompt arrives in parts, each of which is answered in turn.

Each turn is a new request to the core with a longer prompt: the earlier parts and answers, mostly prefix-cache hits,
and the new part. The last token of an answer has no KV cache and is often a stop token, so it is left out of the next
prompt, as in vLLM.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import aclosing
from typing import NamedTuple, TypeAlias

from penstock.contract import RequestOutputKind, SamplingParams
from penstock.engine.inputs.prompts import Prompt
from penstock.engine.output.outputs import CompletionOutput, Logprob, RequestOutput
from penstock.errors import InvalidParameter, InvalidRequest


class StreamingInput(NamedTuple):
    """A part of a prompt, and its sampling parameters; None takes the request's own."""

    prompt: Prompt
    sampling_params: SamplingParams | None = None


# Runs one turn, given its whole prompt.
Turn: TypeAlias = Callable[[list[int], SamplingParams], AsyncGenerator[RequestOutput, None]]


async def generate_in_turns(
    inputs: AsyncIterable[StreamingInput],
    params: SamplingParams,
    encode_part: Callable[[Prompt, bool], Awaitable[list[int]]],
    run_turn: Turn,
) -> AsyncGenerator[RequestOutput, None]:
    """Answer each part after the previous answer; the last output, at the end of the input, is `finished`.

    params: for parts without any; its output_kind is the whole request's.
    encode_part: tokenises a part, given it and whether it is the first.
    run_turn: must return cumulative outputs for cumulative or final ones, and deltas for deltas.
    Raises InvalidRequest for a bad part, or when there is none.
    """
    prompt_token_ids: list[int] = []
    earlier = _EarlierTurns(params.output_kind)
    last: RequestOutput | None = None
    async for part in inputs:
        if not isinstance(part, StreamingInput):
            raise InvalidRequest(f"The prompt's stream gave a {type(part).__name__}. Allowed: StreamingInput.")
        turn_params = params if part.sampling_params is None else part.sampling_params
        _check(turn_params)
        prompt_token_ids = prompt_token_ids + await encode_part(part.prompt, last is None)
        async with aclosing(run_turn(prompt_token_ids, turn_params)) as outputs:
            async for output in outputs:
                last = earlier.add(output)
                if params.output_kind is not RequestOutputKind.FINAL_ONLY:
                    yield last
        prompt_token_ids = prompt_token_ids + earlier.end_turn()[:-1]
        if last is not None and last.outputs[0].finish_reason in ("abort", "error"):
            break
    if last is None:
        raise InvalidRequest("The prompt's stream ended without a part. Give at least one.")
    yield earlier.final(last)


class _EarlierTurns:
    """Answers of the earlier turns, which are prepended to cumulative outputs."""

    def __init__(self, kind: RequestOutputKind) -> None:
        self._is_delta = kind is RequestOutputKind.DELTA
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative_logprob = 0.0
        self._turn: list[CompletionOutput] = []

    def add(self, output: RequestOutput) -> RequestOutput:
        """Convert the output of a turn to one of the whole, unfinished request."""
        completion = output.outputs[0]
        self._turn = [*self._turn, completion] if self._is_delta else [completion]
        output.finished = False
        if not self._is_delta:
            output.outputs = [self._with_earlier(completion)]
        return output

    def end_turn(self) -> list[int]:
        """Append the turn's answer to the earlier ones, and return its tokens."""
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
        """Return the last output as that of a finished request."""
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
