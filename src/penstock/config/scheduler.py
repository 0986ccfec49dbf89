"""Options of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.config.checks import check_choice, check_flag, check_integer
from penstock.config.flags import listed

POLICIES = ("fcfs", "priority")
FAST_PATHS = ("auto", "off")

# Tables of a worker have a row per request, or per token of a step: larger ones have no memory anywhere.
_MOST_SEQS, _MOST_BATCHED_TOKENS = 1 << 16, 1 << 24


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """max_num_seqs: maximum number of running requests.
    max_num_batched_tokens: token budget of a step; None takes 2048, or 512 with pipeline parallelism.
    enable_chunked_prefill: split prompts over steps; off for models with bidirectional attention, where prompts longer
        than max_num_batched_tokens are refused.
    policy: "fcfs" serves in order of arrival; "priority" serves lower `priority` numbers first.
    async_scheduling: schedule a step before the tokens of the previous one are on the host; None turns it on where the
        device overlaps with the host.
    fast_paths: "off" turns off the reuse of the previous step's batch: slower, with the same tokens and bits.
    """

    max_num_seqs: int = field(default=256, metadata=listed("Running requests"))
    max_num_batched_tokens: int = field(
        default=2048, metadata=listed("Token budget of a step  [default: 2048, PP: 512]")
    )
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"
    async_scheduling: bool | None = None
    fast_paths: str = "auto"

    def __post_init__(self) -> None:
        check_integer("max_num_seqs", self.max_num_seqs, 1, _MOST_SEQS)
        check_integer("max_num_batched_tokens", self.max_num_batched_tokens, 1, _MOST_BATCHED_TOKENS)
        check_flag("enable_chunked_prefill", self.enable_chunked_prefill)
        check_choice("policy", self.policy, POLICIES)
        check_choice("fast_paths", self.fast_paths, FAST_PATHS)
        if self.async_scheduling is not None:
            check_flag("async_scheduling", self.async_scheduling)
