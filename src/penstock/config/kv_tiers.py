"""Options of KV cache blocks that are kept outside of the KV cache."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

_GIB = 1 << 30
# Sizes: one byte at least.
_LEAST_GIB, _MOST_GIB = 1e-9, 1e9
_SHORTEST_SECRET = 16
_A_FOLDER = "the path of a folder that is there"
# Name or address of a host, or of an IPv6 one in brackets; and a port.
_ADDRESS = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*|\*|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
FASTER, ALWAYS = LOAD_POLICIES = ("faster", "always")


@dataclass(frozen=True, slots=True)
class KVTierConfig:
    """kv_offloading_size: GiB of host memory of all ranks for blocks that leave the KV cache; None for none.
    kv_offload_dir: folder for blocks of the KV cache, which later requests load, also after a restart, and of other
        engines that share the folder; None keeps none.
    kv_offload_dir_size: GiB of all files in this folder; the least recently used ones make room.
    kv_load_policy: "faster" computes what is expected to be computed before it is loaded, by the measured time of both;
        "always" loads whatever is there.
    kv_listen: address, as "host:port", at which other engines get blocks of this folder; None for none.
    kv_peers: addresses of other engines' `kv_listen`, as a list or "host:port,host:port", which are asked for blocks
        that are not in the folder.
    kv_peers_other_ranks: take blocks of peers with another tensor_parallel_size too, whose shares of heads are put
        together or split. They have other roundings, so tokens may differ from those that are computed.
    kv_secret_file: file with a secret of at least 16 characters, the same for all of these engines.
    """

    kv_offloading_size: float | None = None
    kv_offload_dir: str | os.PathLike[str] | None = None
    kv_offload_dir_size: float = 16.0
    kv_load_policy: str = "faster"
    kv_listen: str | None = None
    kv_peers: Sequence[str] | str = ()
    kv_peers_other_ranks: bool = False
    kv_secret_file: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name, size in (
            ("kv_offload_dir_size", self.kv_offload_dir_size),
            ("kv_offloading_size", 1.0 if self.kv_offloading_size is None else self.kv_offloading_size),
        ):
            check_gib(name, size)
        if self.kv_offload_dir is not None:
            folder_of_option("kv_offload_dir", self.kv_offload_dir, is_written=True)
        if self.kv_load_policy not in LOAD_POLICIES:
            raise ConfigError(
                f"kv_load_policy={self.kv_load_policy!r} is not valid. Allowed: {', '.join(map(repr, LOAD_POLICIES))}."
            )
        self._check_peers()
        self._check_effects()

    def _check_peers(self) -> None:
        given = self.kv_peers.split(",") if isinstance(self.kv_peers, str) else self.kv_peers
        if not isinstance(given, Sequence) or not all(isinstance(one, str) for one in given):
            raise ConfigError(f"kv_peers={self.kv_peers!r} is not valid. Allowed: a list of addresses, host:port.")
        peers = tuple(one.strip() for one in given)
        object.__setattr__(self, "kv_peers", peers)
        if not isinstance(self.kv_peers_other_ranks, bool):
            raise ConfigError(f"kv_peers_other_ranks={self.kv_peers_other_ranks!r} is not valid. Allowed: True, False.")
        addresses = [("kv_peers", peer) for peer in peers]
        if self.kv_listen is not None:
            addresses.append(("kv_listen", self.kv_listen))
        for name, address in addresses:
            check_address(name, address, allows_all=name == "kv_listen")
            if self.folder is None:
                raise ConfigError(f"{name}={address!r} needs kv_offload_dir, the folder of the blocks. Give it.")
            if self.kv_secret_file is None:
                raise ConfigError(
                    f"{name}={address!r} needs kv_secret_file, since blocks tell about prompts: "
                    "write at least 16 random characters to a file, the same for all engines."
                )
        if addresses and importlib.util.find_spec("zmq") is None:
            raise ConfigError(f"{addresses[0][0]} needs pyzmq: pip install 'penstock[peers]'.")
        if self.kv_secret_file is not None:
            self.read_secret()

    def _check_effects(self) -> None:
        """Refuse options that would have no effect."""
        defaults = {one.name: one.default for one in fields(self)}
        for name, has_effect, missing in (
            ("kv_offload_dir_size", self.folder is not None, "kv_offload_dir"),
            ("kv_load_policy", self.option is not None, "kv_offload_dir or kv_offloading_size"),
            ("kv_peers_other_ranks", bool(self.kv_peers), "kv_peers"),
            ("kv_secret_file", bool(self.kv_peers) or self.kv_listen is not None, "kv_peers or kv_listen"),
        ):
            value = getattr(self, name)
            if not has_effect and value != defaults[name]:
                shown = value if isinstance(value, (bool, float, int)) else repr(os.fspath(value))
                raise ConfigError(f"{name}={shown} has no effect without {missing}. Give it, or leave {name} out.")

    def read_secret(self) -> bytes:
        """Read the secret. Raises ConfigError for a file that cannot be read, or is too short."""
        path = _path("kv_secret_file", self.kv_secret_file, "the path of a file with the secret")
        try:
            secret = path.read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"kv_secret_file={str(path)!r} cannot be read: {error.strerror}.") from error
        if len(secret) < _SHORTEST_SECRET:
            raise ConfigError(f"kv_secret_file={str(path)!r} has fewer than {_SHORTEST_SECRET} characters.")
        return secret

    @property
    def folder(self) -> Path | None:
        """The folder; None to keep no blocks."""
        given = self.kv_offload_dir
        return None if given is None else _path("kv_offload_dir", given, _A_FOLDER)

    @property
    def option(self) -> str | None:
        """Option that asks for blocks outside of the KV cache, with its value; None for none."""
        if self.folder is not None:
            return f"kv_offload_dir={str(self.folder)!r}"
        return None if self.kv_offloading_size is None else f"kv_offloading_size={self.kv_offloading_size:g}"

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory of all ranks; 0 for none."""
        return int((self.kv_offloading_size or 0) * _GIB)

    @property
    def max_bytes(self) -> int:
        """Bytes of all files."""
        return int(self.kv_offload_dir_size * _GIB)


def check_gib(name: str, size: Any) -> None:
    """Raise ConfigError for what is not a number of GiB."""
    is_number = isinstance(size, (int, float)) and not isinstance(size, bool)
    if not is_number or not _LEAST_GIB <= size <= _MOST_GIB:
        raise ConfigError(
            f"{name}={size!r} is not valid. Allowed: a number of GiB from {_LEAST_GIB:g} to {_MOST_GIB:g}."
        )


def folder_of_option(name: str, given: Any, *, is_written: bool) -> Path:
    """Absolute path of a folder that is there. Raises ConfigError for what is none, or cannot be used."""
    folder = _path(name, given, _A_FOLDER)
    if not folder.is_dir():
        raise ConfigError(f"{name}={str(folder)!r} is not a folder. Create it, or leave {name} out.")
    if not os.access(folder, os.W_OK | os.X_OK if is_written else os.R_OK | os.X_OK):
        used = "written to" if is_written else "read"
        raise ConfigError(f"{name}={str(folder)!r} cannot be {used}. Give another folder.")
    return folder


def check_address(name: str, address: Any, *, allows_all: bool) -> None:
    """Raise ConfigError for what is not a host and a port. allows_all: "*" for all addresses of this host."""
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None or not 0 < int(match[2]) < 1 << 16 or not _is_host(match[1], allows_all=allows_all):
        allowed = "10.0.0.5:7000, [fd00::5]:7000 or *:7000" if allows_all else "10.0.0.5:7000 or [fd00::5]:7000"
        raise ConfigError(f"{name}={address!r} is not valid. Allowed: a host and a port, as {allowed}.")


def is_ipv6(address: str) -> bool:
    """Whether the host of an address is an IPv6 one, in brackets."""
    return address.startswith("[")


def _is_host(host: str, *, allows_all: bool) -> bool:
    if host == "*":
        return allows_all
    try:
        if is_ipv6(host):
            ipaddress.IPv6Address(host[1:-1])
        elif not re.search("[A-Za-z_]", host):
            ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def _path(name: str, given: Any, allowed: str) -> Path:
    """Absolute path of an option. Raises ConfigError for what is none."""
    text = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"{name}={given!r} is not valid. Allowed: {allowed}.")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(f"{name}={text!r} is not valid: its home folder is not known. Allowed: {allowed}.") from error
