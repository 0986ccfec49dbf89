"""Worker sides of features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.config import EngineConfig
from penstock.config.model import GENERATE
from penstock.contract.feature import Side, check_options_of_features, features_of, make_side
from penstock.device import Device
from penstock.errors import ConfigError
from penstock.models.interface import LanguageModel
from penstock.runner.model_states import ModelState
from penstock.runner.output_heads import Generation, HeadFactory
from penstock.runner.sampling.logits_transform import LogitsTransform
from penstock.runner.slot_owner import SlotOwner
from penstock.worker.memory_by_tag import MemoryByTag
from penstock.worker.memory_plan import MemoryTerm
from penstock.worker.weight_updates import WeightUpdates


@dataclass(frozen=True, slots=True)
class WorkerServices:
    """Services of a worker for a feature.

    dtype: of the model's activations. memory: the worker's, once it has a runner; None for a plan. rank, updates: of a
    worker that serves; restore_weights: loads a folder that may go later.
    """

    config: EngineConfig
    device: Device
    model: LanguageModel
    dtype: torch.dtype
    memory: MemoryByTag | None = None
    rank: int = 0
    updates: WeightUpdates | None = None
    restore_weights: Callable[[str], None] | None = None

    @property
    def num_slots(self) -> int:
        """Slots of requests, and of padding."""
        return self.config.scheduler.max_num_seqs + 1


class WorkerFeature:
    """Worker side of a feature, made when the runner is. All methods are optional."""

    def slot_owners(self) -> Sequence[SlotOwner]:
        """Owners of the feature's per-slot state."""
        return ()

    def logits_transforms(self) -> Sequence[LogitsTransform]:
        """Transforms of the logits before sampling, after those of sampling parameters and custom processors."""
        return ()

    def replace_model(self, model: LanguageModel) -> None:
        """Attach to the model that takes the place of another one, with the same layers."""

    def tensors(self, tag: str) -> Sequence[Tensor]:
        """Large tensors of a tag of memory (`contract/memory_tags.py`) whose content an engine that sleeps keeps."""
        return ()

    def drop(self, tag: str) -> None:
        """Drop what the feature can compute again, before memory of this tag is given back; no request runs."""

    def close(self) -> None:
        """End threads, and drop references to device memory."""


class WorkerFeatures:
    """Worker sides of all features of an engine and its model.

    owners: of the features' per-slot state. transforms: of logits. output_head: factory of the head that the
    option `output_head` names. rpc_methods: methods of the sides by name. model_state: builder of the model's inputs;
    None for plain ones.
    is_profile: leave out features whose `memory` is known.

    Raises ConfigError for a head that no feature has, and for two features that build the model's inputs.
    """

    def __init__(self, services: WorkerServices, *, is_profile: bool = False) -> None:
        features = features_of(services.config, features_of_model(services.model))
        check_options_of_features(services.config)
        self._sides: list[WorkerFeature] = []
        self.owners: list[SlotOwner] = []
        self.transforms: list[LogitsTransform] = []
        self.rpc_methods: dict[str, Callable[..., Any]] = {}
        for feature in features:
            if is_profile and feature.memory:
                continue
            side = make_side(feature.worker_side, services)
            if isinstance(side, WorkerFeature):
                self._sides.append(side)
                self.owners += side.slot_owners()
                self.transforms += side.logits_transforms()
            elif side is not None:
                self.owners.append(side)
            self.rpc_methods.update({name: getattr(side, name) for name in feature.worker_methods})
        states = [feature for feature in features if feature.model_state is not None]
        if len(states) > 1:
            names = " and ".join(feature.name for feature in states)
            raise ConfigError(f"{names} both build the model's inputs, which one feature can. Leave one of them out.")
        self.model_state: ModelState | None = make_side(states[0].model_state, services) if states else None
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

    def tensors(self, tag: str) -> list[Tensor]:
        """As `WorkerFeature`, of all features."""
        return [tensor for side in self._sides for tensor in side.tensors(tag)]

    def drop(self, tag: str) -> None:
        """As `WorkerFeature`, of all features."""
        for side in self._sides:
            side.drop(tag)

    def close(self) -> None:
        """Close all features."""
        for side in self._sides:
            side.close()


def memory_of_features(config: EngineConfig, model: LanguageModel, kind: str, dtype: torch.dtype) -> list[MemoryTerm]:
    """Memory terms of the features that are left out of the profile run. kind: of the device."""
    return [
        MemoryTerm(_as_field(name), make_side(side, config, model, kind, dtype), name)
        for feature in features_of(config, features_of_model(model))
        for name, side in feature.memory.items()
    ]


def measure_runs(services: WorkerServices) -> list[MemoryTerm]:
    """Memory terms of the largest work of features beside the forward pass, which is run."""
    terms = []
    for name, side in _runs(services):
        with services.device.measure_peak() as peak:
            make_side(side, services, True)
        terms.append(MemoryTerm(_as_field(name), peak.bytes_above_start, name, is_temporary=True))
    return terms


def warm_up_runs(services: WorkerServices) -> None:
    """Run the smallest work of features beside the forward pass."""
    for _, side in _runs(services):
        make_side(side, services, False)


def _runs(services: WorkerServices) -> Iterator[tuple[str, Side]]:
    for feature in features_of(services.config, features_of_model(services.model)):
        yield from feature.runs.items()


def _as_field(name: str) -> str:
    return name.lower().replace(" ", "_")


def features_of_model(model: LanguageModel) -> Sequence[str]:
    """Modules of the features that a model asks for."""
    return getattr(model, "features", ())
