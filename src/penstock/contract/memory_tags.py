"""Tags of a worker's long-lived memory, as an engine that sleeps gives it back."""

from __future__ import annotations

# Model, drafter and adapters.
WEIGHTS = "weights"
# KV cache, recurrent states with their snapshots, and outputs of encoders.
KV_CACHE = "kv_cache"
MEMORY_TAGS = (WEIGHTS, KV_CACHE)
