"""Options of KV cache events, which tell routers what blocks an engine has."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from penstock.config.checks import check_choice, check_flag, check_integer, read_dictionary
from penstock.errors import ConfigError

NULL, ZMQ = "null", "zmq"
_OPTION, _SWITCH = "kv_events_config", "enable_kv_cache_events"
_LAST_PORT = (1 << 16) - 1
# What an endpoint of tcp has in the place of a host where it listens.
_ALL_INTERFACES = ("*", "0.0.0.0", "::", "[::]")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Options of the publication, with vLLM's names.

    publisher: "zmq", or "null" for no publication; None is "zmq" for events that are on.
    endpoint: of a PUB socket, "tcp://*:PORT" or "ipc://PATH" to listen, "tcp://HOST:PORT" to connect to a subscriber
        that listens. replay_endpoint: where subscribers ask for batches that they have missed; None for nowhere. Engine
        N of data parallelism has these ports plus N, or these paths with "_dpN".
    buffer_steps: last batches that are sent again. hwm: batches that wait for a slow subscriber (0 for any number).
    max_queue_size: batches that wait to be sent. topic: first frame of each message.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        check_flag(f"{_SWITCH} of {_OPTION}", self.enable_kv_cache_events)
        if self.publisher is not None:
            check_choice(f"publisher of {_OPTION}", self.publisher, (NULL, ZMQ))
        for name, minimum in (("buffer_steps", 1), ("hwm", 0), ("max_queue_size", 1)):
            check_integer(f"{name} of {_OPTION}", getattr(self, name), minimum, (1 << 31) - 2)
        if not isinstance(self.topic, str):
            raise ConfigError(f"topic={self.topic!r} of {_OPTION} is not valid. Allowed: a text.")
        _check_endpoint("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            _check_endpoint("replay_endpoint", self.replay_endpoint)
            if not listens(self.replay_endpoint):
                raise ConfigError(
                    f"replay_endpoint={self.replay_endpoint!r} of {_OPTION} is not valid. Allowed: an endpoint at "
                    "which the engine listens, 'tcp://*:PORT' or 'ipc://PATH'."
                )
        if self.is_on and importlib.util.find_spec("zmq") is None:
            raise ConfigError(f"{_OPTION} needs pyzmq: pip install 'penstock[peers]'.")

    @property
    def is_on(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher != NULL

    def check_ranks(self, num_ranks: int) -> None:
        """Raise ConfigError unless so many engines of data parallelism have endpoints that differ."""
        ports = {}
        for name in ("endpoint", "replay_endpoint"):
            endpoint = getattr(self, name)
            if endpoint is None:
                continue
            if endpoint.startswith("tcp") and _port(endpoint) + num_ranks - 1 > _LAST_PORT:
                raise ConfigError(
                    f"{name}={endpoint!r} of {_OPTION} is not valid with data_parallel_size={num_ranks}, whose last "
                    f"engine has a port above {_LAST_PORT}. Give a lower port."
                )
            if listens(endpoint):
                ports[name] = {endpoint_of_rank(endpoint, rank).rpartition(":")[2] for rank in range(num_ranks)}
        if len(ports) == 2 and ports["endpoint"] & ports["replay_endpoint"]:
            raise ConfigError(
                f"endpoint={self.endpoint!r} and replay_endpoint={self.replay_endpoint!r} of {_OPTION} are not valid "
                f"with data_parallel_size={num_ranks}, whose engine N has both ports plus N. Give ports that are at "
                f"least {num_ranks} apart."
            )


def listens(endpoint: str) -> bool:
    """Whether a publisher listens at an endpoint, rather than connecting to it."""
    return endpoint.startswith("ipc") or _host(endpoint) in _ALL_INTERFACES


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """The endpoint of an engine of data parallelism."""
    if endpoint.startswith("ipc"):
        return f"{endpoint}_dp{rank}" if rank else endpoint
    return f"{endpoint.rpartition(':')[0]}:{_port(endpoint) + rank}"


def _host(endpoint: str) -> str:
    return endpoint.partition("://")[2].rpartition(":")[0]


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def _check_endpoint(name: str, endpoint: Any) -> None:
    scheme, _, address = endpoint.partition("://") if isinstance(endpoint, str) else ("", "", "")
    host, _, port = address.rpartition(":")
    is_tcp = scheme == "tcp" and bool(host) and port.isdecimal() and 0 < int(port) <= _LAST_PORT
    if not is_tcp and not (scheme == "ipc" and address):
        raise ConfigError(
            f"{name}={endpoint!r} of {_OPTION} is not valid. Allowed: 'tcp://HOST:PORT', with '*' as the host to "
            "listen, or 'ipc://PATH'."
        )


@dataclass(frozen=True, slots=True)
class KVEventsOption:
    """kv_events_config: publication of what blocks come to the KV cache and leave it, for routers, as a dictionary or
    JSON with enable_kv_cache_events, publisher ("zmq" or "null"), endpoint ("tcp://*:5557"), replay_endpoint,
    buffer_steps, hwm, max_queue_size and topic; None for none.
    """

    kv_events_config: Mapping[str, Any] | str | None = None

    def __post_init__(self) -> None:
        if self.kv_events_config is None:
            return
        names = [one.name for one in fields(KVEventsConfig)]
        given = read_dictionary(_OPTION, self.kv_events_config, names, {_SWITCH: True})
        if given and _SWITCH not in given:
            raise ConfigError(f"{_OPTION} has no effect without {_SWITCH}. Give it, as True or False.")
        object.__setattr__(self, _OPTION, given)
        KVEventsConfig(**given)

    @property
    def events(self) -> KVEventsConfig | None:
        """Options of the publication; None for events that are off."""
        given = self.kv_events_config
        made = KVEventsConfig(**given) if isinstance(given, Mapping) else None
        return made if made is not None and made.is_on else None
