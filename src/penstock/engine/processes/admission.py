"""Admission of requests to cores with a bounded queue."""

from __future__ import annotations

import math
import time
from collections import deque

from penstock.config.queue import QueueLimits
from penstock.engine.messages import EngineRequest
from penstock.errors import InvalidParameter, Overloaded

# Requests that recently began to run, from which waiting times are estimated.
_NUM_RECENT = 64
_SHORTEST_RETRY_S, _LONGEST_RETRY_S = 1.0, 60.0


class Admission:
    """Admits requests while the queue has room.

    capacity: requests that all cores may run at once.
    """

    def __init__(self, limits: QueueLimits, capacity: int) -> None:
        self._limits = limits
        self._capacity = capacity
        # Prompt tokens of unfinished requests; 0 once they have a token.
        self._prompt_tokens: dict[str, int] = {}
        self._began: deque[float] = deque(maxlen=_NUM_RECENT)
        self.num_queued_tokens = 0
        self.num_refused = 0

    @property
    def num_requests(self) -> int:
        """Unfinished requests."""
        return len(self._prompt_tokens)

    @property
    def num_queued_requests(self) -> int:
        return max(0, self.num_requests - self._capacity)

    def check(self, request: EngineRequest) -> None:
        """Raise Overloaded when the queue has no room for a request and its choices, unless it was admitted before.

        Raises InvalidParameter for more choices than the cores and the queue ever hold.
        """
        if not request.is_admitted:
            self._check_choices(request.num_choices)
            self._check(len(request.prompt_token_ids), request.num_choices)

    def add(self, request: EngineRequest) -> None:
        """Count a request."""
        num_tokens = len(request.prompt_token_ids)
        self._prompt_tokens[request.req_id] = num_tokens
        self.num_queued_tokens += num_tokens

    def note_output(self, req_id: str) -> None:
        """Note that a request has begun to run."""
        if num_tokens := self._prompt_tokens.get(req_id):
            self._prompt_tokens[req_id] = 0
            self.num_queued_tokens -= num_tokens
            self._began.append(time.monotonic())

    def remove(self, req_id: str) -> None:
        """Note the end of a request; unknown ids are ignored."""
        self.num_queued_tokens -= self._prompt_tokens.pop(req_id, 0)

    def _check_choices(self, num_choices: int) -> None:
        most = self._limits.max_num_queued_requests
        if most is not None and num_choices > max(1, self._capacity + most):
            raise InvalidParameter(
                f"The request has {num_choices:,} choices, more than run and wait at once. Allowed: at most "
                f"{self._capacity + most:,} (max_num_seqs, and max_num_queued_requests={most})."
            )

    def _check(self, num_tokens: int, num_choices: int) -> None:
        limits = self._limits
        if limits.max_num_queued_requests is not None and (
            self.num_requests + num_choices - 1 - self._capacity >= limits.max_num_queued_requests
        ):
            more = f", this request has {num_choices} choices," if num_choices > 1 else ","
            raise self._overloaded(
                f"{self.num_queued_requests} requests are queued{more} and max_num_queued_requests="
                f"{limits.max_num_queued_requests}."
            )
        if (
            limits.max_num_queued_tokens is not None
            and self.num_queued_tokens
            and self.num_queued_tokens + num_tokens > limits.max_num_queued_tokens
        ):
            raise self._overloaded(
                f"{self.num_queued_tokens} prompt tokens are queued, this request has {num_tokens} more, and "
                f"max_num_queued_tokens={limits.max_num_queued_tokens}."
            )

    def _overloaded(self, what: str) -> Overloaded:
        self.num_refused += 1
        retry_after_s = self._retry_after_s()
        return Overloaded(f"{what} Try again in {retry_after_s:.0f} s.", retry_after_s=retry_after_s)

    def _retry_after_s(self) -> float:
        """Estimated seconds until half of the queue has begun to run, at the recent rate."""
        if len(self._began) < 2:
            return _SHORTEST_RETRY_S
        rate = (len(self._began) - 1) / max(1e-3, time.monotonic() - self._began[0])
        return float(min(_LONGEST_RETRY_S, max(_SHORTEST_RETRY_S, math.ceil(self.num_queued_requests / 2 / rate))))
