"""Worker sides of features."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from penstock.config import EngineConfig
from penstock.config.model import GENERATE
from penstock.contract.feature import Side, features_of, make_side
from penstock.device import Device
from penstock.errors import ConfigError
from penstock.models.interface import LanguageModel
from penstock.runner.output_heads import Generation, HeadFactory
from penstock.runner.slot_owner import SlotOwner


@dataclass(frozen=True, slots=True)
class WorkerServices:
    """What a worker gives to a feature. dtype: of the model's activations. num_slots: slots of requests and padding."""

    config: EngineConfig
    device: Device
    model: LanguageModel
    dtype: torch.dtype
    num_slots: int


class WorkerFeature:
    """Worker side of a feature, made when the runner is. All methods are optional.

    rpc_methods: methods of this object that `collective_rpc` reaches by their names, as those of the worker.
    """

    rpc_methods: Sequence[str] = ()

    def slot_owners(self) -> Sequence[SlotOwner]:
        """Owners of the feature's per-slot state."""
        return ()

    def replace_model(self, model: LanguageModel) -> None:
        """Attach to the model that takes the place of another one, with the same layers."""

    def close(self) -> None:
        """End threads, and drop references to device memory."""


class WorkerFeatures:
    """Worker sides of all features of an engine and its model.

    owners: of the features' per-slot state. output_head: factory of the head that the option `output_head` names.
    rpc_methods: methods of the sides by name. Raises ConfigError for a head that no feature has.
    """

    def __init__(self, services: WorkerServices) -> None:
        features = features_of(services.config, features_of_model(services.model))
        made = [make_side(feature.worker_side, services) for feature in features]
        self._sides = [side for side in made if isinstance(side, WorkerFeature)]
        self.owners = [side for side in made if isinstance(side, SlotOwner)]
        for side in self._sides:
            self.owners += side.slot_owners()
        self.rpc_methods: Mapping[str, Callable[..., Any]] = {
            name: getattr(side, name) for side in self._sides for name in side.rpc_methods
        }
        heads: dict[str, Side] = {GENERATE: Generation}
        for feature in features:
            heads.update(feature.output_heads)
        name = services.config.model.output_head
        if name not in heads:
            known = ", ".join(sorted(heads))
            raise ConfigError(f"output_head={name!r} is not registered. Registered: {known}. Plugins add others.")
        self.output_head: HeadFactory = partial(make_side, heads[name])

    def replace_model(self, model: LanguageModel) -> None:
        """Attach all features to another model."""
        for side in self._sides:
            side.replace_model(model)

    def close(self) -> None:
        """Close all features."""
        for side in self._sides:
            side.close()


def features_of_model(model: LanguageModel) -> Sequence[str]:
    """Modules of the features that a model asks for."""
    return getattr(model, "features", ())
