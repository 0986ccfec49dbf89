"""Options of weights that a trainer sends to the running engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.checks import check_choice, read_dictionary
from penstock.errors import ConfigError

BACKENDS = ("gloo", "nccl", "ipc", "files")
KEEP, UNDEFINED = "keep", "undefined"
_DEFAULT_TIMEOUT_S = 300.0
_FIELDS = ("backend", "timeout_s", "recovery", "recovery_dir")


@dataclass(frozen=True, slots=True)
class WeightTransferConfig:
    """weight_transfer_config: how a trainer sends weights, as a dictionary or JSON, such as {"backend": "gloo"}; None
    for engines without a trainer. backend: "gloo" or "nccl" (a group of the trainer and all workers), "ipc" (memory
    that the trainer shares), or "files". timeout_s: seconds to wait for the trainer. recovery: what workers have after
    a crash, "keep" (the newest complete weights, which are written to the folder recovery_dir) or "undefined" (requests
    wait until the trainer sends weights again).
    """

    weight_transfer_config: Mapping[str, Any] | str | None = None

    def __post_init__(self) -> None:
        given = self.weight_transfer_config
        if given is None:
            return
        given = read_dictionary("weight_transfer_config", given, _FIELDS, {"backend": "gloo"})
        object.__setattr__(self, "weight_transfer_config", given)
        check_choice("backend of weight_transfer_config", given.get("backend", "gloo"), BACKENDS)
        check_choice("recovery of weight_transfer_config", self.recovery, (KEEP, UNDEFINED))
        timeout_s = given.get("timeout_s", _DEFAULT_TIMEOUT_S)
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
            raise ConfigError(f"timeout_s={timeout_s!r} of weight_transfer_config must be a positive number.")
        if (self.recovery == KEEP) != ("recovery_dir" in given):
            raise ConfigError(
                "weight_transfer_config has recovery='keep' with recovery_dir, a folder for two copies of the weights, "
                "or neither of the two."
            )

    @property
    def _fields(self) -> Mapping[str, Any]:
        given = self.weight_transfer_config
        return given if isinstance(given, Mapping) else {}

    @property
    def backend(self) -> str | None:
        """The backend; None for an engine without a trainer."""
        return None if self.weight_transfer_config is None else str(self._fields.get("backend", "gloo"))

    @property
    def timeout_s(self) -> float:
        return float(self._fields.get("timeout_s", _DEFAULT_TIMEOUT_S))

    @property
    def recovery(self) -> str:
        return str(self._fields.get("recovery", UNDEFINED))

    @property
    def recovery_dir(self) -> Path | None:
        """Folder of the newest complete weights; None to keep none."""
        given = self._fields.get("recovery_dir")
        return None if given is None else Path(str(given)).expanduser().absolute()
