"""Options of the transfer of encoder outputs: what has no effect here is refused by its name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.config.ec_transfer import CONNECTORS, ECTransferConfig
from penstock.errors import ConfigError


def transfer(folder: Path, **fields: Any) -> dict[str, Any]:
    extra = {"shared_storage_path": str(folder)}
    return {"ec_connector": "folder", "ec_role": "ec_both", "ec_connector_extra_config": extra, **fields}


@pytest.mark.parametrize("connector", CONNECTORS)
def test_connectors_of_folders_are_one(tmp_path: Path, connector: str) -> None:
    """With what vLLM's scripts give, as JSON too."""
    given = transfer(tmp_path, ec_connector=connector, engine_id="0", ec_ip="127.0.0.1", ec_buffer_size=1e9)
    for option in (ECTransferConfig(given), ECTransferConfig(json.dumps(given))):
        assert (option.folder, option.max_bytes) == (tmp_path, 16 << 30)


@pytest.mark.parametrize(
    ("role", "saves", "encodes_for_others"),
    [("ec_producer", True, True), ("ec_consumer", False, False), ("ec_both", True, False)],
)
def test_roles(tmp_path: Path, role: str, saves: bool, encodes_for_others: bool) -> None:
    found = ECTransferConfig(transfer(tmp_path, ec_role=role))
    assert (found.saves, found.encodes_for_others) == (saves, encodes_for_others)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"ec_connector": "SHMConnector"},
        "ec_connector of ec_transfer_config='SHMConnector' is not valid. Allowed: folder",
    ),
    ({"ec_role": "producer"}, "ec_role of ec_transfer_config='producer' is not valid. Allowed: ec_producer, ec_cons"),
    ({"ec_role": None}, "ec_role of ec_transfer_config=None is not valid. Allowed: ec_producer"),
    ({"ec_connector_extra_config": {}}, "shared_storage_path=None is not valid. Allowed: the path of a folder"),
    ({"ec_connector_extra_config": {"path": "."}}, "has 'path'. Allowed: shared_storage_path, shared_storage_gib."),
    ({"ec_connector_extra_config": {"shared_storage_path": "/nowhere"}}, "shared_storage_path='/nowhere' is not a fol"),
    (
        {"ec_connector_extra_config": {"shared_storage_path": ".", "shared_storage_gib": 0}},
        "shared_storage_gib=0 is not valid. Allowed: a number of GiB",
    ),
    ({"ec_port": 30161}, "ec_port=30161 of ec_transfer_config has no effect, as encoder outputs go through a folder."),
    ({"ec_buffer_size": 5}, "ec_buffer_size=5 of ec_transfer_config has no effect"),
    ({"ec_connector_module_path": "x"}, "ec_connector_module_path='x' of ec_transfer_config has no effect"),
    ({"ec_size": 1}, "ec_transfer_config has 'ec_size'. Allowed: ec_connector, ec_role"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_transfers_that_cannot_be(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        ECTransferConfig({**transfer(tmp_path), **fields})
