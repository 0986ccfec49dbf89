"""KV cache events: what blocks come to the prefix cache and leave it, published for routers in vLLM's format."""

from __future__ import annotations

from penstock.config import EngineConfig
from penstock.contract.feature import Feature, Figure


def _publishes(config: EngineConfig) -> bool:
    return config.kv_events.events is not None


FEATURE = Feature(
    name="kv_events",
    is_on=_publishes,
    scheduler_side="penstock.features.kv_events.scheduling:EventScheduling",
    counters={
        "kv_event_batches": "Batches of KV cache events (kv_events_config).",
        "kv_event_batches_dropped": "Batches of KV cache events that were not sent, as max_queue_size others waited.",
    },
    figures=(Figure("event batches dropped", "kv_event_batches_dropped", of="kv_event_batches"),),
    how_to_turn_on="Start the engine with kv_events_config={'enable_kv_cache_events': True}.",
)
