"""Decoders with mixtures of experts: parts that their families share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from torch import Tensor

from penstock.errors import ModelError
from penstock.kernels.activation import GatedActivation
from penstock.layers.experts import MoE, Routing
from penstock.models.causal_lm import StackedParameter
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, DecoderForCausalLM, DecoderModel
from penstock.models.weights import Into, WeightTable, of_layers
from penstock.parallel import ParallelState

# Experts' projections in a tensor of all of them, [experts, outputs, inputs]: outputs side by side.
_STACKED_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
_STACKED_EXPERTS = re.compile(rf"(.*\.experts)\.({'|'.join(_STACKED_PROJECTIONS)})")
# Families, and versions of Transformers, differ in the name.
_NAMES_OF_NUM_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a mixture's modules in checkpoints.

    block: of the mixture in its layer. router, shared: of the router and of shared experts in the block. gate_proj,
    up_proj, down_proj: of an expert; gate_proj is None for one that is not gated.
    stacked_block, stacked_router: of Transformers' modules, in which the experts' weights are stacked.
    """

    block: str = "mlp"
    gate_proj: str | None = "gate_proj"
    up_proj: str = "up_proj"
    down_proj: str = "down_proj"
    router: str = "gate"
    shared: str = "shared_experts"
    stacked_block: str = "mlp"
    stacked_router: str = "gate"


class MixtureForCausalLM(DecoderForCausalLM):
    """A decoder in which some layers have experts instead of the MLP. routing: None where no layer has.

    expert_names: as in checkpoints. gate_up_alternate: outputs of gate and up alternate where they are stacked.
    has_shared: whether checkpoints have shared experts, as one MLP. expert_inputs: size of the experts' inputs; None
    for the hidden size.
    """

    expert_names: ClassVar[ExpertNames] = ExpertNames()
    gate_up_alternate: ClassVar[bool] = False
    has_shared = False
    expert_inputs: int | None = None

    def __init__(
        self,
        config: DecoderConfig,
        parallel: ParallelState,
        model: DecoderModel,
        moe_layers: list[int],
        routing: Routing | None,
    ) -> None:
        super().__init__(config, parallel, model)
        self._moe_layers, self._routing = moe_layers, routing

    def pieces(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        for own_name, piece in super().pieces(name, tensor):
            yield from pieces_of_experts(own_name, piece)

    def stacked_parameters(self) -> Mapping[str, Sequence[StackedParameter]]:
        """Experts' weights, which Transformers stacks, and the router's."""
        found: dict[str, Sequence[StackedParameter]] = {}
        middle = next((module.intermediate_size for module in self.modules() if isinstance(module, MoE)), None)
        if middle is None or self._routing is None:
            # There are none, or all of them are on other pipeline stages.
            return found
        hidden, names = self.expert_inputs or self.config.hidden_size, self.expert_names
        outputs = slice(middle), slice(middle, 2 * middle)
        if self.gate_up_alternate:
            outputs = slice(0, None, 2), slice(1, None, 2)
        for layer in self._moe_layers:
            block, stacked = (f"model.layers.{layer}.{name}" for name in (names.block, names.stacked_block))
            experts = [f"{block}.experts.{expert}" for expert in range(self._routing.num_experts)]
            up = [tuple(f"{one}.{name}" for name in (names.gate_proj, names.up_proj) if name) for one in experts]
            down = tuple((f"{one}.{names.down_proj}",) for one in experts)
            of_up = StackedParameter("gate_up_proj", (2 * middle, hidden), tuple(up), outputs)
            if names.gate_proj is None:
                of_up = StackedParameter("up_proj", (middle, hidden), tuple(up), (slice(middle),))
            found[f"{stacked}.experts"] = (
                of_up,
                StackedParameter("down_proj", (hidden, middle), down, (slice(hidden),)),
            )
            router = self._routing.num_experts, self.config.hidden_size
            found[f"{stacked}.{names.stacked_router}"] = (
                StackedParameter("weight", router, ((f"{block}.{names.router}",),), (slice(router[0]),)),
            )
        return found

    def _table(self) -> WeightTable:
        mlps = {name: into for name, into in super()._table().items() if ".mlp." in into.module}
        table = {name: into for name, into in super()._table().items() if name not in mlps}
        for layer in range(self.config.num_layers):
            if layer in self._moe_layers:
                table |= self._expert_table(layer)
                continue
            table |= of_layers(mlps, [layer])
        return table

    def _expert_table(self, layer: int) -> WeightTable:
        assert self._routing is not None, "layers with experts have a routing"
        theirs, ours = f"model.layers.{layer}.{self.expert_names.block}", f"model.layers.{layer}.mlp"
        return expert_weights(theirs, ours, self._routing.num_experts, self.expert_names, has_shared=self.has_shared)


class SharedExpertsForCausalLM(MixtureForCausalLM):
    """A mixture with shared experts, and layers for drafting more tokens after the others, which are not loaded.

    num_drafting: number of these layers.
    """

    num_drafting = 0
    has_shared = True

    def names_elsewhere(self) -> Sequence[str]:
        first = self.config.num_layers
        drafting = [rf"model\.layers\.{layer}\..*" for layer in range(first, first + self.num_drafting)]
        return [*super().names_elsewhere(), *drafting]


def expert_weights(
    theirs: str, ours: str, num_experts: int, names: ExpertNames | None = None, *, has_shared: bool = False
) -> WeightTable:
    """Weights of a mixture with these names in the checkpoint and in the model. has_shared: of shared experts too."""
    names = names or ExpertNames()
    table = {f"{theirs}.{names.router}": Into(f"{ours}.gate")}
    for expert in range(num_experts):
        table |= dict(gated_mlp(f"{theirs}.experts.{expert}", f"{ours}.experts.{expert}", names))
    if has_shared:
        table |= dict(gated_mlp(f"{theirs}.{names.shared}", f"{ours}.shared_expert", names))
    return table


def gated_mlp(theirs: str, ours: str, names: ExpertNames) -> Iterator[tuple[str, Into]]:
    if names.gate_proj is None:
        yield f"{theirs}.{names.up_proj}", Into(f"{ours}.up_proj")
    else:
        yield f"{theirs}.{names.gate_proj}", Into(f"{ours}.gate_up_proj", shard="gate")
        yield f"{theirs}.{names.up_proj}", Into(f"{ours}.gate_up_proj", shard="up")
    yield f"{theirs}.{names.down_proj}", Into(f"{ours}.down_proj")


def pieces_of_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Cut a tensor of all experts of a layer, [experts, outputs, inputs] with gate and up side by side."""
    stacked = _STACKED_EXPERTS.fullmatch(name)
    if stacked is None:
        yield name, tensor
        return
    prefix, projection = stacked.groups()
    names = _STACKED_PROJECTIONS[projection]
    for expert, of_expert in enumerate(tensor):
        for one, part in zip(names, of_expert.chunk(len(names)), strict=True):
            yield f"{prefix}.{expert}.{one}.weight", part


def read_routing(
    fields: ConfigFields, *, normalizes: bool | None = None, of_token: str = "num_experts_per_tok"
) -> Routing:
    """Softmax routing. normalizes: None takes `norm_topk_prob`. of_token: field of the number of a token's experts.

    Raises ModelError for more experts than there are.
    """
    name = next((name for name in _NAMES_OF_NUM_EXPERTS if name in fields.hf_config), "num_experts")
    num_experts, top_k = fields.integer(name), fields.integer(of_token)
    if top_k > num_experts:
        raise ModelError(f"{fields.source} has {of_token}={top_k}. It must be at most {name}={num_experts}.")
    if normalizes is None:
        normalizes = fields.flag("norm_topk_prob", default=False)
    return Routing(num_experts, top_k, normalizes=normalizes)


def read_groups(
    fields: ConfigFields, routing: Routing, *, best_of_group: int = 1, of_groups: str = "n_group"
) -> Routing:
    """Add the groups of experts, of which a token takes `topk_group`. of_groups: field of their number."""
    num_groups, top_groups = fields.integer(of_groups, default=1), fields.integer("topk_group", default=1)
    if routing.num_experts % num_groups or not top_groups <= num_groups:
        raise fields.unsupported(
            of_groups, num_groups, f"divisors of {routing.num_experts} experts, from topk_group={top_groups} on"
        )
    return replace(routing, num_groups=num_groups, top_groups=top_groups, best_of_group=best_of_group)


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
    activation: GatedActivation | None = None,
    bias: bool = False,
) -> Callable[[int], MoE | None]:
    """Function that makes the experts of a layer, or None for a layer with an MLP; arguments as of `MoE`.

    activation: None takes the configuration's.
    """
    make = partial(
        MoE,
        config.hidden_size,
        intermediate_size,
        routing,
        activation=activation or config.activation,
        parallel=parallel,
        shared_size=shared_size,
        gates_shared=gates_shared,
        has_correction=has_correction,
        bias=bias,
    )
    return lambda layer: make() if layer in layers else None
