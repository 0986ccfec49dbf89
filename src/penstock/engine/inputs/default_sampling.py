"""Default sampling parameters: the model's own, from its `generation_config.json`.

As in Transformers, `do_sample: false` means greedy decoding whatever the file's temperature; vLLM ignores the field.
Without it, as in most files, the other fields decide.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.checkpoints.generation_config import DO_SAMPLE, GENERATION_CONFIG_FILE, SAMPLING_FIELDS
from penstock.config import ModelConfig
from penstock.config.generation import NO_GENERATION_CONFIG, generation_config_folder
from penstock.contract import SamplingParams
from penstock.errors import ConfigError, InvalidParameter

logger = logging.getLogger(__name__)

# Fields that greedy decoding ignores.
_RANDOM_FIELDS = ("temperature", "top_p", "top_k", "min_p")


class DefaultSampling(NamedTuple):
    """Sampling parameters of a model's files and options.

    fields: values by the names of `SamplingParams`; other fields keep their defaults.
    notes: sources of the fields, for the log. warnings: invalid fields of the file.
    """

    fields: dict[str, Any]
    notes: list[str]
    warnings: list[str]


def default_sampling_params(model: ModelConfig) -> SamplingParams:
    """Return the sampling parameters of requests without any, and log those that differ from `SamplingParams`.

    Raises ConfigError for a bad value of override_generation_config. A bad value of the file is a warning, and ignored.
    """
    fields, notes, warnings = read_default_sampling(model)
    for warning in warnings:
        logger.warning("%s", warning)
    if notes:
        logger.info(
            "Requests without sampling parameters take %s. generation_config='none' passes the file over.",
            "; ".join(notes),
        )
    return SamplingParams(**fields)


def read_default_sampling(model: ModelConfig) -> DefaultSampling:
    """Read the model's file and the options that override it, without logging.

    Raises ConfigError as `default_sampling_params`.
    """
    override = dict(model.override_generation_config or {})
    for name, value in override.items():
        if (allowed := _what_is_allowed(name, value)) is not None:
            raise ConfigError(f"override_generation_config: {allowed}")
    path = generation_config_folder(model.generation_config, model.folder) / GENERATION_CONFIG_FILE
    from_file: dict[str, Any] = {}
    warnings = []
    is_read = model.generation_config not in NO_GENERATION_CONFIG
    for name, value in _sampling_fields(model.hf_generation_config if is_read else {}).items():
        if name in override:
            continue
        if (allowed := _what_is_allowed(name, value)) is not None:
            warnings.append(f"{path}: {allowed} The field is passed over.")
        else:
            from_file[name] = value
    if override.get("temperature") is not None:
        from_file.pop(DO_SAMPLE, None)
    given = {name: value for name, value in override.items() if value is not None}
    notes = [f"{_listed(from_file)} (from {path})"] * bool(_listed(from_file))
    notes += [f"{_listed(given)} (from override_generation_config)"] * bool(_listed(given))
    return DefaultSampling(_as_parameters(from_file | given), notes, warnings)


def _sampling_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    names = (*SAMPLING_FIELDS, DO_SAMPLE)
    return {name: config[name] for name in names if config.get(name) is not None}


def _what_is_allowed(name: str, value: Any) -> str | None:
    """Error text for a value that is not allowed; None if it is."""
    if value is None:
        return None
    if name == DO_SAMPLE:
        return None if isinstance(value, bool) else f"{name}={value!r} is not valid. Allowed: true or false."
    try:
        SamplingParams(**{SAMPLING_FIELDS[name]: value})
    except InvalidParameter as error:
        return str(error).replace(SAMPLING_FIELDS[name], name, 1)
    return None


def _as_parameters(fields: Mapping[str, Any]) -> dict[str, Any]:
    is_greedy = fields.get(DO_SAMPLE) is False
    parameters = {
        SAMPLING_FIELDS[name]: value
        for name, value in fields.items()
        if name != DO_SAMPLE and not (is_greedy and name in _RANDOM_FIELDS)
    }
    return parameters | {"temperature": 0.0} if is_greedy else parameters


def _listed(fields: Mapping[str, Any]) -> str:
    """Format the fields for the log; do_sample only if False."""
    listed = {name: value for name, value in fields.items() if name != DO_SAMPLE or value is False}
    return ", ".join(f"{name}={value!r}" for name, value in listed.items())
