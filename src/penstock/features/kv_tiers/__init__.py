"""KV tiers: blocks of the KV cache that are kept in host memory or in a folder, from which requests load them."""

from __future__ import annotations

from penstock.config import EngineConfig
from penstock.contract.feature import Feature, Figure


def _has_tier(config: EngineConfig) -> bool:
    return config.kv_tiers.option is not None


FEATURE = Feature(
    name="kv_tiers",
    is_on=_has_tier,
    deployment_side="penstock.features.kv_tiers.deployment:TierDeployment",
    scheduler_side="penstock.features.kv_tiers.scheduling:TierScheduling",
    worker_side="penstock.features.kv_tiers.worker:TierWorker",
    deployment_methods=("save_kv_prefix",),
    memory={"kv_offloading_size": "penstock.features.kv_tiers.host_memory:host_bytes"},
    worker_methods=("kv_tier_folder", "kv_host_layout", "move_kv_blocks"),
    counters={
        "external_prefix_cache_queries": "Tokens of prompts looked up outside of the KV cache.",
        "external_prefix_cache_hits": "Tokens of prompts whose KV came from outside of the KV cache.",
        "kv_host_queries": "Tokens of prompts looked up in host memory (kv_offloading_size).",
        "kv_host_hits": "Tokens of prompts whose KV came from host memory alone (kv_offloading_size).",
        "kv_folder_queries": "Tokens of prompts looked up in kv_offload_dir.",
        "kv_folder_hits": "Tokens of prompts whose KV came from kv_offload_dir, or from there and host memory.",
        "kv_peer_queries": "Tokens of prompts looked up with kv_peers.",
        "kv_peer_hits": "Tokens of prompts for which blocks came from other engines (kv_peers).",
        "kv_host_loaded_bytes": "Bytes of the KV cache that came from host memory, of one rank.",
        "kv_host_saved_bytes": "Bytes of the KV cache that were copied to host memory, of one rank.",
        "kv_tier_loaded_bytes": "Bytes of the KV cache that were read from kv_offload_dir, of one rank.",
        "kv_tier_saved_bytes": "Bytes of the KV cache that were written to kv_offload_dir, of one rank.",
        "kv_tier_failed_loads": "Blocks of kv_offload_dir that could not be read, and were computed instead.",
        "kv_tier_recomputed_tokens": "Tokens of prompts that were computed, as sooner than loaded (kv_load_policy).",
        "kv_tier_copied_bytes": "Bytes of the KV cache that came from other engines (kv_peers).",
    },
    gauges={"kv_tier_folder_bytes": "Bytes of the files in kv_offload_dir, of all engines, as last counted."},
    figures=(
        Figure("external hits", "external_prefix_cache_hits", of="external_prefix_cache_queries"),
        Figure("host memory hits", "kv_host_hits", of="kv_host_queries"),
        Figure("folder hits", "kv_folder_hits", of="kv_folder_queries"),
        Figure("peer hits", "kv_peer_hits", of="kv_peer_queries"),
        Figure("from host memory", "kv_host_loaded_bytes", unit="bytes"),
        Figure("to host memory", "kv_host_saved_bytes", unit="bytes"),
        Figure("from folder", "kv_tier_loaded_bytes", unit="bytes"),
        Figure("to folder", "kv_tier_saved_bytes", unit="bytes"),
        Figure("from peers", "kv_tier_copied_bytes", unit="bytes"),
        Figure("failed loads", "kv_tier_failed_loads"),
        Figure("computed sooner", "kv_tier_recomputed_tokens"),
        Figure("folder", "kv_tier_folder_bytes", unit="bytes"),
    ),
    how_to_turn_on="Start the engine with kv_offload_dir=FOLDER.",
)
