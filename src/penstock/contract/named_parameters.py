"""Metaclass of parameter structs with checks of names, including those of vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def _own_parameters(given: dict[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    parameters = vllm.parameters_as_ours(given, known)
    for name, value in parameters.items():
        if name not in known:
            hint = did_you_mean(name, known) or f" Allowed: {', '.join(known)}."
            raise InvalidParameter(f"There is no parameter {shown(name)} (given: {shown(value)}).{hint}")
    return parameters
