"""PEFT's `LoraConfig`: every field is implemented, has no effect on inference, or is refused by its name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.checkpoints.json_file import read_json_object, shown
from penstock.errors import CheckpointError, UnsupportedFeature
from penstock.loader.untrusted_patterns import full_matches, syntax_error

_FILE = "adapter_config.json"
# Fields that decide which modules a new adapter gets and how it is trained; its tensors show the result.
_WITHOUT_EFFECT = frozenset(
    {
        "arrow_config_path",
        "auto_mapping",
        "base_model_name_or_path",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    }
)
_IMPLEMENTED = frozenset({"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_parameters"})
# Initialisations that leave the base model's weights as they are.
_PLAIN_INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")
# Remedies for refused fields; others have the general one.
_INSTEAD = {
    "modules_to_save": "It replaces whole modules. Merge the adapter into a checkpoint.",
    "init_lora_weights": "It changes the base model. Save it with path_initial_model_for_weight_conversion.",
}


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Ranks and scaling of an adapter.

    target_parameters: ends of the names of parameters that it changes, such as those of experts.
    ranks, alphas: of the modules for which the patterns say others, once they are `matched`.
    """

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    uses_rslora: bool
    target_parameters: tuple[str, ...]
    ranks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alphas: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, name: str, fields: Mapping[str, Any]) -> PeftConfig:
        """Read the fields of `adapter_config.json`. name: of the adapter, for errors.

        Raises UnsupportedFeature for a field that would change the model's outputs and is not implemented,
        CheckpointError for a missing or invalid one.
        """
        if fields.get("peft_type", "LORA") != "LORA":
            raise UnsupportedFeature(
                f"The adapter {name!r} has peft_type={fields['peft_type']!r}. Allowed: 'LORA'. Merge it into a "
                "checkpoint."
            )
        for field, value in fields.items():
            _check_field(name, field, value)
        rank, alpha = fields.get("r"), fields.get("lora_alpha")
        if not _is_positive(rank, int) or not _is_positive(alpha, int, float):
            raise CheckpointError(
                f"The adapter {name!r} has r={rank!r} and lora_alpha={alpha!r} in its adapter_config.json. Allowed: "
                "positive numbers."
            )
        patterns = fields.get("rank_pattern") or {}, fields.get("alpha_pattern") or {}
        _check_pattern(name, "rank_pattern", patterns[0], int)
        _check_pattern(name, "alpha_pattern", patterns[1], int, float)
        parameters = fields.get("target_parameters") or []
        if not isinstance(parameters, (list, tuple, set)) or not all(isinstance(one, str) for one in parameters):
            raise CheckpointError(
                f"The adapter {name!r} has target_parameters={parameters!r}. Allowed: a list of names."
            )
        is_rslora = bool(fields.get("use_rslora"))
        return cls(int(rank), float(alpha), *patterns, is_rslora, tuple(parameters))  # type: ignore[arg-type]

    def matched(self, name: str, modules: Sequence[str]) -> PeftConfig:
        """Match the patterns with the names of an adapter's modules. name: of the adapter, for errors.

        Raises CheckpointError for patterns that take too long.
        """
        ranks = _by_module(name, "rank_pattern", self.rank_pattern, modules)
        alphas = _by_module(name, "alpha_pattern", self.alpha_pattern, modules)
        return replace(self, ranks=ranks, alphas=alphas)

    def rank_of(self, module: str) -> int:
        """Rank of a module's adapter."""
        return int(self.ranks.get(module, self.rank))

    def scaling_of(self, module: str) -> float:
        """Factor on a module's product."""
        alpha = float(self.alphas.get(module, self.alpha))
        rank = self.rank_of(module)
        return alpha / math.sqrt(rank) if self.uses_rslora else alpha / rank


def read_fields(name: str, folder: Path) -> Mapping[str, Any]:
    """Read `adapter_config.json` of an adapter's folder. Raises CheckpointError for a missing or damaged one."""
    if not (folder / _FILE).is_file():
        raise CheckpointError(
            f"The adapter {name!r} has no {_FILE} in {folder}. lora_path must be a folder in PEFT's format."
        )
    return read_json_object(folder / _FILE, CheckpointError)


def _check_field(name: str, field: str, value: Any) -> None:
    if field in _IMPLEMENTED:
        return
    if field == "init_lora_weights":
        if value in _PLAIN_INITIALISATIONS:
            return
    elif field in _WITHOUT_EFFECT or not value or (field == "bias" and value == "none"):
        return
    instead = _INSTEAD.get(field, "Merge the adapter into a checkpoint.")
    raise UnsupportedFeature(f"The adapter {name!r} has {field}={value!r}, which is not supported. {instead}")


def _check_pattern(name: str, field: str, pattern: object, *types: type) -> None:
    allowed = f"positive numbers ({' or '.join(one.__name__ for one in types)}) by regular expressions of module names"
    if not isinstance(pattern, Mapping) or not all(_is_positive(one, *types) for one in pattern.values()):
        raise CheckpointError(f"The adapter {name!r} has {field}={pattern!r}. Allowed: {allowed}.")
    for key in pattern:
        # In a group, global flags such as (?i) are not valid.
        complaint = syntax_error(str(key)) or syntax_error(_end_of_name(key))
        if complaint is not None:
            raise CheckpointError(f"The adapter {name!r} has {shown(key)} in {field}: {complaint}. Allowed: {allowed}.")


def _is_positive(value: Any, *types: type) -> bool:
    if not isinstance(value, types) or isinstance(value, bool):
        return False
    try:
        return 0.0 < float(value) < math.inf  # type: ignore[arg-type]
    except OverflowError:
        return False


def _end_of_name(key: str) -> str:
    """Regular expression of the modules whose names end as a key says, as in PEFT."""
    return rf"(.*\.)?({key})"


def _by_module(name: str, field: str, pattern: Mapping[str, Any], modules: Sequence[str]) -> dict[str, Any]:
    """Values of a pattern by module: of the first key that matches, or else the key of the module's whole name."""
    found = {module: pattern[module] for module in modules if module in pattern}
    owner = f"The adapter {name!r} has a {field} that is not allowed: it"
    matches = full_matches([_end_of_name(key) for key in pattern], modules, owner, CheckpointError)
    for value, of_key in reversed(list(zip(pattern.values(), matches, strict=True))):
        found |= {module: value for module, is_match in zip(modules, of_key, strict=True) if is_match}
    return found
