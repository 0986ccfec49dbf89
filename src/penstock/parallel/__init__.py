"""Ranks, groups, shards and collectives."""

from penstock.parallel.agreement import GroupAgreement, StepFacts
from penstock.parallel.group import ONE_RANK, Group, OneRank
from penstock.parallel.share import (
    Share,
    groups_of_share,
    heads_of_rank,
    layers_of_stage,
    rows_of_vocabulary,
    share_of_rank,
    spread_layers,
)
from penstock.parallel.state import ParallelState

__all__ = [
    "ONE_RANK",
    "Group",
    "GroupAgreement",
    "OneRank",
    "ParallelState",
    "Share",
    "StepFacts",
    "groups_of_share",
    "heads_of_rank",
    "layers_of_stage",
    "rows_of_vocabulary",
    "share_of_rank",
    "spread_layers",
]
