"""The connector's class, found by the names in `kv_transfer_config`."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

from penstock.config import EngineConfig
from penstock.config.kv_connector import KVTransferConfig
from penstock.contract import KVCacheConfig
from penstock.errors import ConfigError
from penstock.features.kv_connector.base import ConnectorConfig, KVConnectorBase_V1, KVConnectorRole, SupportsHMA

# Modules of the connectors that come with the engine.
_BUILT_IN = {"MultiConnector": "penstock.features.kv_connector.multi"}
# Connectors of vLLM that are not there, and what takes their place.
_OF_PEERS = "Use kv_offload_dir with kv_listen and kv_peers (docs/disaggregation.md) in place of kv_transfer_config"
_OF_FOLDERS = "Use kv_offload_dir (docs/kv_tiers.md) in place of kv_transfer_config"
_INSTEAD = {
    **dict.fromkeys(
        ("NixlConnector", "NixlPushConnector", "MooncakeConnector", "P2pNcclConnector", "MoRIIOConnector"), _OF_PEERS
    ),
    **dict.fromkeys(
        (
            "OffloadingConnector",
            "SimpleCPUOffloadConnector",
            "LMCacheConnectorV1",
            "LMCacheMPConnector",
            "MooncakeStoreConnector",
            "FlexKVConnectorV1",
            "HF3FSKVConnector",
            "ExampleConnector",
            "SharedStorageConnector",
        ),
        _OF_FOLDERS,
    ),
}


def make_connector(
    engine: EngineConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig, rank: int = 0
) -> KVConnectorBase_V1:
    """Make the engine's connector for a role. Raises ConfigError as `make_one_of`."""
    transfer = engine.kv_connector.connector
    assert transfer is not None, "the feature is on"
    if (number := engine.parallel.engine_number) is not None:
        # Engines beside each other are several to others.
        transfer = replace(transfer, engine_id=f"{transfer.engine_id}_dp{number}")
    return make_one_of(engine, transfer, role, kv_cache_config, rank)


def make_one_of(
    engine: EngineConfig,
    transfer: KVTransferConfig,
    role: KVConnectorRole,
    kv_cache_config: KVCacheConfig,
    rank: int = 0,
) -> KVConnectorBase_V1:
    """Make the object of a connector for a role, which may be one of several.

    Raises ConfigError where there is none, or it cannot serve the model.
    """
    connector_class = _class_of(transfer)
    shown = f"kv_connector={transfer.kv_connector!r}"
    config = ConnectorConfig(transfer, engine, rank)
    layout = connector_class.get_required_kvcache_layout(config)
    if layout is not None:
        raise ConfigError(
            f"{shown} needs the layout {layout!r} of the KV cache, whose pages are bytes here. Use a connector that "
            "copies whole pages."
        )
    connector: KVConnectorBase_V1 = connector_class(config, role, kv_cache_config)
    if len(kv_cache_config.groups) > 1 and not isinstance(connector, SupportsHMA):
        raise ConfigError(
            f"{shown} takes models with one kind of attention, and this one has {len(kv_cache_config.groups)} groups "
            "of layers with block tables of their own. Derive it from SupportsHMA, too, or use another model."
        )
    return connector


def _class_of(transfer: KVTransferConfig) -> type[KVConnectorBase_V1]:
    name, path = transfer.kv_connector, transfer.kv_connector_module_path or _BUILT_IN.get(transfer.kv_connector)
    if path is None:
        instead = _INSTEAD.get(name, f"Allowed: {', '.join(_BUILT_IN)}")
        raise ConfigError(
            f"kv_connector={name!r} does not come with Penstock. {instead}, or the name of a class with "
            "kv_connector_module_path."
        )
    try:
        found: Any = getattr(importlib.import_module(path), name, None)
    except ImportError as error:
        raise ConfigError(f"kv_connector_module_path={path!r} cannot be imported: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, KVConnectorBase_V1)):
        raise ConfigError(
            f"kv_connector={name!r} of {path} is not a connector. Allowed: classes that derive from "
            "penstock.features.kv_connector.base.KVConnectorBase_V1."
        )
    return found
