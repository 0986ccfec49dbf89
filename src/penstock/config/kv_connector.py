"""Options of a KV connector, which brings blocks of the KV cache from elsewhere, and takes them there."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from penstock.config.checks import check_choice, read_dictionary
from penstock.errors import ConfigError

_OPTION = "kv_transfer_config"
_EXAMPLE = {"kv_connector": "FolderConnector", "kv_connector_module_path": "folder_connector", "kv_role": "kv_both"}
RECOMPUTE, FAIL = "recompute", "fail"
_PRODUCER, _CONSUMER, _BOTH = "kv_producer", "kv_consumer", "kv_both"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """A connector, with vLLM's names. kv_connector: name of its class, in the module kv_connector_module_path.

    kv_role: whether the engine saves blocks ("kv_producer"), loads them ("kv_consumer"), or both ("kv_both").
    kv_load_failure_policy: requests whose blocks cannot be loaded compute them ("recompute"), or end with an error
        ("fail"). kv_connector_extra_config: the connector's own options. engine_id: name of the engine; random if it
        is left out. Other fields are for connectors that read them.
    """

    kv_connector: str
    kv_role: str
    kv_connector_module_path: str | None = None
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    kv_load_failure_policy: str = FAIL
    engine_id: str | None = None
    kv_rank: int | None = None
    kv_parallel_size: int = 1
    kv_ip: str = "127.0.0.1"
    kv_port: int = 14579
    kv_buffer_device: str = "cpu"
    kv_buffer_size: float = 1e9

    def __post_init__(self) -> None:
        check_choice("kv_role of kv_transfer_config", self.kv_role, (_PRODUCER, _CONSUMER, _BOTH))
        policy = self.kv_load_failure_policy
        check_choice("kv_load_failure_policy of kv_transfer_config", policy, (RECOMPUTE, FAIL))
        for name in ("kv_connector", "kv_connector_module_path", "engine_id"):
            value = getattr(self, name)
            if not (isinstance(value, str) and value) and (name == "kv_connector" or value is not None):
                raise ConfigError(f"{name}={value!r} of kv_transfer_config is not valid. Allowed: a name.")
        if not isinstance(self.kv_connector_extra_config, Mapping):
            raise ConfigError("kv_connector_extra_config of kv_transfer_config is not valid. Allowed: a dictionary.")

    @classmethod
    def names(cls) -> list[str]:
        """Names of the fields."""
        return [one.name for one in fields(cls)]

    @classmethod
    def of(cls, given: Any) -> KVTransferConfig:
        """Read a dictionary, or one as JSON. Raises ConfigError."""
        given = read_dictionary(_OPTION, given, cls.names(), _EXAMPLE)
        missing = next((name for name in ("kv_connector", "kv_role") if given.get(name) is None), None)
        if missing is not None:
            raise ConfigError(f"kv_transfer_config has no {missing!r}. Give it.")
        return cls(**given)

    @property
    def is_kv_producer(self) -> bool:
        """Whether the engine saves blocks."""
        return self.kv_role in (_PRODUCER, _BOTH)

    @property
    def is_kv_consumer(self) -> bool:
        """Whether the engine loads blocks."""
        return self.kv_role in (_CONSUMER, _BOTH)

    @property
    def is_kv_transfer_instance(self) -> bool:
        return True

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        """An option of the connector's own."""
        return self.kv_connector_extra_config.get(key, default)


@dataclass(frozen=True, slots=True)
class KVConnectorConfig:
    """kv_transfer_config: KV connector, as a dictionary or JSON with kv_connector (name of a class),
    kv_connector_module_path (its module), kv_role ("kv_producer", "kv_consumer" or "kv_both"),
    kv_connector_extra_config (its own options) and kv_load_failure_policy ("fail" or "recompute"); None for none.
    """

    kv_transfer_config: Mapping[str, Any] | str | None = None

    def __post_init__(self) -> None:
        given = self.kv_transfer_config
        if given is not None:
            given = read_dictionary(_OPTION, given, KVTransferConfig.names(), _EXAMPLE)
            KVTransferConfig.of(given)
            # The scheduler's side and all ranks have one name.
            given = {**given, "engine_id": given.get("engine_id") or secrets.token_hex(16)}
        object.__setattr__(self, "kv_transfer_config", given)

    @property
    def connector(self) -> KVTransferConfig | None:
        """The connector; None without one."""
        given = self.kv_transfer_config
        return None if given is None else KVTransferConfig.of(given)
