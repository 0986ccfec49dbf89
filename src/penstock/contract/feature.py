"""Features: optional abilities of an engine, each found by one registration.

    register_feature(Feature(name="tone", parts=(TonePart,), worker_side=make_tones))

A feature has sides, one for each place that it works in: the scheduler's (`scheduler.feature.SchedulerFeature`), the
worker's (`worker.feature`), and output heads. Each side is a function or class of a module, or its name as
"module:name", which is imported where the side is made: the scheduler's process needs no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from penstock.config import EngineConfig
from penstock.contract.parts import Part, register_part
from penstock.errors import ConfigError

# Makes a side of a feature, or None where this engine needs none.
Side: TypeAlias = Callable[..., Any] | str | None

# Modules of the features that come with the engine; each has its registration as `FEATURE`.
_BUILT_IN = ("penstock.features.lora", "penstock.features.pooling")


def _always(_: EngineConfig) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Registration of a feature.

    name: unique. is_on: whether an engine with this configuration has the feature. parts: types of its message parts.
    scheduler_side: (SchedulerServices) -> SchedulerFeature. worker_side: (WorkerServices) -> WorkerFeature, or a
    SlotOwner for a feature that has nothing else there. output_heads: (HeadParts) -> OutputHead by name, for the option
    `output_head`. memory: (config, model, kind of device, dtype) -> bytes of the worker's side, which the profile run
    leaves out then.
    worker_methods: methods of the worker's side that `collective_rpc` reaches by their names.
    how_to_turn_on: sentence for errors of calls to an engine without the feature.
    """

    name: str
    is_on: Callable[[EngineConfig], bool] = _always
    parts: tuple[type[Part], ...] = ()
    scheduler_side: Side = None
    worker_side: Side = None
    output_heads: Mapping[str, Side] = field(default_factory=dict)
    memory: Side = None
    worker_methods: Sequence[str] = ()
    how_to_turn_on: str = ""

    def __post_init__(self) -> None:
        for side in _sides(self):
            if "<" in _path(side):
                raise ConfigError(
                    f"{side} cannot be registered for the feature {self.name!r}: a plugin is called several times, "
                    "and would add another one each time. Register a function or a class of a module."
                )


_registered: dict[str, Feature] = {}


def register_feature(feature: Feature) -> None:
    """Let every engine and worker that is made from now on in this process have a feature; idempotent.

    Raises ConfigError if another feature has its name, or another part the name of one of its parts.
    """
    known = _registered.get(feature.name, feature)
    if _paths(known) != _paths(feature):
        raise ConfigError(f"Two features are named {feature.name!r}: {_paths(known)} and {_paths(feature)}.")
    for part in feature.parts:
        register_part(part)
    _registered[feature.name] = feature


def features_of(config: EngineConfig, of_model: Iterable[str] = ()) -> list[Feature]:
    """The features of an engine: built-in ones, then those of plugins in the order of their registration.

    of_model: modules of features that the model asks for, such as "penstock.features.encoder_inputs".
    """
    for module in (*_BUILT_IN, *of_model):
        register_feature(importlib.import_module(module).FEATURE)
    asked = {importlib.import_module(module).FEATURE.name for module in of_model}
    return [feature for feature in _registered.values() if feature.name in asked or feature.is_on(config)]


def make_side(side: Side, *arguments: Any) -> Any:
    """Make a side of a feature, importing it if it is named; None for a feature without it."""
    if side is None:
        return None
    if isinstance(side, str):
        module, _, name = side.partition(":")
        return getattr(importlib.import_module(module), name)(*arguments)
    return side(*arguments)


def why_no_method(name: str) -> str | None:
    """Why a worker has no method of this name, if a feature would have it."""
    for feature in _registered.values():
        if name in feature.worker_methods:
            return f"{name} needs {feature.name}, which this engine does not have. {feature.how_to_turn_on}"
    return None


def _sides(feature: Feature) -> list[Callable[..., Any] | str]:
    sides = feature.scheduler_side, feature.worker_side, feature.memory, *feature.output_heads.values()
    return [side for side in sides if side is not None]


def _paths(feature: Feature) -> list[str]:
    return [_path(side) for side in _sides(feature)]


def _path(side: Callable[..., Any] | str) -> str:
    return side if isinstance(side, str) else f"{side.__module__}:{getattr(side, '__qualname__', '<object>')}"
