"""Options of plugins' features."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError

_ALLOWED = "Allowed: a dictionary with a dictionary of options for each feature, or the same as JSON"


@dataclass(frozen=True, slots=True)
class AdditionalConfig:
    """additional_config: options of features that plugins register, by the name of the feature, such as
    {"images": {"cache_rows": 32}}; a dictionary, or JSON.
    """

    additional_config: Mapping[str, Any] | str | None = None

    def __post_init__(self) -> None:
        given = self.additional_config
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as error:
                raise ConfigError(f"additional_config={given!r} is not JSON: {error}. {_ALLOWED}.") from error
        if given is not None and not (
            isinstance(given, Mapping) and all(isinstance(options, Mapping) for options in given.values())
        ):
            raise ConfigError(f"additional_config={given!r} is not valid. {_ALLOWED}.")
        object.__setattr__(self, "additional_config", given or None)

    @property
    def by_feature(self) -> Mapping[str, Mapping[str, Any]]:
        """Options by the names of features."""
        given = self.additional_config
        return given if isinstance(given, Mapping) else {}
