"""A request as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto

from penstock.contract import LogprobsLists, Parts, SamplingParams
from penstock.scheduler.acceptance import Acceptance


class RequestStatus(Enum):
    """WAITING: never ran. RUNNING: holds blocks and a slot of the worker. PREEMPTED: ran, holds nothing, waits."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


def no_logprobs() -> LogprobsLists:
    """No rows, to be added to."""
    return LogprobsLists(logprob_token_ids=[], logprobs=[], sampled_token_ranks=[])


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and everything generated for it so far. Two requests are equal only if they are the same object.

    prompt_token_ids: never changed, so that messages may share it.
    eos_token_ids: tokens that end the text, unless `sampling_params` ignore them.
    arrival_time: monotonic seconds. priority: lower runs first, under the "priority" policy.
    cache_salt: cached prefixes are shared only with requests of the same salt.
    parts: what features are given with it; they may have extra keys of its blocks.
    waits_for: what must be there before it may run, such as its grammar; the scheduler changes it once it has it.
    needs_tokens_on_host: the host must see its tokens before its next step, as where a grammar is not on the device.
    num_encoder_tokens: positions of the encoder whose output it reads; 0 where there is none.
    pools: it ends with what becomes of its prompt's hidden states, and has no tokens of its own.
    output_token_ids: tokens that were generated for it already, by an engine before this one.

    The scheduler keeps the rest:
    all_token_ids: the prompt and every known output token.
    spec_token_ids: drafts for the request's next step, to follow its last token; -1 where only the device knows them.
    num_computed_tokens: positions whose keys and values are in the cache once all steps in flight are done: an upper
        bound while any of these has drafts, since it is taken back by those that are rejected.
    num_output_placeholders: tokens that steps in flight will sample, if all their drafts are accepted.
    length_limit: tokens, prompt included, at which the request ends.
    num_cached_tokens: prompt tokens found in the prefix cache when the request first ran; -1 before.
    prompt_logprobs: those of the prompt that are known so far, until the first token takes them along; None if the
        request did not ask.
    first_scheduled_time: monotonic seconds.
    has_news: whether its history has changed since an output last told it.
    acceptance, num_drafts_planned: kept by the draft budget: how often its drafts were right, and how many its next
        step is to verify, at most.
    order: counts requests as they were added; decides between equal arrival times.
    end_token_ids: those of the model and those that the request names.

    The KV cache manager keeps, for the scheduler to see that nothing is due:
    kv_capacity: tokens up to which its blocks are enough; 0 while it holds none.
    next_cache_at: computed tokens from which on there is a block to offer to the prefix cache; out of reach while it
        holds none.
    """

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    parts: Parts | None = None
    waits_for: set[str] = field(default_factory=set)
    needs_tokens_on_host: bool = False
    num_encoder_tokens: int = 0
    pools: bool = False
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
        """Known tokens: the prompt's and the generated ones."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Known generated tokens."""
        return len(self.all_token_ids) - len(self.prompt_token_ids)

    @property
    def may_repeat(self) -> bool:
        """Whether steps with this request may be repeated, as far as its parts are concerned."""
        return self.parts is None or self.parts.may_repeat

    @property
    def needs_all_of_prompt(self) -> bool:
        """Whether the prompt must be computed even where its keys and values are cached."""
        return self.pools or self.needs_prompt_logits

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether the prompt's log-probabilities are due."""
        return self.sampling_params.prompt_logprobs is not None and self.num_tokens == self.num_prompt_tokens
