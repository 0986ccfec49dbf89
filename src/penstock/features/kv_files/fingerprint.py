"""Fingerprint of KV cache blocks: what their bits depend on, by which engines find the folder of their blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch

from penstock.contract import MLAAttentionSpec
from penstock.runner.kv_cache import PagedKVCache
from penstock.worker.feature import WorkerServices
from penstock.worker.fingerprint import digest_of, made_of, media_processing, stamps_of


def what_blocks_depend_on(services: WorkerServices, kv_cache: PagedKVCache) -> dict[str, Any]:
    """Describe all that the bits of a rank's blocks depend on, besides the tokens and the keys of requests."""
    config = services.config
    model, parallel, drafter = config.model, config.parallel, config.speculative.model
    groups: list[Callable[[], Any] | Any] = [msgspec.to_builtins(group) for group in kv_cache.config.groups]
    return {
        **made_of(model, config.load, services.device.kind, has_times=False),
        "torch": torch.__version__,
        "dtype": str(services.dtype),
        "groups": groups,
        "backends": [group.backend.name for group in kv_cache.groups],
        "page_bytes": page_bytes(kv_cache),
        "processing": media_processing(config),
        "seed": model.seed if config.load.load_format == "dummy" else None,
        "drafter": None
        if drafter is None
        else ({**asdict(config.speculative), "model": None}, stamps_of(Path(drafter))),
        "ranks": (
            services.rank,
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.pipeline_layers,
            parallel.decode_context_parallel_size,
            parallel.cp_kv_cache_interleave_size,
            parallel.enable_sp,
        ),
        # These blocks have the roundings of other ranks.
        **({"other_ranks": True} if config.kv_tiers.kv_peers_other_ranks else {}),
    }


def page_bytes(kv_cache: PagedKVCache) -> list[list[int]]:
    """Bytes of the pages of a block, by group and layer."""
    return [[page.nbytes for page in kv_cache.pages_of_block(index, 0)] for index in range(len(kv_cache.groups))]


def kind_of(depends: dict[str, Any], services: WorkerServices, kv_cache: PagedKVCache) -> str | None:
    """Digest of what the blocks of all tensor-parallel ranks together depend on; None for those that are not heads.

    depends: what the blocks of this rank depend on.
    """
    parallel, groups = services.config.parallel, [msgspec.to_builtins(group) for group in kv_cache.config.groups]
    size = parallel.tensor_parallel_size
    are_heads = all(group.backend.pages_are_heads for group in kv_cache.groups) and not any(
        isinstance(group.spec, MLAAttentionSpec) for group in kv_cache.config.groups
    )
    if not are_heads or parallel.world_size != size or parallel.decode_context_parallel_size > 1:
        return None
    for group in groups:
        # Heads that several ranks have make another kind.
        group["spec"]["num_kv_heads"] *= size
    page_bytes = [[num_bytes * size for num_bytes in of_group] for of_group in depends["page_bytes"]]
    return digest_of({**depends, "groups": groups, "page_bytes": page_bytes, "ranks": None, "other_ranks": None})
