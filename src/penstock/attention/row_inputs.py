"""Named step inputs of the rows that a layer gets: of all tokens, of the last ones, or of one expert's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

NO_INPUTS: Mapping[str, Tensor] = MappingProxyType({})


class RowInputs:
    """Named step inputs of all tokens: a scalar or a vector for each row."""

    __slots__ = ("_named",)

    def __init__(self, named: Mapping[str, Tensor] = NO_INPUTS) -> None:
        self._named = dict(named)

    @property
    def of_all_tokens(self) -> RowInputs:
        """The inputs that these were selected from."""
        return self

    @property
    def is_empty(self) -> bool:
        """Whether the step has no named inputs."""
        return not self._named

    def get(self, name: str) -> Tensor | None:
        """The input's rows, [rows, ...]; None where the step has no such input."""
        return self._named.get(name)

    def of_rows(self, select: Callable[[Tensor], Tensor]) -> RowInputs:
        """Inputs of the rows that `select` takes from a tensor with a row for each of these."""
        return self if self.is_empty else _SelectedInputs(self, select)


class _SelectedInputs(RowInputs):
    """Inputs of some rows. Each input is selected once, when it is first read."""

    __slots__ = ("_select", "_whole")

    def __init__(self, whole: RowInputs, select: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._whole, self._select = whole, select

    @property
    def of_all_tokens(self) -> RowInputs:
        return self._whole.of_all_tokens

    @property
    def is_empty(self) -> bool:
        return False

    def get(self, name: str) -> Tensor | None:
        found = self._named.get(name)
        if found is None and (whole := self._whole.get(name)) is not None:
            found = self._named[name] = self._select(whole)
        return found
