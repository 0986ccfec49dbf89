"""What the front end sends to the core."""

from __future__ import annotations

import msgspec

from penstock.contract import SamplingParams


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request: tokens, and parameters whose seed is set.

    arrival_time: monotonic seconds (time.monotonic).
    priority: lower runs first, under the "priority" policy.
    cache_salt: requests share cached prefixes only with requests of the same salt.
    eos_token_ids: tokens that end the text, unless the parameters ignore them.
    output_token_ids: what was generated for it before, by a core that is gone: generation goes on behind them.
    """

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    output_token_ids: list[int] = []
