"""Where the core of an engine runs that serves many callers, if nobody has said so."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.executor.program import Program, main_path, pickled

logger = logging.getLogger(__name__)


def with_core_process(config: EngineConfig) -> EngineConfig:
    """The same with `enable_multiprocessing` decided: the core gets a process of its own, where that can be.

    Where it cannot, as with a class that a notebook defines, it stays in this process, and the log says why.
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
        sent = pickled("the configuration", config)
        if main_path() is None:
            # As it would be there: what the program defines cannot be found.
            Program(None).load(sent)
    except ConfigError as error:
        return str(error)
    return None
