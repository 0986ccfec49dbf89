"""Request state of the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto

from penstock.contract import LogprobsLists, Parts, PoolingParams, SamplingParams
from penstock.scheduler.acceptance import Acceptance


class RequestStatus(Enum):
    """WAITING: never ran. RUNNING: holds blocks and a slot of the worker. PREEMPTED: ran, holds nothing, waits."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


def no_logprobs() -> LogprobsLists:
    """Return empty log-probabilities, to be appended to."""
    return LogprobsLists(logprob_token_ids=[], logprobs=[], sampled_token_ranks=[])


@dataclass(slots=True, eq=False)
class Request:
    """Prompt of a request and its generation state. Compared by identity.

    prompt_token_ids: never changed, so that messages may share it.
    eos_token_ids: end-of-text tokens; empty if `sampling_params` ignore them.
    arrival_time: seconds of `time.monotonic`. priority: lower runs first, under the "priority" policy.
    cache_salt: cached prefixes are shared only among requests of the same salt.
    parts: data of features for this request, which may have extra keys of its blocks.
    waits_for: reasons why it may not run yet, such as its grammar; changed by the scheduler only, once added.
    awaits_parts: a feature makes a part for each sampling of the request, from all tokens before it
        (`SchedulerFeature.sampling_part`).
    pooling_params: of a pooling request whose engine has them.
    pools: pooling request: ends with the pooled hidden states of its prompt, and generates no tokens.
    output_token_ids: tokens generated for it by an earlier engine.

    State of the scheduler:
    all_token_ids: the prompt and every known output token.
    spec_token_ids: draft tokens for the next step, after the last token; -1 for tokens that only the device knows.
    num_computed_tokens: positions whose KV is in the cache once all steps in flight are done: an upper bound while any
        of these has draft tokens, since rejected ones reduce it.
    num_output_placeholders: tokens that steps in flight will sample, if all draft tokens are accepted.
    length_limit: tokens, prompt included, at which the request ends.
    num_cached_tokens: prefix-cache hit in prompt tokens when the request first ran; -1 before.
    prompt_logprobs: prompt log-probabilities known so far, sent with the first token; None if not requested.
    first_scheduled_time: seconds of `time.monotonic`.
    has_news: whether its history has changed since an output last carried it.
    acceptance, num_drafts_planned: state of the draft budget: acceptance rate, and maximum draft length of the next
        step.
    order: number of requests added before; decides between equal arrival times.
    end_token_ids: end-of-text and stop tokens.

    State of the KV cache manager:
    kv_capacity: tokens up to which its blocks are enough; 0 without blocks.
    next_cache_at: computed tokens from which on another block can be cached; never reached without blocks.
    """

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    parts: Parts | None = None
    awaits_parts: bool = False
    waits_for: set[str] = field(default_factory=set)
    pools: bool = False
    pooling_params: PoolingParams | None = None
    output_token_ids: InitVar[Sequence[int]] = ()

    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    all_token_ids: list[int] = field(init=False)
    block_hashes: list[bytes] = field(default_factory=list, init=False)
    end_token_ids: frozenset[int] = field(init=False)
    spec_token_ids: list[int] = field(default_factory=list, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_output_placeholders: int = field(default=0, init=False)
    num_preemptions: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=-1, init=False)
    length_limit: int = field(default=0, init=False)
    prompt_logprobs: LogprobsLists | None = field(default=None, init=False)
    first_scheduled_time: float | None = field(default=None, init=False)
    has_news: bool = field(default=True, init=False)
    acceptance: Acceptance = field(default_factory=Acceptance, init=False)
    num_drafts_planned: int = field(default=0, init=False)
    order: int = field(default=0, init=False)
    kv_capacity: int = field(default=0, init=False)
    next_cache_at: int = field(default=0, init=False)

    def __post_init__(self, output_token_ids: Sequence[int]) -> None:
        self.all_token_ids = [*self.prompt_token_ids, *output_token_ids]
        if self.sampling_params.ignore_eos:
            self.eos_token_ids = frozenset()
        self.end_token_ids = self.eos_token_ids.union(self.sampling_params.stop_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Known output tokens."""
        return len(self.all_token_ids) - len(self.prompt_token_ids)

    @property
    def source_length(self) -> int:
        """Positions of the encoder's output that its cross attention reads; 0 without any."""
        return 0 if self.parts is None else self.parts.source_length

    @property
    def has_lasting_keys(self) -> bool:
        """Whether the hashes of its blocks mean the same to other engines, and after a restart."""
        return self.parts is None or self.parts.have_lasting_keys

    @property
    def needs_all_of_prompt(self) -> bool:
        """Whether the whole prompt must be computed, without prefix-cache hits."""
        if self.parts is not None and self.parts.need_all_tokens:
            return True
        if self.pools:
            return self.pooling_params is None or self.pooling_params.skip_reading_prefix_cache is not False
        return self.needs_prompt_logits

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether the prompt's log-probabilities are due."""
        return self.sampling_params.prompt_logprobs is not None and self.num_tokens == self.num_prompt_tokens
