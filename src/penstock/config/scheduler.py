"""What may run together in one step."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.checks import check_choice, check_flag, check_integer

POLICIES = ("fcfs", "priority")
FAST_PATHS = ("auto", "off")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """max_num_seqs: requests that run at once.
    max_num_batched_tokens: tokens of one step, over all requests; None takes 2048, or 512 with stages.
    enable_chunked_prefill: whether a step may run a part of a prompt; off for models with attention in both directions.
        Prompts that are longer than max_num_batched_tokens are refused then.
    policy: "fcfs" serves in order of arrival; "priority" serves lower `priority` numbers first.
    async_scheduling: schedule a step before the previous one's tokens are known; None follows the device
        (on where the device overlaps with the host).
    fast_paths: "off" runs every step as if nothing were known of the one before: slower, with the same tokens and bits.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"
    async_scheduling: bool | None = None
    fast_paths: str = "auto"

    def __post_init__(self) -> None:
        check_integer("max_num_seqs", self.max_num_seqs, 1)
        check_integer("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check_flag("enable_chunked_prefill", self.enable_chunked_prefill)
        check_choice("policy", self.policy, POLICIES)
        check_choice("fast_paths", self.fast_paths, FAST_PATHS)
        if self.async_scheduling is not None:
            check_flag("async_scheduling", self.async_scheduling)
