"""Linear layers, by how tensor parallelism splits them.

Each keeps its weight as a `LinearMethod` decides, once all weights are loaded.
Suffixes: T tokens, I input features, O output features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.config.env import uses_torch_products
from penstock.device.stand_in import is_on_cpu
from penstock.kernels.linear import linear, pack_weight, packed_linear, packing_pays, unpack_weight
from penstock.kernels.native import NATIVE, NativeKernels
from penstock.layers.weights import Part, RowLookup, RowReader, Shard, WeightSlot, empty_like_weight, new_parameter
from penstock.parallel import ParallelState, Share, heads_of_rank, share_of_rank
from penstock.parallel.scattered_rows import ScatteredRows


class LinearMethod(ABC):
    """How one linear layer multiplies, and the form of the weight that this takes."""

    @abstractmethod
    def process_weights_after_loading(self, layer: LinearLayer) -> None:
        """Bring the layer's loaded weight into this method's form."""

    @abstractmethod
    def restore_weights(self, layer: LinearLayer) -> None:
        """Undo `process_weights_after_loading`, so that `layer.weight` holds the weight again."""

    @abstractmethod
    def apply(self, layer: LinearLayer, x_TI: Tensor) -> Tensor:
        """x @ weight^T + bias: [T, O]."""

    def argmax(
        self, layer: LinearLayer, x_LI: Tensor, *, with_largest: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """The first of the largest of `apply`, and whether a row failed: int64 [L] and bool [L].

        None where that saves nothing. The layer has no bias. with_largest: those products too, float32 [L].
        """
        return None


class PlainMethod(LinearMethod):
    """Multiplies by the weight as it was loaded."""

    def process_weights_after_loading(self, layer: LinearLayer) -> None: ...

    def restore_weights(self, layer: LinearLayer) -> None: ...

    def apply(self, layer: LinearLayer, x_TI: Tensor) -> Tensor:
        return linear(x_TI, layer.weight, layer.bias)


class PackedMethod(LinearMethod):
    """Keeps the weight in a layout of its kernels instead of the loaded one."""

    def __init__(self) -> None:
        self.packed_OI: Tensor | None = None

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """All that is kept of the weight."""
        return () if self.packed_OI is None else (self.packed_OI,)

    @abstractmethod
    def pack(self, weight_OI: Tensor) -> Tensor:
        """The weight in the layout that `multiply` takes."""

    @abstractmethod
    def unpack(self, packed_OI: Tensor, output_size: int) -> Tensor:
        """The weight that was packed, bit for bit: [O, I]."""

    def row_lookup(self, packed_OI: Tensor) -> RowLookup | None:
        """How to read rows of the weight from its packed form, if that is possible."""
        return None

    @abstractmethod
    def multiply(self, x_TI: Tensor, packed_OI: Tensor, output_size: int, bias_O: Tensor | None) -> Tensor:
        """x @ weight^T + bias: [T, O]."""

    def process_weights_after_loading(self, layer: LinearLayer) -> None:
        self.packed_OI = self.pack(layer.weight.detach())
        layer.drop_weight(self.row_lookup(self.packed_OI))

    def restore_weights(self, layer: LinearLayer) -> None:
        if self.packed_OI is not None and layer.weight.numel() == 0:
            layer.take_weight(self.unpack(self.packed_OI, layer.output_size))
        self.packed_OI = None

    def apply(self, layer: LinearLayer, x_TI: Tensor) -> Tensor:
        assert self.packed_OI is not None, "apply before process_weights_after_loading"
        return self.multiply(x_TI, self.packed_OI, layer.output_size, layer.bias)


class OneDnnMethod(PackedMethod):
    """oneDNN's packed products, through torch."""

    def pack(self, weight_OI: Tensor) -> Tensor:
        return pack_weight(weight_OI)

    def unpack(self, packed_OI: Tensor, output_size: int) -> Tensor:
        return unpack_weight(packed_OI)

    def multiply(self, x_TI: Tensor, packed_OI: Tensor, output_size: int, bias_O: Tensor | None) -> Tensor:
        return packed_linear(x_TI, packed_OI, bias_O)


class NativeMethod(PackedMethod):
    """Our own C++ kernels."""

    def __init__(self, kernels: NativeKernels) -> None:
        super().__init__()
        self._kernels = kernels

    def pack(self, weight_OI: Tensor) -> Tensor:
        return self._kernels.pack_weight(weight_OI)

    def unpack(self, packed_OI: Tensor, output_size: int) -> Tensor:
        return self._kernels.unpack_weight(packed_OI, output_size)

    def row_lookup(self, packed_OI: Tensor) -> RowLookup:
        return _PackedRows(self._kernels, packed_OI)

    def multiply(self, x_TI: Tensor, packed_OI: Tensor, output_size: int, bias_O: Tensor | None) -> Tensor:
        return self._kernels.linear(x_TI, packed_OI, output_size, bias_O)

    def argmax(
        self, layer: LinearLayer, x_LI: Tensor, *, with_largest: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """None of the products is written down."""
        assert self.packed_OI is not None, "argmax before process_weights_after_loading"
        assert layer.bias is None, "a bias would change the largest"
        return self._kernels.greedy(x_LI, self.packed_OI, layer.output_size, with_largest=with_largest)


@dataclass(frozen=True, slots=True)
class _PackedRows(RowLookup):
    kernels: NativeKernels
    packed_OI: Tensor

    def __call__(self, ids_T: Tensor) -> Tensor:
        return self.kernels.rows(ids_T, self.packed_OI)


def choose_linear_method(weight_OI: Tensor, compute_dtype: torch.dtype | None = None) -> LinearMethod:
    """The fastest method for this weight where it lies. compute_dtype: None for the weight's."""
    is_ours = is_on_cpu(weight_OI) and (compute_dtype or weight_OI.dtype) is torch.float32 and not uses_torch_products()
    if NATIVE is not None and is_ours:
        return NativeMethod(NATIVE)
    return OneDnnMethod() if packing_pays(weight_OI) else PlainMethod()


def process_weights_after_loading(
    model: nn.Module, choose: Callable[[LinearLayer], LinearMethod] | None = None
) -> None:
    """Choose a method for every linear layer and hand it the loaded weight. A layer at a time, to need little memory.

    choose: another choice than the fastest method, such as one that quantises.
    Without this call a loaded model is right, but slower.
    """
    for module in model.modules():
        if isinstance(module, LinearLayer):
            if choose is None:
                module.method = choose_linear_method(module.weight, module.compute_dtype)
            else:
                module.method = choose(module)
            module.method.process_weights_after_loading(module)


def restore_weights(model: nn.Module) -> None:
    """Undo `process_weights_after_loading`: every parameter holds its weight again and can be loaded anew."""
    for module in model.modules():
        if isinstance(module, LinearLayer):
            module.method.restore_weights(module)
            module.method = PlainMethod()


def weights_size_bytes(model: nn.Module) -> int:
    """Bytes of all weights and buffers, in whatever form the layers keep them."""
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        if isinstance(module, LinearLayer) and isinstance(module.method, PackedMethod):
            tensors += module.method.kept
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class LinearLayer(nn.Module):
    """x @ weight^T + bias.

    weight: [O, I]; empty while the method keeps it in another form. bias: [O] or None.
    shares_weight: another module needs the weight too, as it is. compute_dtype: of x and of the product, where the
    weight is kept in a narrower one. tied_to: embeddings that have the same weight, and can read its rows from another
    form of it; in a tuple, since a module's attributes become its children.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    shares_weight = False
    compute_dtype: torch.dtype | None = None
    tied_to: tuple[RowReader, ...] = ()

    def __init__(self, input_size: int, output_size: int, *, bias: bool) -> None:
        super().__init__()
        self.input_size = input_size
        self.output_size = output_size
        self.method: LinearMethod = PlainMethod()
        self.weight = new_parameter(output_size, input_size)
        self.bias = new_parameter(output_size) if bias else None

    def forward(self, x_TI: Tensor) -> Tensor:
        return self.method.apply(self, x_TI)

    def drop_weight(self, lookup: RowLookup | None) -> None:
        """Free the weight, of which the method has a form of its own; `lookup` reads rows of that form."""
        if self.shares_weight or (self.tied_to and lookup is None):
            return
        self.weight = empty_like_weight(self.weight, self.compute_dtype)
        for embedding in self.tied_to:
            embedding.weight, embedding.lookup = self.weight, lookup

    def take_weight(self, weight_OI: Tensor) -> None:
        """Hold the weight again."""
        self.weight = nn.Parameter(weight_OI, requires_grad=False)
        for embedding in self.tied_to:
            embedding.weight, embedding.lookup = self.weight, None


class ColumnParallelLinear(LinearLayer):
    """A layer whose output features are split over the ranks. output_size: of all; the layer's own is this rank's.

    share: of them, where it is not as large as the other ranks'.
    """

    def __init__(
        self, input_size: int, output_size: int, *, bias: bool, parallel: ParallelState, share: Share | None = None
    ) -> None:
        share = share or share_of_rank(output_size, parallel.tensor, "output features")
        super().__init__(input_size, share.size, bias=bias)
        self._share = share

    def slots(self) -> dict[str, WeightSlot]:
        return {name: rows_of_rank(target, self._share) for name, target in self.named_parameters(recurse=False)}


class RowParallelLinear(LinearLayer):
    """A layer whose input features are split over the ranks, and whose partial products are summed.

    input_size: of all; the layer's own is this rank's. The first rank adds the bias, that of the others is zero.
    """

    def __init__(self, input_size: int, output_size: int, *, bias: bool, parallel: ParallelState) -> None:
        share = share_of_rank(input_size, parallel.tensor, "input features")
        super().__init__(share.size, output_size, bias=bias)
        self._share, self._group = share, parallel.tensor

    def forward(self, x_TI: Tensor, rows: ScatteredRows | None = None) -> Tensor:
        """rows: how the sum is scattered over ranks; None gives all of it to each."""
        part_TO = super().forward(x_TI)
        return self._group.all_reduce(part_TO) if rows is None else rows.add_up(part_TO)

    def slots(self) -> dict[str, WeightSlot]:
        slots = {"weight": WeightSlot((self.output_size, self._share.whole), self.weight, _part(1, self._share))}
        if self.bias is not None:
            slots["bias"] = WeightSlot((self.output_size,), self.bias, None if self._group.rank == 0 else Part(0, ()))
        return slots


class MergedColumnParallelLinear(LinearLayer):
    """Several projections of the same input in one product, their outputs side by side.

    output_shares: by shard, in the order of the output, which output features this rank has of it.
    """

    def __init__(self, input_size: int, output_shares: Mapping[Shard, Share], *, bias: bool) -> None:
        super().__init__(input_size, sum(share.size for share in output_shares.values()), bias=bias)
        self.output_shares = dict(output_shares)

    @classmethod
    def of_sizes(
        cls, input_size: int, output_sizes: Mapping[Shard, int], *, bias: bool, parallel: ParallelState
    ) -> MergedColumnParallelLinear:
        """With an equal share of each projection. output_sizes: by shard, of all ranks."""
        shares = {
            shard: share_of_rank(size, parallel.tensor, f'output features "{shard}"')
            for shard, size in output_sizes.items()
        }
        return MergedColumnParallelLinear(input_size, shares, bias=bias)

    def slots(self) -> dict[str, WeightSlot]:
        """Where tensors go that hold all shards, each whole, side by side."""
        rows, begin = [], 0
        for share in self.output_shares.values():
            rows.append(Share(begin + share.start, share.size, share.whole))
            begin += share.whole
        is_all = all(share.size == share.whole for share in rows)
        part = None if is_all else Part(0, tuple(rows))
        parameters = self.named_parameters(recurse=False)
        return {name: WeightSlot((begin, *target.shape[1:]), target, part) for name, target in parameters}

    def fused_slots(self, shard: Shard) -> dict[str, WeightSlot]:
        names, share = list(self.output_shares), self.output_shares[shard]
        offset = sum(self.output_shares[name].size for name in names[: names.index(shard)])
        parameters = self.named_parameters(recurse=False)
        return {name: rows_of_rank(parameter.narrow(0, offset, share.size), share) for name, parameter in parameters}


class QKVParallelLinear(MergedColumnParallelLinear):
    """The query, key and value projections of an attention layer: shards "q", "k" and "v".

    num_heads, num_kv_heads: of all ranks; the layer's own are this rank's.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        bias: bool,
        parallel: ParallelState,
    ) -> None:
        heads, kv_heads = heads_of_rank(num_heads, num_kv_heads, parallel.tensor)
        shares = {"q": heads * head_size, "k": kv_heads * head_size, "v": kv_heads * head_size}
        super().__init__(hidden_size, shares, bias=bias)
        self.num_heads, self.num_kv_heads = heads.size, kv_heads.size


def _part(dim: int, share: Share) -> Part | None:
    return None if share.size == share.whole else Part(dim, (share,))


def rows_of_rank(target: Tensor, share: Share) -> WeightSlot:
    """Of a tensor that holds the rows of all ranks."""
    return WeightSlot((share.whole, *target.shape[1:]), target, _part(0, share))
