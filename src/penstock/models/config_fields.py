"""Typed access to `config.json`, with errors that name the field."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from penstock.checkpoints.quantized_checkpoint import read_quantized_checkpoint
from penstock.checkpoints.size_limits import positive_integer
from penstock.config import ModelConfig
from penstock.config.checks import is_positive_float32
from penstock.errors import ModelError, UnsupportedFeature


class Fields:
    """Fields of an object in a configuration with type checks. A null field counts as absent.

    source, prefix: for messages, the file and the object's name in it with a dot; architecture: that of the model.
    """

    def __init__(self, hf_config: Mapping[str, Any], source: str, architecture: str, prefix: str = "") -> None:
        self.hf_config = hf_config
        self.source, self.prefix = source, prefix
        self._architecture = architecture

    @property
    def architecture(self) -> str:
        return self._architecture

    def section(self, name: str) -> Fields:
        """The fields of a nested object. Raises ModelError where there is none."""
        value = self.hf_config.get(name)
        if not isinstance(value, Mapping):
            raise self._wrong(name, value, "an object")
        return Fields(value, self.source, self.architecture, f"{self.prefix}{name}.")

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer. Raises ModelError for any other value, and for an absent field without default."""
        if default is not None and self.hf_config.get(name) is None:
            return default
        return positive_integer(self.hf_config, name, self.source, self.prefix)

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """A positive integer, or None for null; `default` for an absent field."""
        if name not in self.hf_config:
            return default
        return None if self.hf_config[name] is None else self.integer(name)

    def count(self, name: str, default: int) -> int:
        """A non-negative integer. Raises ModelError for any other value."""
        value = self.hf_config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._wrong(name, value, "an integer of 0 or more")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number. Raises ModelError for any other value, and for an absent field without default."""
        value = self.hf_config.get(name)
        value = default if value is None else value
        if value is None or not is_positive_float32(value):
            raise self._wrong(name, value, "a positive number, and finite in float32")
        return value

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """A positive number, or None for null; `default` for an absent field."""
        if name not in self.hf_config:
            return default
        return None if self.hf_config[name] is None else self.number(name)

    def flag(self, name: str, *, default: bool) -> bool:
        """A boolean. Raises ModelError for any other value."""
        value = self.hf_config.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def choice(self, name: str, allowed: Collection[str], default: str) -> str:
        """Read a field whose value is one of `allowed`. Raises UnsupportedFeature for any other value."""
        value = self.hf_config.get(name)
        value = default if value is None else value
        if not isinstance(value, str) or value not in allowed:
            raise self.unsupported(name, value, ", ".join(allowed))
        return value

    def refuse_flags(self, *names: str) -> None:
        """Raise UnsupportedFeature if one of these fields is true."""
        for name in names:
            if self.flag(name, default=False):
                raise self.unsupported(name, True, "false")

    def refuse_others(self, values: Mapping[str, Any]) -> None:
        """Raise UnsupportedFeature if one of these fields is there with another value than the one given."""
        for name, value in values.items():
            if self.hf_config.get(name) not in (None, value):
                raise self.unsupported(name, self.hf_config[name], repr(value))

    def unsupported(self, name: str, value: Any, allowed: str) -> UnsupportedFeature:
        """Make the error for a field with an unsupported value."""
        return UnsupportedFeature(
            f"{self.source} has {self.prefix}{name}={value!r}, which {self.architecture} does not support here. "
            f"Supported: {allowed}."
        )

    def _wrong(self, name: str, value: Any, allowed: str) -> ModelError:
        return ModelError(f"{self.source} has {self.prefix}{name}={value!r}. It must be {allowed}.")


class ConfigFields(Fields):
    """Fields of a model's `config.json`."""

    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__(model_config.hf_config, model_config.config_source, "")
        self.model_config = model_config

    @property
    def architecture(self) -> str:
        return self.model_config.architecture

    @property
    def num_positions(self) -> int:
        """Number of positions that the engine may serve, from 0 on."""
        wanted, longest = self.model_config.max_model_len, self.model_config.longest_context
        return wanted if isinstance(wanted, int) else longest

    def layer_types(self, num_layers: int) -> list[str] | None:
        """Attention type of each layer, or None for an absent field."""
        value = self.hf_config.get("layer_types")
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != num_layers:
            raise self._wrong("layer_types", value, f"a list of num_hidden_layers={num_layers} names")
        return value

    def layer_numbers(self, name: str, num_layers: int) -> list[int] | None:
        """A list of layer numbers, or None for an absent field. Raises UnsupportedFeature for any other value."""
        value = self.hf_config.get(name)
        if value is not None and not (isinstance(value, list) and set(value) <= set(range(num_layers))):
            raise self.unsupported(name, value, f"a list of numbers below num_hidden_layers={num_layers}")
        return value

    def refuse_unsupported(self) -> None:
        """Raise UnsupportedFeature for features that no native model supports."""
        read_quantized_checkpoint(self.hf_config, self.model_config.model)


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def read_layer_kinds(
    fields: ConfigFields, default: Sequence[str], allowed: Collection[str] = (FULL, SLIDING)
) -> list[str]:
    """Return one of `allowed` for every layer; `default` for an absent field.

    Raises UnsupportedFeature for other types.
    """
    kinds = fields.layer_types(len(default))
    if kinds is None:
        return list(default)
    if not set(kinds) <= set(allowed):
        raise fields.unsupported("layer_types", kinds, ", ".join(allowed))
    return kinds


def windows_of(fields: ConfigFields, kinds: Sequence[str], window: int | None) -> list[int | None]:
    """Return the window of each layer, None for full attention. Raises UnsupportedFeature for a missing window."""
    if SLIDING in kinds and window is None:
        raise fields.unsupported("sliding_window", window, f"a positive integer, since some layers are {SLIDING}")
    return [window if kind == SLIDING else None for kind in kinds]
