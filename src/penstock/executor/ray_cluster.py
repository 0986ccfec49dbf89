"""Connection of this process to a Ray cluster."""

from __future__ import annotations

import importlib
import logging
import socket
from typing import Any

from penstock.errors import ConfigError, UnsupportedFeature
from penstock.system import env

logger = logging.getLogger(__name__)
_CONNECT_TIMEOUT_S = 10.0


def connect() -> Any:
    """Connect to the cluster of RAY_ADDRESS or of this machine, else start one; return the package ray.

    A cluster that starts here has this machine alone, and ends with this process.

    Raises UnsupportedFeature without the package; ConfigError for a cluster that cannot be reached.
    """
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util.placement_group")
    except ImportError as error:
        raise UnsupportedFeature(
            "distributed_executor_backend='ray' needs the package ray. Install it: pip install 'penstock[distributed]'."
        ) from error
    if not ray.is_initialized():
        address = env.ray_address()
        try:
            _check_answers(address)
            ray.init(address="auto")
        except OSError as error:
            if address:
                raise ConfigError(
                    f"distributed_executor_backend='ray' found no Ray cluster at RAY_ADDRESS={address!r}. Start it "
                    "there (`ray start --head`), or unset RAY_ADDRESS to use this machine alone."
                ) from error
            ray.init(address="local", include_dashboard=False)
            logger.info(
                "Ray: no cluster was found, so one was started on this machine, with %g CPUs. For several machines, "
                "run `ray start --head` on one and `ray start --address=FIRST:6379` on the others before.",
                ray.cluster_resources().get("CPU", 0),
            )
    return ray


def _check_answers(address: str | None) -> None:
    """Raise OSError if nothing listens at host:port, which Ray itself would try again for five minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and "/" not in host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
