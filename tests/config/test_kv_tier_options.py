"""Options of blocks outside of the KV cache: what cannot be, or has no effect, is refused by its name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from penstock.config.kv_tiers import KVTierConfig
from penstock.errors import ConfigError


@pytest.fixture
def peers(tmp_path: Path) -> dict[str, Any]:
    """Options beside the address of peers."""
    (tmp_path / "secret").write_text("a secret of some length")
    return {"kv_offload_dir": tmp_path, "kv_secret_file": tmp_path / "secret"}


@pytest.mark.parametrize("name", ["kv_offloading_size", "kv_offload_dir_size"])
@pytest.mark.parametrize("size", [1e-10, 0, -1, 1e300, 10**400, float("nan"), float("inf"), True, "16"])
def test_sizes_that_cannot_be(tmp_path: Path, name: str, size: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=f"{name}={size!r} is not valid. Allowed: a number of GiB from 1e-09 to 1e".replace("+", r"\+"),
    ):
        KVTierConfig(kv_offload_dir=tmp_path, **{name: size})


@pytest.mark.parametrize("name", ["kv_offload_dir", "kv_secret_file"])
@pytest.mark.parametrize("path", ["", 5, b"/tmp", "~no-such-user/x", "a\0b"])
def test_paths_that_cannot_be(tmp_path: Path, name: str, path: Any) -> None:
    options = {"kv_offload_dir": tmp_path, "kv_listen": "127.0.0.1:7000", name: path}
    with pytest.raises(ConfigError, match=re.escape(f"{name}={path!r} is not valid") + r".* Allowed: the path of a f"):
        KVTierConfig(**options)


ADDRESSES = [
    *(
        "http://h:80",
        "h h:80",
        "h/x:80",
        "h\n:80",
        "h:8\n0",
        "h:\u0663",
        "::1:80",
        "",
        "h",
        ":80",
        "h:",
        "h:0",
        "h:65536",
    ),
    *("[::1:80", "[::g]:80", "[10.0.0.5]:80", "10.0.0.256:80", "10.0.5:80", "h:+80", "tcp:h:80"),
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_addresses_that_cannot_be(peers: dict[str, Any], address: str) -> None:
    for options in ({"kv_listen": address}, {"kv_peers": [address]}, {"kv_peers": ["10.0.0.5:7000", address]}):
        (name,) = options
        with pytest.raises(
            ConfigError, match=re.escape(f"{name}={address!r} is not valid. Allowed: a host and a port")
        ):
            KVTierConfig(**peers, **options)


@pytest.mark.parametrize("listed", [",", "h:80,", "*:80", "h:80,,h:81"])
def test_lists_of_peers_that_cannot_be(peers: dict[str, Any], listed: str) -> None:
    with pytest.raises(ConfigError, match="kv_peers=.* is not valid. Allowed: a host and a port"):
        KVTierConfig(**peers, kv_peers=listed)


@pytest.mark.parametrize(
    "address", ["h:80", "10.0.0.5:1", "[fd00::5]:65535", "a-b.c_d.example:7000", "*:7000", "eth0:7000"]
)
def test_addresses_that_can_be(peers: dict[str, Any], address: str) -> None:
    assert KVTierConfig(**peers, kv_listen=address).kv_listen == address
    if not address.startswith("*"):
        assert KVTierConfig(**peers, kv_peers=f"{address}, {address}").kv_peers == (address, address)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offload_dir_size": 5}, "kv_offload_dir_size=5 has no effect without kv_offload_dir. Give it"),
        (
            {"kv_offload_dir_size": 5, "kv_offloading_size": 1},
            "kv_offload_dir_size=5 has no effect without kv_offload_dir. Give it",
        ),
        (
            {"kv_load_policy": "always"},
            "kv_load_policy='always' has no effect without kv_offload_dir or kv_offloading_size",
        ),
        ({"kv_secret_file": "SECRET"}, "kv_secret_file='.*' has no effect without kv_peers or kv_listen"),
        (
            {"kv_secret_file": "SECRET", "kv_offload_dir": "."},
            "kv_secret_file='.*' has no effect without kv_peers or kv_listen",
        ),
        ({"kv_peers_other_ranks": True, "kv_offload_dir": "."}, "kv_peers_other_ranks=True has no effect without kv_p"),
    ],
)
def test_options_without_effect(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    (tmp_path / "secret").write_text("a secret of some length")
    if "kv_secret_file" in options:
        options = {**options, "kv_secret_file": tmp_path / "secret"}
    with pytest.raises(ConfigError, match=message):
        KVTierConfig(**options)
