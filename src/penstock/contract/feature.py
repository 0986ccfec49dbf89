"""Features: optional abilities of an engine, each found by one registration.

    register_feature(Feature(name="tone", parts=(TonePart,), worker_side=make_tones))

A feature has sides, one for each place that it works in: the deployment's (`features.deployment`), the scheduler's
(`scheduler.feature`), the worker's (`worker.feature`), and output heads. Each side is a function or class of a module,
or its name as "module:name", which is imported where the side is made: the scheduler's process needs no torch.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from penstock.config import EngineConfig
from penstock.contract.parts import Part, register_part
from penstock.contract.recorded_call import RecordedCall
from penstock.errors import ConfigError

# Makes a side of a feature, or None where this engine needs none.
Side: TypeAlias = Callable[..., Any] | str | None

# Separates a counter's name, its label and the label's value in the messages of cores.
_LABEL = "|"

# Modules of the features that come with the engine; each has its registration as `FEATURE`.
_BUILT_IN = (
    "penstock.features.lora",
    "penstock.features.pooling",
    "penstock.features.structured_output",
    "penstock.features.hidden_states",
    "penstock.features.multimodal",
    "penstock.features.encoder_decoder",
    "penstock.features.weight_transfer",
    "penstock.features.kv_transfer",
    "penstock.features.kv_tiers",
    "penstock.features.kv_connector",
    # After those that keep blocks elsewhere, whose events it publishes.
    "penstock.features.kv_events",
    # The last one: workers that replace lost ones sleep once the others have brought back their state.
    "penstock.features.sleep",
)


def _always(_: EngineConfig) -> bool:
    return True


class Figure(NamedTuple):
    """Figure of a feature in the live view.

    label: its name there, such as "from folder". name: the counter or gauge. of: counter of which it is a share; "" for
    none. unit: "bytes", or "" for a number.
    """

    label: str
    name: str
    of: str = ""
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Registration of a feature.

    name: unique, in the plural. is_on: whether an engine with this configuration has the feature. parts: types of its
    message parts. how_to_turn_on: sentence for errors of requests and calls to an engine without the feature.

    Sides: deployment_side: (DeploymentServices) -> DeploymentFeature. scheduler_side: (SchedulerServices) ->
    SchedulerFeature. worker_side: (WorkerServices) -> WorkerFeature, or a SlotOwner for a feature that has nothing else
    there. model_state: (WorkerServices) -> ModelState, which builds the model's inputs. output_heads: (HeadServices) ->
    OutputHead by name, for the option `output_head`.

    options: frozen dataclass of the feature's options, whose values users give in `additional_config`, and which raises
    ConfigError for those that are not allowed; sides read them by `options_of`.

    keeps_layer_inputs: whether the worker's side computes with the inputs of layers, which loading must not rescale.
    recorded_call: type of the calls of worker methods that recordings keep.

    memory: terms of the memory plan by name, (config, model, kind of device, dtype) -> bytes; the profile run leaves
    out the worker's side then. runs: terms by name, (WorkerServices, is_largest) -> None, which runs work beside the
    forward pass: the largest one's peak is the term, and warm-up runs the smallest one where kernels are compiled.
    deployment_methods, worker_methods: methods of these sides that `collective_rpc` reaches by their names.
    memory_of_methods: tags of the memory that must be there for some of them.
    counters, gauges: descriptions of the scheduler side's `counters` and `gauges` by name, for the metrics.
    figures: what the live view shows of them, in this order.
    """

    name: str
    is_on: Callable[[EngineConfig], bool] = _always
    parts: tuple[type[Part], ...] = ()
    deployment_side: Side = None
    scheduler_side: Side = None
    worker_side: Side = None
    model_state: Side = None
    output_heads: Mapping[str, Side] = field(default_factory=dict)
    options: type[Any] | None = None
    memory: Mapping[str, Side] = field(default_factory=dict)
    runs: Mapping[str, Side] = field(default_factory=dict)
    keeps_layer_inputs: bool = False
    recorded_call: type[RecordedCall] | None = None
    deployment_methods: Sequence[str] = ()
    worker_methods: Sequence[str] = ()
    memory_of_methods: Mapping[str, Sequence[str]] = field(default_factory=dict)
    counters: Mapping[str, str] = field(default_factory=dict)
    gauges: Mapping[str, str] = field(default_factory=dict)
    figures: Sequence[Figure] = ()
    how_to_turn_on: str = ""

    @property
    def why_off(self) -> str:
        """Error text of a request or call that needs this feature in an engine without it."""
        return f"{self.name} are not enabled in this engine. {self.how_to_turn_on}".strip()

    def options_of(self, config: EngineConfig) -> Any:
        """The feature's options in an engine. Raises ConfigError for an unknown one."""
        given = config.additional.by_feature.get(self.name, {})
        allowed = [] if self.options is None else [one.name for one in dataclasses.fields(self.options)]
        unknown = next((name for name in given if name not in allowed), None)
        if unknown is not None:
            raise ConfigError(
                f"additional_config[{self.name!r}] has {unknown!r}, which is no option of this feature. Allowed: "
                f"{', '.join(allowed) or 'nothing'}."
            )
        return None if self.options is None else self.options(**given)

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
    for part in (*feature.parts, feature.recorded_call):
        if part is not None:
            register_part(part)
    _registered[feature.name] = feature


def features_of(config: EngineConfig, of_model: Iterable[str] = ()) -> list[Feature]:
    """The features of an engine: built-in ones, then those of plugins in the order of their registration.

    of_model: modules of features that the model asks for, such as "penstock.features.encoder_inputs".
    """
    register_built_in_features()
    for module in of_model:
        register_feature(importlib.import_module(module).FEATURE)
    asked = {importlib.import_module(module).FEATURE.name for module in of_model}
    return [feature for feature in _registered.values() if feature.name in asked or feature.is_on(config)]


def check_options_of_features(config: EngineConfig) -> None:
    """Raise ConfigError for options (`additional_config`) of a feature that is not registered or lacks them."""
    for name in config.additional.by_feature:
        if name not in _registered:
            raise ConfigError(
                f"additional_config has options for {name!r}, which is no registered feature. Registered: "
                f"{', '.join(_registered)}. Install the plugin that registers it, or leave them out."
            )
        _registered[name].options_of(config)


def register_built_in_features() -> None:
    """Let messages be read whose parts are of the features that come with the engine."""
    for module in _BUILT_IN:
        register_feature(importlib.import_module(module).FEATURE)


def keeps_layer_inputs(config: EngineConfig) -> bool:
    """Whether a feature of the engine computes with the inputs of layers."""
    return any(feature.keeps_layer_inputs for feature in features_of(config))


def recorded_calls(config: EngineConfig) -> dict[str, type[RecordedCall]]:
    """Types of recorded calls of an engine's features, by worker method."""
    types = [feature.recorded_call for feature in features_of(config)]
    return {method: one for one in types if one is not None for method in one.methods}


def make_side(side: Side, *arguments: Any) -> Any:
    """Make a side of a feature, importing it if it is named; None for a feature without it."""
    if side is None:
        return None
    if isinstance(side, str):
        module, _, name = side.partition(":")
        return getattr(importlib.import_module(module), name)(*arguments)
    return side(*arguments)


def why_no_method(name: str, *, of_deployment: bool = False) -> str | None:
    """Why there is no method of this name, if a feature would have it. of_deployment: of deployment sides."""
    for feature in _registered.values():
        if name in (feature.deployment_methods if of_deployment else feature.worker_methods):
            return f"{name}: {feature.why_off}"
    return None


def why_refused(parts: Iterable[str], on: Container[str]) -> str | None:
    """Error text of requests with these parts in an engine with the features `on`; None where it takes them."""
    for feature in map(feature_of_part, parts):
        # A feature without an option is on where the model asks for it, which only workers know.
        if feature is not None and feature.how_to_turn_on and feature.name not in on:
            return feature.why_off
    return None


def feature_of_part(name: str) -> Feature | None:
    """The feature that has a message part of this name."""
    of_name = (one for one in _registered.values() if any(part.feature == name for part in one.parts))
    return next(of_name, None)


def counters_of_features() -> dict[str, str]:
    """Descriptions of the counters of all registered features, and of those that come with the engine, by name."""
    register_built_in_features()
    return {name: text for feature in _registered.values() for name, text in feature.counters.items()}


def gauges_of_features() -> dict[str, str]:
    """Descriptions of the gauges of all registered features, and of those that come with the engine, by name."""
    register_built_in_features()
    return {name: text for feature in _registered.values() for name, text in feature.gauges.items()}


def figures_of_features() -> list[Figure]:
    """Figures of all registered features, and of those that come with the engine, each once."""
    register_built_in_features()
    return list(dict.fromkeys(figure for feature in _registered.values() for figure in feature.figures))


def with_label(name: str, label: str, value: str) -> str:
    """Name of a counter or gauge with a label, as features give it: descriptions are by the name alone."""
    return f"{name}{_LABEL}{label}{_LABEL}{value}"


def without_label(name: str) -> tuple[str, dict[str, str]]:
    """The name of a counter or gauge alone, and its label."""
    name, *label = name.split(_LABEL, 2)
    return name, {label[0]: label[1]} if label else {}


def _sides(feature: Feature) -> list[Callable[..., Any] | str]:
    named = (
        feature.deployment_side,
        feature.scheduler_side,
        feature.worker_side,
        feature.model_state,
    )
    sides = *named, *feature.output_heads.values(), *feature.memory.values(), *feature.runs.values()
    return [side for side in sides if side is not None]


def _paths(feature: Feature) -> list[str]:
    return [_path(side) for side in _sides(feature)]


def _path(side: Callable[..., Any] | str) -> str:
    return side if isinstance(side, str) else f"{side.__module__}:{getattr(side, '__qualname__', '<object>')}"
