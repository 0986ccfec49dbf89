"""Metaclass of parameter structs with checks of names, including those of vLLM."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import msgspec

from penstock.config import vllm
from penstock.config.checks import as_plain, did_you_mean
from penstock.contract.param_checks import shown
from penstock.errors import InvalidParameter


class NamedParameters(msgspec.StructMeta):
    """Metaclass of structs whose constructor names a wrong parameter. Decoding of messages bypasses it.

    A parameter of vLLM that the struct does not have is ignored at its neutral value; otherwise the constructor raises
    UnsupportedParameter, naming the feature. Unknown names raise InvalidParameter.
    """

    if not TYPE_CHECKING:  # Type checkers know the parameters from the struct.

        def __call__(self, *args: Any, **given: Any) -> Any:
            given = {name: as_plain(value) for name, value in given.items()}
            try:
                return super().__call__(*args, **given)
            except TypeError:
                if given.keys() <= set(self.__struct_fields__):
                    raise
            return super().__call__(*args, **_own_parameters(given, self.__struct_fields__))


class Parameters(msgspec.Struct, metaclass=NamedParameters, kw_only=True, forbid_unknown_fields=True):
    """Base of the parameters of a request. A field that is set later is checked as in the constructor."""

    def __setattr__(self, name: str, value: Any) -> None:
        checked = self.clone(**{name: value})
        self._set(name, getattr(checked, name))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Create parameters from a dictionary, such as a line of JSON."""
        return cls(**fields)

    def clone(self, **changes: Any) -> Self:
        """Return a deep copy with changed fields. Raises InvalidParameter as `from_dict`."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return self.from_dict(copy.deepcopy(fields) | changes)

    def _set(self, name: str, value: Any) -> None:
        msgspec.structs.force_setattr(self, name, value)


def _own_parameters(given: dict[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    parameters = vllm.parameters_as_ours(given, known)
    for name, value in parameters.items():
        if name not in known:
            hint = did_you_mean(name, known) or f" Allowed: {', '.join(known)}."
            raise InvalidParameter(f"There is no parameter {shown(name)} (given: {shown(value)}).{hint}")
    return parameters
