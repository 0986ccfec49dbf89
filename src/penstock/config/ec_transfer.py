"""Options of the transfer of encoder outputs, which engines with one folder take from each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.checks import check_choice, read_dictionary
from penstock.config.kv_tiers import check_gib, folder_of_option
from penstock.errors import ConfigError

_OPTION, _EXTRA = "ec_transfer_config", "ec_connector_extra_config"
# One thing by three names: ours, and those of vLLM's versions.
CONNECTORS = ("folder", "ECExampleConnector", "ECSharedStorageConnector")
_PRODUCER, _CONSUMER, _BOTH = "ec_producer", "ec_consumer", "ec_both"
_PATH, _SIZE, _DEFAULT_GIB = "shared_storage_path", "shared_storage_gib", 16.0
_EXAMPLE = {"ec_connector": "folder", "ec_role": _PRODUCER, _EXTRA: {_PATH: "/dev/shm/encoded"}}
# Fields of connectors that send over a network or load code, which have no effect here, with vLLM's defaults.
_OF_OTHERS: dict[str, Any] = {
    "ec_buffer_device": "cuda",
    "ec_buffer_size": 1e9,
    "ec_rank": None,
    "ec_parallel_size": 1,
    "ec_ip": "127.0.0.1",
    "ec_port": 14579,
    "ec_connector_module_path": None,
}


@dataclass(frozen=True, slots=True)
class ECTransferConfig:
    """ec_transfer_config: transfer of encoder outputs through a folder, as a dictionary or JSON with ec_connector
    ("folder"), ec_role ("ec_producer", "ec_consumer" or "ec_both") and ec_connector_extra_config, which has
    shared_storage_path (the folder) and shared_storage_gib (16 by default); None for none.
    """

    ec_transfer_config: Mapping[str, Any] | str | None = None

    def __post_init__(self) -> None:
        if self.ec_transfer_config is None:
            return
        given = read_dictionary(_OPTION, self.ec_transfer_config, (*_EXAMPLE, "engine_id", *_OF_OTHERS), _EXAMPLE)
        object.__setattr__(self, _OPTION, given)
        check_choice(f"ec_connector of {_OPTION}", given.get("ec_connector"), CONNECTORS)
        check_choice(f"ec_role of {_OPTION}", given.get("ec_role"), (_PRODUCER, _CONSUMER, _BOTH))
        for name, default in _OF_OTHERS.items():
            if given.get(name, default) != default:
                raise ConfigError(
                    f"{name}={given[name]!r} of {_OPTION} has no effect, as encoder outputs go through a folder. Leave "
                    "it out."
                )
        extra = read_dictionary(f"{_EXTRA} of {_OPTION}", given.get(_EXTRA, {}), (_PATH, _SIZE), {_PATH: "encoded"})
        folder_of_option(_PATH, extra.get(_PATH), is_written=self.saves)
        check_gib(_SIZE, extra.get(_SIZE, _DEFAULT_GIB))

    def _given(self, name: str, of_none: Any = None) -> Any:
        given = self.ec_transfer_config
        return given.get(name, of_none) if isinstance(given, Mapping) else of_none

    @property
    def folder(self) -> Path | None:
        """Folder of the encoder outputs; None without a transfer."""
        path = self._given(_EXTRA, {}).get(_PATH)
        return None if path is None else folder_of_option(_PATH, path, is_written=False)

    @property
    def max_bytes(self) -> int:
        """Bytes of all files of the folder."""
        return int(self._given(_EXTRA, {}).get(_SIZE, _DEFAULT_GIB) * (1 << 30))

    @property
    def saves(self) -> bool:
        """Whether the engine keeps what it encodes."""
        return self._given("ec_role") in (_PRODUCER, _BOTH)

    @property
    def encodes_for_others(self) -> bool:
        """Whether requests for one token are for their items alone, which another engine needs."""
        return bool(self._given("ec_role") == _PRODUCER)
