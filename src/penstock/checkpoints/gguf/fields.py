"""Typed access to the metadata of a GGUF file, with errors that name the key."""

from __future__ import annotations

import array
import math
from collections.abc import Mapping
from typing import Any

from penstock.checkpoints.gguf.container import Header, TensorInfo, mapped
from penstock.checkpoints.json_file import shown
from penstock.checkpoints.size_limits import MAX_POSITIONS as MAX_SIZE
from penstock.errors import CheckpointError, ModelError, UnsupportedFeature

_F32 = 0


class Metadata:
    """Metadata of a model, and its tensors by name. name: of the file, for errors."""

    def __init__(self, name: str, header: Header) -> None:
        self.name = name
        self.tensors: Mapping[str, TensorInfo] = {tensor.name: tensor for tensor in header.tensors}
        self._values = header.metadata

    @property
    def architecture(self) -> str:
        value: str = self.required("general.architecture", str)
        return value

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Value of a key, or the default. Raises ModelError for a value of another type than `kind`."""
        value = self._values.get(self._full(key))
        if value is None:
            return default
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise self._wrong(key, value, f"of type {kind.__name__}")
        if type(value) is float and not math.isfinite(value):
            raise self._wrong(key, value, "a finite number")
        return value

    def required(self, key: str, kind: type) -> Any:
        """Value of a key. Raises ModelError for an absent one, or a value of another type."""
        value = self.get(key, kind)
        if value is None:
            raise ModelError(f"{self.name} has no {self._full(key)}, which a model needs. Convert the model again.")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer. Raises ModelError for an absent one without default, and for any other value."""
        value: int | None = self.get(key, int, default)
        value = self.required(key, int) if value is None else value
        if not 0 < value <= MAX_SIZE:
            raise self._wrong(key, value, f"an integer from 1 to {MAX_SIZE:,}")
        return value

    def by_layer(self, key: str) -> list[int]:
        """A size of each layer, 0 for none. Raises ModelError for anything but integers from 0 on."""
        # As many layers as have tensors, since a damaged file may claim any number.
        num_layers = min(self.size(".block_count"), len(self.tensors))
        value: Any = self._values.get(self._full(key))
        values: list[Any] = value if isinstance(value, list) else [value] * num_layers
        if len(values) != num_layers or not all(type(one) is int and 0 <= one <= MAX_SIZE for one in values):
            raise self._wrong(key, value, f"a list of {num_layers} integers from 0 to {MAX_SIZE:,}, one for each layer")
        return values

    def largest(self, key: str, default: int | None = None) -> int:
        """A size, the largest one where layers differ in it. Raises ModelError as `size` and `by_layer`."""
        is_list = isinstance(self._values.get(self._full(key)), list)
        return max(self.by_layer(key)) if is_list else self.size(key, default)

    def has_tensor(self, name: str) -> bool:
        """Whether any layer has a tensor of this name."""
        return any(tensor.endswith(f".{name}") for tensor in self.tensors)

    def nonzero(self, key: str, kind: type, default: Any = None) -> Any:
        """Value of a key, or the default for an absent one or 0, by which llama.cpp writes that a model has none."""
        return self.get(key, kind) or default

    def list_of(self, key: str, kind: type) -> list[Any] | None:
        """List whose elements are of one type; None for an absent key. Raises ModelError for another value."""
        values: list[Any] | None = self.get(key, list)
        if values is not None and not all(type(value) is kind for value in values):
            raise ModelError(f"{self.name} has {key} with elements that are not of type {kind.__name__}.")
        if values is not None and kind is float and not all(map(math.isfinite, values)):
            raise ModelError(f"{self.name} has {key} with elements that are not finite. Convert the model again.")
        return values

    def keys_under(self, prefix: str) -> list[str]:
        """Keys that begin with a prefix."""
        return [key for key in self._values if key.startswith(prefix)]

    def num_rows(self, tensor: str) -> int:
        """Rows of a matrix, which are its outputs. Raises CheckpointError without one."""
        if tensor not in self.tensors:
            raise CheckpointError(f"{self.name} has no tensor {tensor}, which every model has. Download it again.")
        shape = self.tensors[tensor].shape
        if len(shape) != 2:
            raise CheckpointError(
                f"{self.name} is damaged: {tensor} has the shape {list(shape)}. It must be a matrix. Download it again."
            )
        return shape[0]

    def float32_values(self, tensor: str) -> list[float] | None:
        """Values of a small float32 tensor; None without one. Raises CheckpointError for a damaged one."""
        info = self.tensors.get(tensor)
        if info is None:
            return None
        if info.kind != _F32 or len(info.shape) != 1:
            raise self.unsupported(f"{tensor} of type {info.kind} and shape {list(info.shape)}", "a float32 vector")
        end = info.start + 4 * info.shape[0]
        with mapped(info.path) as data:
            if end > len(data):
                raise CheckpointError(
                    f"{info.path} is truncated: {tensor} needs the bytes {info.start} to {end}, and the file has "
                    f"{len(data)}. Download it again."
                )
            return array.array("f", data[info.start : end]).tolist()

    def unsupported(self, what: str, allowed: str) -> UnsupportedFeature:
        """Make the error for an unsupported value."""
        return UnsupportedFeature(f"{self.name} has {what}, which is not supported. Supported: {allowed}.")

    def _wrong(self, key: str, value: Any, allowed: str) -> ModelError:
        return ModelError(
            f"{self.name} has {self._full(key)}={shown(value)}. It must be {allowed}. Convert the model again."
        )

    def _full(self, key: str) -> str:
        """Full key of a field; the architecture's name is put before keys that begin with a dot."""
        return f"{self._values.get('general.architecture')}{key}" if key.startswith(".") else key
