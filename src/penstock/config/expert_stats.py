"""Options of routing statistics."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.checks import check_flag


@dataclass(frozen=True, slots=True)
class ExpertStatsConfig:
    """expert_stats: count the tokens of each expert and layer of a mixture of experts from the start on, for
    `LLM.get_expert_stats` and for the server's `/metrics`.
    """

    expert_stats: bool = False

    def __post_init__(self) -> None:
        check_flag("expert_stats", self.expert_stats)
