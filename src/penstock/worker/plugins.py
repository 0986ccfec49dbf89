"""Plugins: entry points of installed packages, called in every process before its core or worker is built.

The engine's own features are registered there too, since messages may have parts of theirs.
"""

from __future__ import annotations

import logging
from importlib.metadata import entry_points

from penstock.config.sampling import LOGITS_PROCESSORS_GROUP
from penstock.contract.feature import register_built_in_features
from penstock.errors import ConfigError
from penstock.system import env

logger = logging.getLogger(__name__)
GROUP = "penstock.general_plugins"


def load_plugins(group: str = GROUP) -> list[str]:
    """Register the built-in features, and call all plugins of an entry-point group, or those of PENSTOCK_PLUGINS.

    Returns the names of the plugins, which must be idempotent: a process may have a core and several workers. Raises
    ConfigError for a named plugin that is not installed, and for one that fails.
    """
    register_built_in_features()
    found = {entry_point.name: entry_point for entry_point in entry_points(group=group)}
    allowed = env.allowed_plugins()
    names = sorted(found) if allowed is None else allowed
    # Loaded by the sampler; PENSTOCK_PLUGINS chooses among both kinds.
    others = {entry_point.name for entry_point in entry_points(group=LOGITS_PROCESSORS_GROUP)}
    for name in names:
        if name not in found and name in others:
            continue
        if name not in found:
            installed = ", ".join(sorted(found)) or "none"
            raise ConfigError(f"PENSTOCK_PLUGINS names {name!r}, which is not installed. Installed: {installed}.")
        try:
            found[name].load()()
        except Exception as error:
            raise ConfigError(
                f"Plugin {name!r} ({found[name].value}) failed: {type(error).__name__}: {error}"
            ) from error
        logger.debug("Plugin %s loaded", name)
    return names
