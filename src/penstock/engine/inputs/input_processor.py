"""Input processing: checks and tokenises a caller's prompt and parameters into an `EngineRequest`.

A bad value is refused here, before the request reaches the core, with its name, its value and what is allowed.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec

from penstock.config import ModelConfig, SamplingConfig, StructuredOutputsConfig
from penstock.config.request_limits import RequestLimits
from penstock.contract import Parts, PoolingParams, SamplingParams
from penstock.contract.feature import why_refused
from penstock.contract.param_checks import check_sendable, shown
from penstock.engine.inputs.field_limits import check_name, check_products, check_sampling_fields, check_text
from penstock.engine.inputs.media_intake import MediaIntake
from penstock.engine.inputs.params_processor import ParamsProcessor
from penstock.engine.inputs.pooling_inputs import PoolingInputs, text_parameters_refused
from penstock.engine.inputs.prompt_encoder import PromptEncoder
from penstock.engine.inputs.prompts import (
    DATA,
    PROMPT_EMBEDS,
    PROMPT_KEYS,
    Prompt,
    PromptDict,
    RenderedText,
    TextPair,
    check_fields,
    has_field,
    list_of_ids,
    with_parts,
)
from penstock.engine.inputs.source_prompts import SourcePrompts
from penstock.engine.messages import EngineRequest
from penstock.errors import InvalidParameter, InvalidRequest, UnsupportedParameter
from penstock.features.multimodal.inputs.prompt_embeds import part_of_embeddings
from penstock.features.multimodal.inputs.request_media import ImagesAlone, RequestMedia
from penstock.media.loader import MediaLoader
from penstock.text.tokenizer import LONG_TEXT, EncodedText, TextToEncode, Tokenizer

# Total number of values in sampling parameters whose check takes milliseconds.
_MANY_VALUES = 500
# Sampling parameters of requests that pool.
_NOT_SAMPLED = SamplingParams(max_tokens=1, temperature=0.0, seed=0, detokenize=False)


class AcceptedRequest(NamedTuple):
    """A checked request.

    prompt: text of the prompt, None when it came as token ids. where: its name in errors, such as "prompts[3]".
    """

    request: EngineRequest
    prompt: str | None
    where: str


class PooledPrompt(NamedTuple):
    """A prompt of an engine that pools. where: its name in errors. request_id: None numbers the requests."""

    prompt: Prompt
    params: SamplingParams | PoolingParams
    where: str = ""
    request_id: str | None = None
    priority: int = 0


class _ReadPrompt(NamedTuple):
    """A checked prompt. text: to tokenise; None for one that came as token ids."""

    params: PoolingParams
    text: TextToEncode | None
    token_ids: list[int] | None
    cache_salt: str | None
    parts: Parts | None


class InputProcessor:
    """Creates the requests of one engine.

    max_model_len, vocab_size: limits of the core. sampling, structured, limits: of requests; None takes the defaults.
    policy: scheduling policy; only "priority" allows priorities. features: names of those whose parts
        requests may have. media: processor of media in prompts; None for models of text. loader: of media.
    engine: data parallel rank among engines of the same seed behind an external load balancer; front_end: number among
        the front ends of one broker. Both are mixed into the seeds.

    A request without a seed gets one from the engine's seed and the number of requests accepted before it. So equal
    calls to engines of the same seed give equal tokens, and equal prompts in one run differ.
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
        limits: RequestLimits | None = None,
        policy: str = "fcfs",
        engine: int = 0,
        front_end: int = 0,
        features: Collection[str] = (),
        media: RequestMedia | ImagesAlone | None = None,
        loader: MediaLoader | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._sampling = sampling or SamplingConfig()
        self.limits = (limits or RequestLimits()).resolved(max_model_len)
        self._prompts = PromptEncoder(
            model, tokenizer, max_model_len=max_model_len, vocab_size=vocab_size, limits=self.limits
        )
        self._policy = policy
        self._features = features
        self._seed = f"{model.seed} of {engine}" if engine else str(model.seed)
        if front_end:
            self._seed += f" from {front_end}"
        self._eos_token_ids = model.eos_token_ids
        if tokenizer.eos_token_id is not None:
            self._eos_token_ids |= {tokenizer.eos_token_id}
        self._params_processor = ParamsProcessor(
            self._sampling,
            tokenizer,
            vocab_size=vocab_size,
            eos_token_ids=self._eos_token_ids,
            structured=structured,
        )
        self._pooling: PoolingInputs | None = None
        if model.pooling is not None:
            self._pooling = PoolingInputs(model.pooling, model=model.model, max_model_len=max_model_len)
        self._sources: SourcePrompts | None = None
        if model.is_encoder_decoder:
            self._sources = SourcePrompts(
                model, tokenizer, self.limits, max_model_len=max_model_len, vocab_size=vocab_size
            )
        limits_of_media = {} if media is None else media.limits
        limits_of_media = limits_of_media if self._sources is None else self._sources.media_limits
        self.media_intake = MediaIntake(loader or MediaLoader(), limits_of_media, media)
        self._numbers = itertools.count()

    def process(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | PoolingParams,
        where: str = "",
        *,
        request_id: str | None = None,
        priority: int = 0,
        number: int | None = None,
    ) -> AcceptedRequest:
        """Check a prompt and its parameters, and create the request.

        where: name in errors, such as "prompts[3]". request_id: None numbers the requests.
        priority: lower runs first, under the "priority" policy.
        number: input of the seed of a request without one; None takes the number of requests accepted before it.
        Raises InvalidRequest, InvalidParameter or ContextTooLong.
        """
        if self._pooling is not None:
            (accepted,) = self.process_pooled([PooledPrompt(prompt, sampling_params, where, request_id, priority)])
            return accepted
        with located(where):
            if isinstance(sampling_params, PoolingParams):
                raise InvalidParameter(
                    "This engine generates text, and PoolingParams are for one that pools. Start it with "
                    "runner='pooling' for embeddings."
                )
            prompt = self.media_intake.load(prompt)
            request, text = self._process(prompt, sampling_params, request_id, priority, number)
        return AcceptedRequest(request, text, where)

    def process_pooled(self, prompts: Sequence[PooledPrompt]) -> list[AcceptedRequest]:
        """Check and tokenise prompts of an engine that pools, texts in parallel. Any thread may call it.

        Raises as `process`, for the first prompt that is wrong.
        """
        pooling = self._pooling
        assert pooling is not None, "an engine that pools"
        time_s, read = time.monotonic(), []
        for asked in prompts:
            with located(asked.where):
                read.append(self._read_pooled(pooling, asked))
        encoded = iter(self._tokenizer.encode_texts([one.text for one in read if one.text is not None]))
        accepted = []
        for asked, one in zip(prompts, read, strict=True):
            with located(asked.where):
                of_text = None if one.text is None else next(encoded)
                accepted.append(self._pooled_request(pooling, asked, one, of_text, time_s))
        return accepted

    @property
    def model(self) -> ModelConfig:
        """Configuration of the model."""
        return self._model

    def encode_part(self, prompt: Prompt, is_first: bool) -> list[int]:
        """Tokenise a part of a streamed prompt; only the first part gets special tokens. Raises InvalidRequest."""
        if self._sources is not None:
            raise InvalidRequest("A prompt in pieces is not for an encoder-decoder model. Give it at once.")
        text, token_ids, cache_salt, parts = _fields_of(prompt)
        for key, value in (("cache_salt", cache_salt), ("parts", parts)):
            if value is not None:
                raise InvalidRequest(f"{key}={shown(value)} is not allowed for a prompt that comes in pieces.")
        check_sendable({"prompt": text})
        return self._prompts.encode(text or "", add_special_tokens=is_first) if token_ids is None else token_ids

    def encode_media_prompt(self, prompt: PromptDict, *, add_special_tokens: bool) -> list[int]:
        """Tokenise a text with loaded media, whose placeholders become their tokens. Raises InvalidRequest."""
        encode = partial(self._prompts.encode_expanded, add_special_tokens=add_special_tokens)
        expanded: Any = self.media_intake.expanded(prompt, encode)
        check_fields(expanded)
        return list_of_ids(expanded["prompt_token_ids"])

    def reset_mm_cache(self) -> None:
        """Forget processed media."""
        self.media_intake.reset_cache()

    def take_number(self) -> int:
        """Return and increment the number of requests so far, for a seed; thread-safe."""
        return next(self._numbers)

    def is_quick(self, prompt: Prompt, sampling_params: SamplingParams | PoolingParams) -> bool:
        """Whether `process` takes no more than a few milliseconds."""
        is_media = has_field(prompt, DATA) or has_field(prompt, PROMPT_EMBEDS)
        if is_media or (self._sources is not None and isinstance(prompt, Mapping)):
            return False
        return _size_of(prompt) < self._tokenizer.quick_characters and _is_small(sampling_params)

    def _process(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None,
        priority: int,
        number: int | None,
    ) -> tuple[EngineRequest, str | None]:
        arrival_time = time.monotonic()
        if self._sources is not None:
            prompt = self._sources.decoder_prompt(prompt)
        if isinstance(sampling_params, SamplingParams):
            check_sampling_fields(sampling_params, self.limits)
        if self._model.enable_prompt_embeds and has_field(prompt, PROMPT_EMBEDS):
            _check_params_of_embeddings(sampling_params)
            prompt = self._of_embeddings(prompt)
        else:
            prompt = self._expanded(prompt, sampling_params)
        num_kept = getattr(sampling_params, "truncate_prompt_tokens", None)
        if num_kept is None:
            self._prompts.check_num_ids(prompt, sampling_params)
        text, given_token_ids, cache_salt, parts = _fields_of(prompt)
        check_name("cache_salt", cache_salt, self.limits)
        self._check_parts(parts)
        is_rendered, text = isinstance(text, RenderedText), None if text is None else str(text)
        check_sendable(
            {
                "request_id": request_id,
                "prompt": text,
                "cache_salt": cache_salt,
                "parts": parts,
                "sampling_params": sampling_params,
            }
        )
        if given_token_ids is None:
            max_tokens = getattr(sampling_params, "max_tokens", None)
            prompt_token_ids = self._prompts.encode(
                text or "", add_special_tokens=not is_rendered, max_tokens=max_tokens, num_kept=num_kept
            )
        else:
            prompt_token_ids = given_token_ids
        self._prompts.check_token_ids(prompt_token_ids)
        sampling_params = self._params_processor.process(sampling_params, prompt_token_ids)
        self._check_priority(priority)
        prompt_token_ids = self._prompts.truncated(prompt_token_ids, sampling_params.truncate_prompt_tokens)
        self._prompts.check_length(len(prompt_token_ids), sampling_params.max_tokens)
        check_products(sampling_params, len(prompt_token_ids), self.limits, self._sampling.max_logprobs)
        num_before = number if request_id is not None and number is not None else self.take_number()
        if sampling_params.seed is None:
            seed = _drawn_seed(self._seed, num_before if number is None else number)
            sampling_params = sampling_params.with_fields(seed=seed)
        request = EngineRequest(
            req_id=str(num_before) if request_id is None else request_id,
            prompt_token_ids=prompt_token_ids,
            sampling_params=sampling_params,
            eos_token_ids=self._eos_token_ids,
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=cache_salt,
            parts=parts,
        )
        return request, text

    def _expanded(self, prompt: Any, sampling_params: Any) -> Any:
        """The prompt with its media as tokens; others as they are. Prompts with media are not truncated."""
        text, max_tokens = None, getattr(sampling_params, "max_tokens", None)
        if has_field(prompt, DATA):
            if getattr(sampling_params, "truncate_prompt_tokens", None) is not None:
                raise InvalidParameter("truncate_prompt_tokens is not for prompts with media. Leave it out.")
            text = prompt.get("prompt")
        if isinstance(text, str):
            check_text(text, self.limits)
        adds_special = not isinstance(text, RenderedText)
        encode = partial(self._prompts.encode_expanded, add_special_tokens=adds_special, max_tokens=max_tokens)
        return self.media_intake.expanded(prompt, encode)

    def _of_embeddings(self, prompt: Any) -> Prompt:
        """The prompt with a token per embedding, and these as a part."""
        for key in ("prompt_token_ids", DATA):
            if prompt.get(key) is not None:
                raise InvalidRequest(f"The prompt has prompt_embeds and {key}. Give one of them.")
        token_ids, part = part_of_embeddings(prompt[PROMPT_EMBEDS], self._model, self._prompts.max_model_len)
        fields = {name: value for name, value in prompt.items() if name not in (PROMPT_EMBEDS, DATA)}
        return with_parts(cast("Prompt", {**fields, "prompt_token_ids": token_ids}), [part])

    def _read_pooled(self, pooling: PoolingInputs, asked: PooledPrompt) -> _ReadPrompt:
        if not isinstance(asked.params, PoolingParams):
            raise text_parameters_refused(pooling.pooling, asked.params)
        params, prompt = pooling.params(asked.params), asked.prompt
        prompt = self.media_intake.expanded(self.media_intake.load(prompt), self._tokenizer.encode)
        text: str | TextPair | None
        if isinstance(prompt, TextPair):
            text, given, cache_salt, parts = prompt, None, None, None
        else:
            text, given, cache_salt, parts = _fields_of(prompt)
        plain = list(map(str, text)) if isinstance(text, TextPair) else None if text is None else str(text)
        check_sendable({"request_id": asked.request_id, "prompt": plain, "cache_salt": cache_salt, "parts": parts})
        check_name("cache_salt", cache_salt, self.limits)
        self._check_parts(parts)
        for one in text if isinstance(text, TextPair) else (text or "",):
            check_text(one, self.limits, where="The text")
        self._check_priority(asked.priority)
        if given is not None:
            given = pooling.cut(given, params)
            return _ReadPrompt(params, None, given, cache_salt, parts)
        return _ReadPrompt(params, pooling.text(text or "", params), None, cache_salt, parts)

    def _pooled_request(
        self, pooling: PoolingInputs, asked: PooledPrompt, read: _ReadPrompt, encoded: EncodedText | None, time_s: float
    ) -> AcceptedRequest:
        params, token_ids = read.params, read.token_ids
        if encoded is not None:
            assert read.text is not None, "only texts are encoded"
            token_ids = encoded.token_ids
            pooling.check_length(len(token_ids), params, is_whole=read.text.limit is None)
            params = msgspec.structs.replace(params, second_text_start=encoded.second_start)
        assert token_ids is not None, "a prompt is a text or token ids"
        self._prompts.check_token_ids(token_ids)
        request = EngineRequest(
            req_id=str(self.take_number()) if asked.request_id is None else asked.request_id,
            prompt_token_ids=token_ids,
            sampling_params=_NOT_SAMPLED,
            arrival_time=time_s,
            priority=asked.priority,
            cache_salt=read.cache_salt,
            parts=read.parts,
            pooling_params=params,
        )
        text = None if read.text is None or read.text.second is not None else read.text.first
        return AcceptedRequest(request, text, asked.where)

    def _check_parts(self, parts: Parts | None) -> None:
        why = why_refused(parts or (), self._features)
        if why is not None:
            raise UnsupportedParameter(why)

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


@contextmanager
def located(where: str) -> Iterator[None]:
    """Prefix the text of an InvalidRequest with the request's name, such as "prompts[3]"; "" adds nothing."""
    try:
        yield
    except InvalidRequest as error:
        if not where:
            raise
        raise type(error)(f"{where}: {error}") from error


def _fields_of(prompt: Prompt) -> tuple[str | None, list[int] | None, str | None, Parts | None]:
    """Text, token ids, cache salt and parts of a prompt; None for absent ones."""
    if isinstance(prompt, str):
        return prompt, None, None, None
    if not isinstance(prompt, Mapping):
        return None, list_of_ids(prompt), None, None
    fields: Mapping[str, Any] = prompt
    check_fields(fields)
    text, token_ids, cache_salt, parts = (fields.get(key) for key in PROMPT_KEYS)
    token_ids = None if token_ids is None else list_of_ids(token_ids)
    return text, token_ids, cache_salt, Parts.read(parts) if parts else None


def _size_of(prompt: Prompt) -> int:
    """Number of characters or token ids of a prompt, without iterating over them."""
    parts: Any = (
        prompt.values() if isinstance(prompt, Mapping) else prompt if isinstance(prompt, TextPair) else [prompt]
    )
    return sum(len(part) if isinstance(part, Sized) else LONG_TEXT for part in parts if part is not None)


def _is_small(params: Any) -> bool:
    """Whether checking the parameters is quick: they have no grammar, no text to tokenise, and few listed values."""
    if not isinstance(params, SamplingParams):
        return True
    listed = (params.stop, params.stop_token_ids, params.allowed_token_ids, params.logit_bias)
    is_plain = params.structured_outputs is None and params.extra_args is None and not params.bad_words
    return is_plain and sum(len(values) for values in listed if values) < _MANY_VALUES


def _check_params_of_embeddings(params: Any) -> None:
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        if getattr(params, name, None) is not None:
            raise UnsupportedParameter(f"{name} is not for prompts of embeddings, which have no tokens. Leave it out.")


def _drawn_seed(engine_seed: str, num_accepted: int) -> int:
    digest = hashlib.blake2b(f"{engine_seed}/{num_accepted}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
