"""KV tiers: blocks of the KV cache that are kept in a folder, from which later requests load them."""

from __future__ import annotations

from penstock.config import EngineConfig
from penstock.contract.feature import Feature, Figure


def _has_folder(config: EngineConfig) -> bool:
    return config.kv_tiers.folder is not None


FEATURE = Feature(
    name="kv_tiers",
    is_on=_has_folder,
    deployment_side="penstock.features.kv_tiers.deployment:TierDeployment",
    scheduler_side="penstock.features.kv_tiers.scheduling:TierScheduling",
    worker_side="penstock.features.kv_tiers.worker:TierWorker",
    deployment_methods=("save_kv_prefix",),
    worker_methods=("kv_tier_folder", "move_kv_blocks"),
    counters={
        "external_prefix_cache_queries": "Tokens of prompts looked up in kv_offload_dir, or by a KV connector.",
        "external_prefix_cache_hits": "Tokens of prompts whose KV came from kv_offload_dir or a KV connector.",
        "kv_tier_loaded_bytes": "Bytes of the KV cache that were read from kv_offload_dir, of one rank.",
        "kv_tier_saved_bytes": "Bytes of the KV cache that were written to kv_offload_dir, of one rank.",
        "kv_tier_failed_loads": "Blocks of kv_offload_dir that could not be read, and were computed instead.",
        "kv_tier_copied_bytes": "Bytes of the KV cache that came from other engines (kv_peers).",
    },
    gauges={"kv_tier_folder_bytes": "Bytes of the files in kv_offload_dir, of all engines, as last counted."},
    figures=(
        Figure("external hits", "external_prefix_cache_hits", of="external_prefix_cache_queries"),
        Figure("from folder", "kv_tier_loaded_bytes", unit="bytes"),
        Figure("to folder", "kv_tier_saved_bytes", unit="bytes"),
        Figure("from peers", "kv_tier_copied_bytes", unit="bytes"),
        Figure("failed loads", "kv_tier_failed_loads"),
        Figure("folder", "kv_tier_folder_bytes", unit="bytes"),
    ),
    how_to_turn_on="Start the engine with kv_offload_dir=FOLDER.",
)
