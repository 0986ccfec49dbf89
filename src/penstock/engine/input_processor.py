"""From what a caller gives to a request that the core can run.

Everything is checked here, before the request can reach a slot: a bad value is refused with its name, what it is and
what is allowed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from penstock.config import ModelConfig, SamplingConfig, StructuredOutputsConfig
from penstock.contract import SamplingParams
from penstock.contract.param_checks import check_sendable, shown
from penstock.engine.messages import EngineRequest
from penstock.engine.params_processor import ParamsProcessor
from penstock.engine.prompts import PROMPT_KEYS, Prompt, check_fields, list_of_ids
from penstock.engine.tokenizer import Tokenizer
from penstock.errors import ContextTooLong, InvalidParameter, InvalidRequest


class AcceptedRequest(NamedTuple):
    """A request that may be given to the core.

    prompt: its text, None when it came as token ids. where: what errors call it, such as "prompts[3]"; may be empty.
    """

    request: EngineRequest
    prompt: str | None
    where: str


class InputProcessor:
    """Makes requests for one engine.

    max_model_len, vocab_size: of the core. sampling, structured: what requests may ask for; None takes the defaults.
    policy: the scheduler's; only "priority" knows priorities.
    engine: its number among engines with the same seed behind a balancer of one's own, which are not to answer alike.

    A request without a seed gets one made of the engine's seed and the number of requests accepted before it. So the
    same calls to an engine of the same seed give the same tokens, and equal prompts in one run differ.
    """

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        vocab_size: int,
        sampling: SamplingConfig | None = None,
        structured: StructuredOutputsConfig | None = None,
        policy: str = "fcfs",
        engine: int = 0,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._policy = policy
        self._seed = f"{model.seed} of {engine}" if engine else str(model.seed)
        self._eos_token_ids = model.eos_token_ids
        if tokenizer.eos_token_id is not None:
            self._eos_token_ids |= {tokenizer.eos_token_id}
        self._params_processor = ParamsProcessor(
            sampling or SamplingConfig(),
            tokenizer,
            vocab_size=vocab_size,
            eos_token_ids=self._eos_token_ids,
            structured=structured,
        )
        self._num_accepted = 0

    def process(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        where: str = "",
        *,
        request_id: str | None = None,
        priority: int = 0,
        number: int | None = None,
    ) -> AcceptedRequest:
        """Check a prompt and its parameters, and make the request.

        where: what errors call it, such as "prompts[3]". request_id: None numbers the requests.
        priority: lower runs first, under the "priority" policy.
        number: what the seed of a request without one is made of; None takes the number of requests accepted before it.
        Raises InvalidRequest, InvalidParameter or ContextTooLong.
        """
        with located(where):
            request, text = self._process(prompt, sampling_params, request_id, priority, number)
        return AcceptedRequest(request, text, where)

    def encode_part(self, prompt: Prompt, is_first: bool) -> list[int]:
        """Tokens of a part of a prompt; only the first part begins as the tokenizer begins a text.

        Raises InvalidRequest.
        """
        text, token_ids, cache_salt = _fields_of(prompt)
        if cache_salt is not None:
            raise InvalidRequest(f"cache_salt={shown(cache_salt)} is not allowed for a prompt that comes in parts.")
        check_sendable({"prompt": text})
        return self._tokenizer.encode(text or "", is_first) if token_ids is None else token_ids

    def _process(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None,
        priority: int,
        number: int | None,
    ) -> tuple[EngineRequest, str | None]:
        arrival_time = time.monotonic()
        text, given_token_ids, cache_salt = _fields_of(prompt)
        check_sendable(
            {
                "request_id": request_id,
                "prompt": text,
                "cache_salt": cache_salt,
                "sampling_params": sampling_params,
            }
        )
        prompt_token_ids = self._tokenizer.encode(text or "") if given_token_ids is None else given_token_ids
        self._check_prompt(prompt_token_ids)
        sampling_params = self._params_processor.process(sampling_params)
        self._check_priority(priority)
        prompt_token_ids = self._truncated(prompt_token_ids, sampling_params.truncate_prompt_tokens)
        self._check_length(len(prompt_token_ids), sampling_params.max_tokens)
        if sampling_params.seed is None:
            seed = _drawn_seed(self._seed, self._num_accepted if number is None else number)
            sampling_params = msgspec.structs.replace(sampling_params, seed=seed)
        request = EngineRequest(
            req_id=str(self._num_accepted) if request_id is None else request_id,
            prompt_token_ids=prompt_token_ids,
            sampling_params=sampling_params,
            eos_token_ids=self._eos_token_ids,
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=cache_salt,
        )
        self._num_accepted += 1
        return request, text

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise InvalidRequest("The prompt is empty: it has no tokens. Give at least one.")
        lowest, highest = min(token_ids), max(token_ids)
        if lowest < 0 or highest >= self._vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise InvalidRequest(
                f"The prompt has token id {shown(wrong)}, but the model's vocabulary has {self._vocab_size} tokens. "
                f"Allowed: 0 to {self._vocab_size - 1}."
            )

    def _check_priority(self, priority: Any) -> None:
        if type(priority) is not int or not -(2**63) <= priority < 2**63:
            raise InvalidParameter(
                f"priority={shown(priority)} is not valid. Allowed: integers of 64 bits; lower ones run first."
            )
        if priority and self._policy != "priority":
            raise InvalidParameter(
                f"priority={priority} has no meaning under the policy {self._policy!r}. Start the engine with "
                "policy='priority', or leave it at 0."
            )

    def _truncated(self, prompt_token_ids: list[int], num_kept: int | None) -> list[int]:
        """The prompt's last tokens, as many as are wanted; -1 keeps what leaves room for one token."""
        if num_kept is None:
            return prompt_token_ids
        longest = self._max_model_len - 1
        if num_kept > longest:
            raise InvalidParameter(
                f"truncate_prompt_tokens={num_kept} is not valid. Allowed: at most {longest}, which leaves room for "
                "one token in this engine's context (max_model_len), or -1 for as many as that."
            )
        return prompt_token_ids[-(longest if num_kept == -1 else num_kept) :]

    def _check_length(self, num_prompt_tokens: int, max_tokens: int | None) -> None:
        """There must be room for one token; `max_tokens` is only what the request may reach where there is more."""
        if num_prompt_tokens < self._max_model_len:
            return
        asked = "" if max_tokens is None else f" and asks for {max_tokens:,} more"
        raise ContextTooLong(
            f"The prompt has {num_prompt_tokens:,} tokens{asked}, but this engine was started for "
            f"{self._max_model_len:,} (max_model_len), of which at least one is the answer's. "
            f"Shorten the prompt to {self._max_model_len - 1:,} tokens"
            f"{self._advice(num_prompt_tokens, num_prompt_tokens + (max_tokens or 1))}"
        )

    def _advice(self, num_prompt_tokens: int, wanted: int) -> str:
        longest = self._model.longest_context
        if num_prompt_tokens < longest:
            return f", or start with max_model_len={min(wanted, longest)}."
        return f"; {self._model.model} was made for no more than {longest:,}."


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put where a request came from (such as "prompts[3]") in front of what is wrong with it; "" puts nothing."""
    try:
        yield
    except InvalidRequest as error:
        if not where:
            raise
        raise type(error)(f"{where}: {error}") from error


def _fields_of(prompt: Prompt) -> tuple[str | None, list[int] | None, str | None]:
    """The prompt's text, its token ids, and its cache salt, as far as it has them."""
    if isinstance(prompt, str):
        return prompt, None, None
    if not isinstance(prompt, Mapping):
        return None, list_of_ids(prompt), None
    fields: Mapping[str, Any] = prompt
    check_fields(fields)
    text, token_ids, cache_salt = (fields.get(key) for key in PROMPT_KEYS)
    return text, None if token_ids is None else list_of_ids(token_ids), cache_salt


def _drawn_seed(engine_seed: str, num_accepted: int) -> int:
    digest = hashlib.blake2b(f"{engine_seed}/{num_accepted}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
