"""Beam search: the continuations with the highest total log-probability.

Every step runs one single-token request per beam and expands the beams by its top log-probabilities; the common prefix
of the beams comes from the prefix cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import msgspec

from penstock.contract import SamplingParams
from penstock.contract import param_checks as check
from penstock.contract.named_parameters import NamedParameters
from penstock.engine.inputs.prompts import Prompt
from penstock.engine.messages import EngineRequest
from penstock.engine.output.outputs import Logprob
from penstock.engine.session import Session
from penstock.errors import InvalidParameter, PenstockError
from penstock.text.tokenizer import Tokenizer


class BeamSearchParams(
    msgspec.Struct, metaclass=NamedParameters, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Parameters of a beam search, with vLLM's names and defaults.

    beam_width: beams that are kept at each step, and sequences returned.
    max_tokens: maximum number of generated tokens per sequence.
    ignore_eos: continue after the end-of-sequence token.
    temperature: 0 or more; sampling temperature of the steps. Sequences are ranked by the log-probabilities that the
        steps report: the model's own, whatever the temperature, unless the engine's `logprobs_mode` is
        "processed_logprobs".
    length_penalty: sequences are ranked by their log-probability, divided by their length (prompt included) to this
        power; more than 0 favours long ones.
    include_stop_str_in_output: whether a sequence keeps its end-of-sequence token.
    structured_outputs: must be None; beams are not constrained.

    Raises InvalidParameter when a value is outside its range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None

    def __post_init__(self) -> None:
        check.check_integer("beam_width", self.beam_width, 1, None, "at least 1")
        check.check_integer("max_tokens", self.max_tokens, 1, None, "at least 1")
        if self.structured_outputs is not None:
            allowed = "None with beam search, whose beams are not constrained; use n outputs of generate instead"
            raise check.invalid("structured_outputs", self.structured_outputs, allowed)
        check.check_flag("ignore_eos", self.ignore_eos)
        check.check_flag("include_stop_str_in_output", self.include_stop_str_in_output)
        check.check_number("length_penalty", self.length_penalty, -math.inf, math.inf, "a finite number")
        check.check_number("temperature", self.temperature, 0.0, 1e4, "0 to 10000")


class BeamSearchSequence(msgspec.Struct, kw_only=True):
    """Sequence of a beam search.

    tokens, text: prompt and continuation. logprobs: per generated token, as in `CompletionOutput`.
    cum_logprob: of the continuation. finish_reason: "stop" (the end-of-sequence token) or "length".
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float = 0.0
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class BeamSearchOutput(msgspec.Struct, kw_only=True):
    """The best sequences for a prompt, best first."""

    sequences: list[BeamSearchSequence]


def beam_search(
    session: Session,
    prompts: Sequence[Prompt],
    params: BeamSearchParams,
    begin: Callable[[], None],
) -> list[BeamSearchOutput]:
    """Search for the likeliest continuations of each prompt.

    begin: called once the prompts are checked.

    A finished sequence is set aside and its beam given to the next best, until `max_tokens` or the context's end.
    Raises InvalidRequest (InvalidParameter, ContextTooLong) for a bad prompt, PenstockError when a step fails.
    """
    if not isinstance(params, BeamSearchParams):
        raise check.invalid("params", params, "BeamSearchParams")
    several = len(prompts) > 1
    names = [f"prompts[{index}]" if several else "" for index in range(len(prompts))]
    searches = [_start(session, prompt, params, name) for prompt, name in zip(prompts, names, strict=True)]
    begin()
    while active := [search for search in searches if search.is_active]:
        _advance(session, active, params)
    return [search.output(session.tokenizer) for search in searches]


class _Search:
    """Beam search of one prompt."""

    def __init__(self, start: EngineRequest, params: BeamSearchParams, max_tokens: int) -> None:
        self.params = params
        self.beams = [BeamSearchSequence(tokens=start.prompt_token_ids, logprobs=[])]
        self._cache_salt, self._parts = start.cache_salt, start.parts
        self._eos_token_ids = frozenset() if params.ignore_eos else start.eos_token_ids
        self._completed: list[BeamSearchSequence] = []
        self._num_tokens_left = max_tokens

    @property
    def is_active(self) -> bool:
        return self._num_tokens_left > 0 and bool(self.beams)

    def prompts(self) -> list[Prompt]:
        """The beams as prompts of the next step."""
        return [
            {"prompt_token_ids": beam.tokens, "cache_salt": self._cache_salt, "parts": self._parts}
            for beam in self.beams
        ]

    def advance(self, rows: Sequence[dict[int, Logprob]]) -> None:
        """Expand each beam by its most likely tokens, and keep the `beam_width` best candidates."""
        candidates: list[tuple[float, int, int]] = []
        for index, (beam, row) in enumerate(zip(self.beams, rows, strict=True)):
            for token_id, value in row.items():
                cum_logprob = beam.cum_logprob + value.logprob
                if token_id in self._eos_token_ids:
                    self._completed.append(_extended(beam, row, token_id, cum_logprob, finish_reason="stop"))
                else:
                    candidates.append((cum_logprob, index, token_id))
        # All are equally long, so the length penalty does not change their order. Ties are broken independently of the
        # token that the step sampled.
        candidates.sort(key=lambda candidate: (-candidate[0], candidate[1], candidate[2]))
        self.beams = [
            _extended(self.beams[index], rows[index], token_id, cum_logprob)
            for cum_logprob, index, token_id in candidates[: self.params.beam_width]
        ]
        self._num_tokens_left -= 1

    def output(self, tokenizer: Tokenizer) -> BeamSearchOutput:
        """The best sequences, finished or not."""
        for beam in self.beams:
            beam.finish_reason = "length"
        sequences = sorted([*self._completed, *self.beams], key=self._score, reverse=True)[: self.params.beam_width]
        for sequence in sequences:
            if sequence.finish_reason == "stop" and not self.params.include_stop_str_in_output:
                del sequence.tokens[-1]
            sequence.text = tokenizer.decode(sequence.tokens)
        return BeamSearchOutput(sequences=sequences)

    def _score(self, sequence: BeamSearchSequence) -> float:
        length = len(sequence.tokens) - (sequence.finish_reason == "stop")
        return float(sequence.cum_logprob / length**self.params.length_penalty)


def _start(session: Session, prompt: Prompt, params: BeamSearchParams, name: str) -> _Search:
    step_params = _step_params(params)
    try:
        start = session.accept(prompt, step_params, name).request
    except InvalidParameter as error:
        # `beam_width` is the only one of these parameters that the caller chose.
        raise InvalidParameter(f"beam_width={params.beam_width} needs twice as many logprobs. {error}") from error
    room = session.max_model_len - len(start.prompt_token_ids)
    return _Search(start, params, min(params.max_tokens, room))


def _step_params(params: BeamSearchParams) -> SamplingParams:
    # Each beam may lose candidates to the end-of-sequence token; at most `beam_width` candidates are kept.
    return SamplingParams(
        temperature=params.temperature, max_tokens=1, logprobs=2 * params.beam_width, detokenize=False
    )


def _advance(session: Session, searches: Sequence[_Search], params: BeamSearchParams) -> None:
    step_params = _step_params(params)
    requests = [[session.accept(prompt, step_params) for prompt in search.prompts()] for search in searches]
    rows: dict[str, dict[int, Logprob]] = {}
    with closing(session.run([accepted for group in requests for accepted in group])) as steps:
        for progress in steps:
            if progress.error is not None:
                raise PenstockError(f"The beam search failed: {progress.error}")
            logprobs = progress.output().outputs[0].logprobs
            assert logprobs, "a step of beam search gives one token with its log-probabilities"
            rows[progress.req_id] = logprobs[0]
    for search, group in zip(searches, requests, strict=True):
        search.advance([rows[accepted.request.req_id] for accepted in group])


def _extended(
    beam: BeamSearchSequence,
    row: dict[int, Logprob],
    token_id: int,
    cum_logprob: float,
    finish_reason: str | None = None,
) -> BeamSearchSequence:
    return BeamSearchSequence(
        tokens=[*beam.tokens, token_id],
        logprobs=[*beam.logprobs, row],
        cum_logprob=cum_logprob,
        finish_reason=finish_reason,
    )
