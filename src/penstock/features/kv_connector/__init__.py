"""KV connectors: classes of users that load blocks of the KV cache from elsewhere, and save them there."""

from __future__ import annotations

from penstock.config import EngineConfig
from penstock.contract.feature import Feature, Figure
from penstock.features.kv_connector.messages import ConnectorResults, ConnectorStep


def _has_connector(config: EngineConfig) -> bool:
    return config.kv_connector.connector is not None


FEATURE = Feature(
    name="kv_connectors",
    is_on=_has_connector,
    parts=(ConnectorStep, ConnectorResults),
    scheduler_side="penstock.features.kv_connector.scheduling:ConnectorScheduling",
    worker_side="penstock.features.kv_connector.worker:ConnectorWorker",
    worker_methods=("get_kv_connector_handshake_metadata", "kv_connector_output"),
    counters={
        "external_prefix_cache_queries": "Tokens of prompts looked up outside of the KV cache.",
        "external_prefix_cache_hits": "Tokens of prompts whose KV came from outside of the KV cache.",
        "kv_connector_failed_loads": "Requests whose blocks a KV connector could not load.",
        "kv_connector_events": "Events of a KV connector's store (take_events), by kind.",
    },
    gauges={"kv_connector_stats": "Statistics of a KV connector (get_kv_connector_stats), by name, of the last 10 s."},
    figures=(
        Figure("external hits", "external_prefix_cache_hits", of="external_prefix_cache_queries"),
        Figure("failed loads", "kv_connector_failed_loads"),
    ),
    how_to_turn_on="Start the engine with kv_transfer_config, which names a KV connector.",
)
