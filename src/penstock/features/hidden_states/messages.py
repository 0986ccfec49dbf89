"""Messages of hidden states: a request's choice of them, those of a step, and those of an output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from penstock.contract.param_checks import shown
from penstock.contract.parts import OutputPart, Part
from penstock.errors import InvalidParameter

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

LAST: Literal["last"] = "last"
ALL: Literal["all"] = "all"
# The layer without which none is given: the output of the final norm.
FINAL = -1


class HiddenStatesPart(Part, frozen=True, kw_only=True):
    """The hidden states that a request asks for.

    tokens: "last" for the token that gave the last logits, "all" for those of the prompt and the output.
    layers: numbers as Transformers gives them in `hidden_states`: n is the input of layer n, and the number of layers
        is the output of the final norm; negative ones count from the end.
    """

    feature = "hidden_states"
    tokens: Literal["last", "all"] = LAST
    layers: tuple[int, ...] = (FINAL,)

    @property
    def has_all(self) -> bool:
        return self.tokens == ALL

    @property
    def needs_all_tokens(self) -> bool:
        return self.has_all

    def anon_repr(self) -> str:
        return f"HiddenStatesPart({self.tokens}, {list(self.layers)})"

    def numbers(self, num_layers: int) -> tuple[int, ...]:
        """The layers from 0 to num_layers. Raises InvalidParameter for one that the model does not have."""
        for layer in self.layers:
            if not -num_layers - 1 <= layer <= num_layers:
                raise InvalidParameter(
                    f"hidden_states_layers has {layer}, but the model has {num_layers} layers. Allowed: 0 (embeddings) "
                    f"to {num_layers} (after the final norm), or -1 to {-num_layers - 1}, from the end."
                )
        numbers = tuple(layer % (num_layers + 1) for layer in self.layers)
        if not numbers or len(set(numbers)) < len(numbers):
            raise InvalidParameter(
                f"hidden_states_layers={shown(list(self.layers))} is not valid. Allowed: one layer or several, each "
                "once."
            )
        return numbers


class StepHiddenStates(Part, frozen=True, kw_only=True):
    """Hidden states of a step's tokens, by request: all its tokens, or its logits rows for "last".

    dtype: torch's name. data: row-major [rows, layers, hidden size]. num_rows: of each request.
    """

    feature = "hidden_states_of_step"
    dtype: str
    data: dict[str, bytes]
    num_rows: dict[str, int]


class OutputHiddenStates(OutputPart, frozen=True, kw_only=True):
    """Hidden states of consecutive tokens of a request.

    layers: as the request names them. start: position of the first row. pieces: row-major [rows, layers, hidden size],
    together num_rows rows; grows where outputs are collected.
    """

    feature = "hidden_states_of_output"
    asked: HiddenStatesPart
    dtype: str
    row_bytes: int
    start: int
    pieces: list[bytes]

    def anon_repr(self) -> str:
        return f"OutputHiddenStates({self.asked.anon_repr()}, from {self.start}, {self.num_rows} rows)"

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.pieces)) // self.row_bytes

    def after(self, before: OutputPart | None) -> OutputHiddenStates:
        if not isinstance(before, OutputHiddenStates) or not self.asked.has_all:
            return self
        # A core that replaces a lost one begins with the first token.
        known = before.start + before.num_rows - self.start
        assert known >= 0, "rows are consecutive"
        new = b"".join(self.pieces)[known * self.row_bytes :]
        if new:
            before.pieces.append(new)
        return before

    def result(self, num_tokens: int) -> HiddenStates:
        """The hidden states of all computed tokens: the last token of an output has none."""
        data = b"".join(self.pieces)
        stop = max(0, min(num_tokens - 1 - self.start, len(data) // self.row_bytes))
        start = 0 if self.asked.has_all else max(0, stop - 1)
        rows = data[start * self.row_bytes : stop * self.row_bytes]
        return HiddenStates(self.asked.layers, self.dtype, self.start + start, stop - start, rows)


class HiddenStates(Mapping[int, "Tensor"]):
    """Hidden states of an output's tokens: a tensor [tokens, hidden size] of the model's dtype for each layer.

    Layers have the names that the request gave them. dtype: torch's name, such as "bfloat16". start: position of the
    first token; 0 is the first one of the prompt. num_tokens: number of rows.
    data: little-endian, row-major [tokens, layers, hidden size].
    """

    def __init__(self, layers: Sequence[int], dtype: str, start: int, num_tokens: int, data: bytes) -> None:
        self.layers = tuple(layers)
        self.dtype = dtype
        self.start = start
        self.num_tokens = num_tokens
        self.data = data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HiddenStates) and self._fields == other._fields

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"HiddenStates(layers={list(self.layers)}, dtype={self.dtype!r}, tokens {self.start} to "
            f"{self.start + self.num_tokens - 1})"
        )

    def __getitem__(self, layer: int) -> Tensor:
        return self.tensor[:, self.layers.index(layer)] if layer in self.layers else self._missing(layer)

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @cached_property
    def tensor(self) -> Tensor:
        """Tensor of all layers, [tokens, layers, hidden size]."""
        import torch

        dtype = getattr(torch, self.dtype)
        if not self.num_tokens:
            return torch.empty(0, len(self.layers), 0, dtype=dtype)
        return torch.frombuffer(bytearray(self.data), dtype=dtype).view(self.num_tokens, len(self.layers), -1)

    @property
    def _fields(self) -> tuple[Any, ...]:
        return self.layers, self.dtype, self.start, self.num_tokens, self.data

    def raw(self) -> np.ndarray:
        """Array of all layers, [tokens, layers, hidden size], in numpy's dtype: bfloat16 as its bits in uint16."""
        import numpy as np

        numbers = np.frombuffer(self.data, np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype))
        return numbers.reshape(self.num_tokens, len(self.layers), -1) if self.num_tokens else numbers.reshape(0, 1, 0)

    def numbers(self) -> np.ndarray:
        """Array of all layers, [tokens, layers, hidden size], in float32."""
        import numpy as np

        raw = self.raw()
        if self.dtype != "bfloat16":
            return raw.astype(np.float32, copy=False)
        return (raw.astype(np.uint32) << 16).view(np.float32)

    def by_layer(self) -> dict[str, list[list[float]]]:
        """Numbers of each layer, [tokens][hidden size]."""
        numbers = self.numbers()
        return {str(layer): numbers[:, index].tolist() for index, layer in enumerate(self.layers)}

    def _missing(self, layer: int) -> Any:
        raise KeyError(f"layer {layer} was not asked for; there are {', '.join(map(str, self.layers))}")


def parts_of_hidden_states(return_hidden_states: Any, layers: Any = None) -> list[HiddenStatesPart]:
    """The part of a request for hidden states, or none for False and None. Raises InvalidParameter.

    return_hidden_states: "last", which True stands for, or "all". layers: None for the output of the final norm.
    """
    if return_hidden_states is None or return_hidden_states is False:
        if layers is not None:
            raise InvalidParameter(
                f"hidden_states_layers={shown(layers)} has no meaning without return_hidden_states. Give "
                'return_hidden_states="last" or "all" with it, or leave it out.'
            )
        return []
    if return_hidden_states not in (True, LAST, ALL):
        raise InvalidParameter(
            f"return_hidden_states={shown(return_hidden_states)} is not valid. Allowed: false, true, {LAST!r} (which "
            f"is the same) or {ALL!r}."
        )
    try:
        given = (FINAL,) if layers is None else msgspec.convert(layers, tuple[int, ...])
    except msgspec.ValidationError as error:
        raise InvalidParameter(
            f"hidden_states_layers={shown(layers)} is not valid. Allowed: a list of numbers of layers."
        ) from error
    return [HiddenStatesPart(tokens=ALL if return_hidden_states == ALL else LAST, layers=given)]
