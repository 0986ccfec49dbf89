"""What the front end and a core say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from penstock.contract import Parts, SamplingParams
from penstock.errors import ErrorData
from penstock.scheduler.outputs import EngineCoreOutput


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request: tokens, and parameters whose seed is set.

    arrival_time: monotonic seconds (time.monotonic).
    priority: lower runs first, under the "priority" policy.
    cache_salt: requests share cached prefixes only with requests of the same salt.
    parts: what plugins' features are given with the request.
    eos_token_ids: tokens that end the text, unless the parameters ignore them.
    output_token_ids: what was generated for it before, by a core that is gone: generation goes on behind them.
    needs_tokens_on_host: the host must see its tokens before its next step; others run ahead meanwhile.
    """

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    parts: Parts | None = None
    output_token_ids: list[int] = []
    needs_tokens_on_host: bool = False


@dataclass(frozen=True, slots=True)
class CoreStart:
    """The first that a core's process is told, pickled.

    sent: what makes the core, and its configuration, pickled by themselves. main_path: of the program, whose own
    functions and classes may be sent. log_levels: by logger, of what is to be told (`CoreLog`).
    """

    sent: bytes
    main_path: str | None
    log_levels: dict[str, int]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Between a core in a process of its own and its client. Calls are numbered, and each gets one `Answer`."""


class AddRequest(_Message, frozen=True, kw_only=True, tag="add"):
    call_id: int
    request: EngineRequest


class AbortRequests(_Message, frozen=True, kw_only=True, tag="abort"):
    call_id: int
    req_ids: list[str]


class UtilityCall(_Message, frozen=True, kw_only=True, tag="utility"):
    """A call of another method of `CoreClient`. arguments: pickled, since workers take anything."""

    call_id: int
    method: str
    arguments: bytes


class CloseCore(_Message, frozen=True, kw_only=True, tag="close"):
    """Give everything back and end."""


class CoreStarted(_Message, frozen=True, kw_only=True, tag="started"):
    """kv_cache_bytes: on each worker."""

    max_model_len: int
    vocab_size: int
    kv_cache_bytes: int


class CoreBusy(_Message, frozen=True, kw_only=True, tag="busy"):
    """The core makes no steps, for a reason: it answers a call, or replaces workers."""


class StepOutputs(_Message, frozen=True, kw_only=True, tag="step"):
    """What a step brought, even if that is nothing."""

    outputs: list[EngineCoreOutput]


class Answer(_Message, frozen=True, kw_only=True, tag="answer"):
    """What a call came to. result: of a utility call, pickled. error: what it raised."""

    call_id: int
    result: bytes = b""
    error: ErrorData | None = None


class CoreLog(_Message, frozen=True, kw_only=True, tag="log"):
    """A line for the log. fields: of its `logging.LogRecord`; a traceback is in its text."""

    fields: dict[str, str | int | float]


class CoreEnded(_Message, frozen=True, kw_only=True, tag="ended"):
    """The core did not start, or cannot go on; nothing comes after this."""

    error: ErrorData


class ToCore(msgspec.Struct, frozen=True):
    """Anything that a client says."""

    message: AddRequest | AbortRequests | UtilityCall | CloseCore


# What the client of a core hears; lines for the log are written before.
SaidByCore: TypeAlias = CoreStarted | CoreBusy | StepOutputs | Answer | CoreEnded


class FromCore(msgspec.Struct, frozen=True):
    """Anything that a core says."""

    message: SaidByCore | CoreLog
