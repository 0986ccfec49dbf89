"""Decoders with mixtures of experts: parts that their families share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import nn

from penstock.errors import ModelError
from penstock.layers.experts import MoE, Routing
from penstock.layers.weights import Shard
from penstock.models.causal_lm import StackedParameter
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, DecoderForCausalLM, DecoderModel
from penstock.models.weights import Into, WeightTable, modules_of_table
from penstock.parallel import ParallelState

# Families, and versions of Transformers, differ in the name.
_NAMES_OF_NUM_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a mixture's modules in checkpoints.

    block: of the mixture in its layer. gate_proj, up_proj, down_proj: of an expert.
    """

    block: str = "mlp"
    gate_proj: str = "gate_proj"
    up_proj: str = "up_proj"
    down_proj: str = "down_proj"


class MixtureForCausalLM(DecoderForCausalLM):
    """A decoder in which some layers have experts instead of the MLP. expert_names: as in checkpoints."""

    expert_names: ClassVar[ExpertNames] = ExpertNames()

    def __init__(
        self,
        config: DecoderConfig,
        parallel: ParallelState,
        model: DecoderModel,
        moe_layers: list[int],
        routing: Routing,
    ) -> None:
        super().__init__(config, parallel, model)
        self._moe_layers, self._routing = moe_layers, routing

    def modules_with_adapters(self) -> Mapping[str, tuple[nn.Module | None, Shard | None]]:
        table = {**self._table(), "lm_head": self.weight_table["lm_head"]}
        return modules_of_table(self, table, self.config.num_layers)

    def stacked_parameters(self) -> Mapping[str, Sequence[StackedParameter]]:
        """Experts' weights, which Transformers stacks, and the router's."""
        found: dict[str, Sequence[StackedParameter]] = {}
        middle = next((module.intermediate_size for module in self.modules() if isinstance(module, MoE)), None)
        if middle is None:
            # All of them are on other pipeline stages.
            return found
        hidden, names = self.config.hidden_size, self.expert_names
        for layer in self._moe_layers:
            block = f"model.layers.{layer}.{names.block}"
            experts = [f"{block}.experts.{expert}" for expert in range(self._routing.num_experts)]
            gate_up = tuple((f"{one}.{names.gate_proj}", f"{one}.{names.up_proj}") for one in experts)
            down = tuple((f"{one}.{names.down_proj}",) for one in experts)
            found[f"model.layers.{layer}.mlp.experts"] = (
                StackedParameter(
                    "gate_up_proj", (2 * middle, hidden), gate_up, (slice(middle), slice(middle, 2 * middle))
                ),
                StackedParameter("down_proj", (hidden, middle), down, (slice(hidden),)),
            )
            router = self._routing.num_experts, hidden
            found[f"model.layers.{layer}.mlp.gate"] = (
                StackedParameter("weight", router, ((f"{block}.gate",),), (slice(router[0]),)),
            )
        return found

    def _table(self) -> WeightTable:
        mlps = {name: into for name, into in super()._table().items() if ".mlp." in name}
        table = {name: into for name, into in super()._table().items() if name not in mlps}
        for layer in range(self.config.num_layers):
            if layer in self._moe_layers:
                table |= self._expert_table(layer)
                continue
            for name, into in mlps.items():
                table[name.replace("*", str(layer))] = Into(into.module.replace("*", str(layer)), into.shard)
        return table

    def _expert_table(self, layer: int) -> WeightTable:
        names, ours = self.expert_names, f"model.layers.{layer}.mlp"
        theirs = f"model.layers.{layer}.{names.block}"
        table = {f"{theirs}.gate": Into(f"{ours}.gate")}
        for expert in range(self._routing.num_experts):
            table |= dict(gated_mlp(f"{theirs}.experts.{expert}", f"{ours}.experts.{expert}", names))
        return table


def gated_mlp(theirs: str, ours: str, names: ExpertNames) -> Iterator[tuple[str, Into]]:
    yield f"{theirs}.{names.gate_proj}", Into(f"{ours}.gate_up_proj", shard="gate")
    yield f"{theirs}.{names.up_proj}", Into(f"{ours}.gate_up_proj", shard="up")
    yield f"{theirs}.{names.down_proj}", Into(f"{ours}.down_proj")


def read_routing(fields: ConfigFields, *, normalizes: bool | None = None) -> Routing:
    """Softmax routing. normalizes: None takes `norm_topk_prob`. Raises ModelError for more experts than there are."""
    name = next((name for name in _NAMES_OF_NUM_EXPERTS if name in fields.hf_config), "num_experts")
    num_experts, top_k = fields.integer(name), fields.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise ModelError(
            f"config.json of {fields.model_config.model} has num_experts_per_tok={top_k}. It must be at most "
            f"{name}={num_experts}."
        )
    if normalizes is None:
        normalizes = fields.flag("norm_topk_prob", default=False)
    return Routing(num_experts, top_k, normalizes=normalizes)


def mixtures(
    config: DecoderConfig,
    routing: Routing,
    intermediate_size: int,
    parallel: ParallelState,
    layers: list[int],
    *,
    shared_size: int = 0,
    gates_shared: bool = False,
    has_correction: bool = False,
) -> Callable[[int], MoE | None]:
    """Function that makes the experts of a layer, or None for a layer with an MLP; arguments as of `MoE`."""
    make = partial(
        MoE,
        config.hidden_size,
        intermediate_size,
        routing,
        activation=config.activation,
        parallel=parallel,
        shared_size=shared_size,
        gates_shared=gates_shared,
        has_correction=has_correction,
    )
    return lambda layer: make() if layer in layers else None
