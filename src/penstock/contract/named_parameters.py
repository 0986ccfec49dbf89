"""How structs of parameters are made by hand: names are checked, and vLLM's are known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from penstock.config import vllm
from penstock.config.checks import as_plain, did_you_mean
from penstock.contract.param_checks import shown
from penstock.errors import InvalidParameter


class NamedParameters(msgspec.StructMeta):
    """The type of structs that say which name is wrong. Reading one from a message takes no notice of it.

    A parameter of vLLM's that the struct has not is left out where it asks for nothing; otherwise making the struct
    raises UnsupportedParameter, naming the feature, and InvalidParameter for a name that nobody knows.
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
