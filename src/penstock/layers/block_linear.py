"""Linear layers with block-diagonal weights. Suffixes: T tokens, H blocks, I inputs and O outputs of one, X of all."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.attention import ForwardContext
from penstock.device.stand_in import is_on_cpu
from penstock.kernels.linear import batch_invariant_head_products
from penstock.kernels.native import NativeKernels
from penstock.layers.linear import LinearLayer, LinearMethod, PackedMethod, PlainMethod
from penstock.layers.weights import Part, WeightSlot
from penstock.parallel import Share
from penstock.system.env import uses_torch_products


class BlockLinear(LinearLayer):
    """A product of each block of the inputs with a weight of its own: [T, H * O] from [T, H * I].

    weight: [H * O, I], of this rank's blocks. It keeps its precision.
    """

    keeps_precision = True

    def __init__(self, blocks: Share, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, blocks.size * num_outputs, bias=True)
        self.blocks, self.num_outputs = blocks, num_outputs

    def forward(self, x_TX: Tensor, context: ForwardContext) -> Tensor:
        if isinstance(self.method, NativeBlockMethod):
            return self.method.apply(self, x_TX)
        weight_HOI = self.weight.view(self.blocks.size, self.num_outputs, self.input_size).to(x_TX.dtype)
        x_THI = x_TX.unflatten(1, (self.blocks.size, self.input_size))
        if self.batch_invariant:
            out_THO = batch_invariant_head_products(x_THI, weight_HOI)
        else:
            out_THO = torch.bmm(x_THI.transpose(0, 1), weight_HOI.transpose(1, 2)).transpose(0, 1)
        assert self.bias is not None, "the layer has a bias"
        return out_THO.flatten(1) + self.bias

    def own_method(self, kernels: NativeKernels | None) -> LinearMethod:
        is_ours = is_on_cpu(self.weight) and (self.compute_dtype or self.weight.dtype) is torch.float32
        if kernels is None or not is_ours or uses_torch_products():
            return PlainMethod()
        return NativeBlockMethod(kernels, self)

    def slots_as(self, name: str) -> dict[str, WeightSlot]:
        """Slots of a checkpoint's tensors `name`_weight, [H, I, O], and `name`_bias, [H, O], of all ranks."""
        blocks, shape = self.blocks, (self.input_size, self.num_outputs)
        part = None if blocks.size == blocks.whole else Part(0, (blocks,))
        weight_HIO = self.weight.view(blocks.size, *shape[::-1]).transpose(1, 2)
        assert self.bias is not None, "the layer has a bias"
        bias_HO = self.bias.view(blocks.size, self.num_outputs)
        return {
            f"{name}_weight": WeightSlot((blocks.whole, *shape), weight_HIO, part),
            f"{name}_bias": WeightSlot((blocks.whole, self.num_outputs), bias_HO, part),
        }


class NativeBlockMethod(PackedMethod):
    """Penstock's C++ kernels, with a packed weight for each block."""

    def __init__(self, kernels: NativeKernels, layer: BlockLinear) -> None:
        super().__init__()
        self._kernels, self._num_blocks, self._num_outputs = kernels, layer.blocks.size, layer.num_outputs

    def pack(self, weight_OI: Tensor) -> Tensor:
        return self._kernels.pack_head_weights(weight_OI.unflatten(0, (self._num_blocks, self._num_outputs)))

    def unpack(self, packed_OI: Tensor, output_size: int) -> Tensor:
        return self._kernels.unpack_head_weights(packed_OI, self._num_blocks, self._num_outputs).flatten(0, 1)

    def multiply(self, x_TI: Tensor, packed_OI: Tensor, output_size: int, bias_O: Tensor | None) -> Tensor:
        return self._kernels.head_products(x_TI, packed_OI, self._num_blocks, self._num_outputs, bias_O)
