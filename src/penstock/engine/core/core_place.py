"""Default of `enable_multiprocessing` for an engine with many callers."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.executor.serialization import dumps

logger = logging.getLogger(__name__)


def with_core_process(config: EngineConfig) -> EngineConfig:
    """Decide `enable_multiprocessing`: the core gets a process of its own if the configuration can be sent there.

    Otherwise the core stays in this process, and the log says why.
    """
    if config.parallel.enable_multiprocessing is not None:
        return config
    why_not = None if config.parallel.has_core_process else _why_it_stays(config)
    if why_not is not None:
        logger.warning("The engine core runs in this process, since %s", why_not)
    return replace(config, parallel=replace(config.parallel, enable_multiprocessing=why_not is None))


def _why_it_stays(config: EngineConfig) -> str | None:
    ray = sys.modules.get("ray")
    if config.parallel.executor == "ray" and ray is not None and ray.is_initialized():
        return "it has connected to a Ray cluster, and another process might find another one."
    try:
        dumps("the configuration", config)
    except ConfigError as error:
        return str(error)
    return None
