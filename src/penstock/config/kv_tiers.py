"""Options of KV cache blocks that are kept outside of the KV cache."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError

_GIB = 1 << 30
_SHORTEST_SECRET = 16
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
            is_number = isinstance(size, (int, float)) and not isinstance(size, bool)
            if not is_number or not math.isfinite(size) or size <= 0:
                raise ConfigError(f"{name}={size!r} is not valid. Allowed: a number of GiB above 0.")
        given = self.kv_offload_dir
        if given is not None and (not isinstance(given, (str, os.PathLike)) or not os.fspath(given)):
            raise ConfigError(f"kv_offload_dir={given!r} is not valid. Allowed: the path of a folder that is there.")
        folder = self.folder
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"kv_offload_dir={str(folder)!r} is not a folder. Create it, or leave it out.")
        if folder is not None and not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"kv_offload_dir={str(folder)!r} cannot be written to. Give another folder.")
        if self.kv_load_policy not in LOAD_POLICIES:
            raise ConfigError(
                f"kv_load_policy={self.kv_load_policy!r} is not valid. Allowed: {', '.join(map(repr, LOAD_POLICIES))}."
            )
        self._check_peers()

    def _check_peers(self) -> None:
        given = self.kv_peers.split(",") if isinstance(self.kv_peers, str) else self.kv_peers
        if not isinstance(given, Sequence) or not all(isinstance(one, str) for one in given):
            raise ConfigError(f"kv_peers={self.kv_peers!r} is not valid. Allowed: a list of addresses, host:port.")
        peers = tuple(one.strip() for one in given if one.strip())
        object.__setattr__(self, "kv_peers", peers)
        if not isinstance(self.kv_peers_other_ranks, bool):
            raise ConfigError(f"kv_peers_other_ranks={self.kv_peers_other_ranks!r} is not valid. Allowed: True, False.")
        if self.kv_peers_other_ranks and not peers:
            raise ConfigError("kv_peers_other_ranks=True has no effect without kv_peers. Give them, or leave it out.")
        addresses = [("kv_peers", peer) for peer in peers]
        if self.kv_listen is not None:
            addresses.append(("kv_listen", self.kv_listen))
        for name, address in addresses:
            host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
            if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
                raise ConfigError(f"{name}={address!r} is not valid. Allowed: a host and a port, as 10.0.0.5:7000.")
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

    def read_secret(self) -> bytes:
        """Read the secret. Raises ConfigError for a file that cannot be read, or is too short."""
        path = Path(self.kv_secret_file or "").expanduser()
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
        return None if given is None else Path(given).expanduser().absolute()

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
