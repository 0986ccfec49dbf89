"""Matrices of stacked parameters (`target_parameters`), such as those of experts, by the modules that they change here.

PEFT keeps those of all E matrices of a parameter in one pair: A as [E * R, I], and B as [O, R * E], in which E varies
fastest. The parameters of one module are wrapped into one another, so that their names do not say which is which.

Suffixes: E matrices, R rank, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from penstock.errors import CheckpointError
from penstock.features.lora.low_rank import LowRank, check_rank
from penstock.features.lora.peft_config import PeftConfig
from penstock.models.causal_lm import StackedParameter

_WRAPPER = ".base_layer"


class StackedParameters:
    """Stacked parameters of a model, by the names of their modules in Transformers."""

    def __init__(self, by_module: Mapping[str, Sequence[StackedParameter]]) -> None:
        self._by_module = by_module

    @property
    def names(self) -> list[str]:
        """Names of all parameters in Transformers."""
        return [f"{owner}.{parameter.name}" for owner, found in self._by_module.items() for parameter in found]

    def split(
        self, name: str, module: str, pair: tuple[Tensor | None, Tensor | None], config: PeftConfig, max_rank: int
    ) -> dict[str, LowRank] | None:
        """The matrices of each module that A and B of a parameter change; None for a module without such parameters.

        Raises CheckpointError, naming the adapter and the parameter, for matrices that do not fit.
        """
        owner = module
        while owner.endswith(_WRAPPER):
            owner = owner.removesuffix(_WRAPPER)
        a, b = pair
        parameters = self._by_module.get(owner)
        if parameters is None or a is None or b is None:
            return None
        parameter = _of_shape(name, owner, parameters, (b.shape[0], a.shape[1]), config)
        full_name, count = f"{owner}.{parameter.name}", len(parameter.modules)
        rank, scaling = config.rank_of(full_name), config.scaling_of(full_name)
        check_rank(name, full_name, rank, max_rank)
        if a.shape[0] != rank * count or b.shape[1] != rank * count:
            raise CheckpointError(
                f"The adapter {name!r} has matrices of {list(a.shape)} and {list(b.shape)} for {full_name}, which do "
                f"not have {count} times the rank {rank} of its adapter_config.json (r, rank_pattern)."
            )
        a_ERI, b_ORE = a.view(count, rank, -1), b.view(-1, rank, count)
        return {
            part: LowRank(a_ERI[index], b_ORE[outputs, :, index], scaling, is_embedding=False)
            for index, parts in enumerate(parameter.modules)
            for part, outputs in zip(parts, parameter.outputs, strict=True)
        }


def _of_shape(
    name: str, owner: str, parameters: Sequence[StackedParameter], shape: tuple[int, int], config: PeftConfig
) -> StackedParameter:
    for parameter in parameters:
        if parameter.shape == shape:
            return parameter
    allowed = ", ".join(f"{list(parameter.shape)} of {parameter.name}" for parameter in parameters)
    raise CheckpointError(
        f"The adapter {name!r} changes a parameter of {owner} (target_parameters={list(config.target_parameters)}) as "
        f"matrices of {list(shape)}. Allowed: {allowed}. Take an adapter of this model, and of no biases."
    )


NO_STACKED_PARAMETERS = StackedParameters({})
