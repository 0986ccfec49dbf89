"""Quantisation to the nearest integers in one pass with packing, bit for bit as its specification in torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.kernels.native.quantized import NativeQuantizedProducts, available_quantized_products
from penstock.kernels.quantized import QuantizedWeight
from penstock.layers.quantization.quantize import quantize_int4, quantize_int4_residual, quantize_int8

PRODUCTS = available_quantized_products()
QUANTIZERS: dict[int, Callable[[Tensor], QuantizedWeight]] = {8: quantize_int8, 4: quantize_int4}

every_product = pytest.mark.parametrize("products", PRODUCTS, ids=[products.name for products in PRODUCTS])
every_number_of_bits = pytest.mark.parametrize("bits", QUANTIZERS)


def packed_at_once(
    products: NativeQuantizedProducts, weight_OI: Tensor, bits: int, num_packed: int = 1
) -> list[Tensor]:
    """The packed weight, and with 2 its residual, in memory that held something else."""
    shape = products.nearest_shape(weight_OI, bits)
    assert shape is not None
    packed = [torch.full((products.packed_bytes(shape),), 0xA5, dtype=torch.uint8) for _ in range(num_packed)]
    assert products.pack_nearest(weight_OI, shape, *packed)
    return packed


def assert_as_specified(products: NativeQuantizedProducts, weight_OI: Tensor, bits: int) -> None:
    expected = QUANTIZERS[bits](weight_OI)
    assert products.nearest_shape(weight_OI, bits) == expected.shape
    (packed,) = packed_at_once(products, weight_OI, bits)
    unpacked = products.unpack(packed, expected.shape)
    assert torch.equal(unpacked.scales_OG, expected.scales_OG)
    assert torch.equal(unpacked.values_OI, expected.values_OI)
    # Bytes beyond the weight and signs of zeros too.
    assert torch.equal(packed, products.pack(expected))


def odd_rows(num_inputs: int) -> Tensor:
    """Rows of numbers that are easily rounded in another way, each at several magnitudes."""
    random = torch.Generator().manual_seed(1)
    halves_I = torch.arange(num_inputs) % 16 - 7.5  # in the middle of two integers
    rows = [
        torch.zeros(num_inputs),
        torch.full((num_inputs,), -0.0),
        torch.where(torch.arange(num_inputs) % 3 == 0, 0.0, -0.0),
        torch.full((num_inputs,), 0.3),
        torch.full((num_inputs,), -0.7),
        torch.rand(num_inputs, generator=random),
        -torch.rand(num_inputs, generator=random),
        torch.randn(num_inputs, generator=random) ** 3,
        torch.randint(0, 2, (num_inputs,), generator=random).float(),
        torch.randint(-127, 128, (num_inputs,), generator=random).float(),
        torch.where(torch.arange(num_inputs) % 32 == 5, 127.0, halves_I),
        torch.where(torch.arange(num_inputs) % 32 == 5, 127.0, halves_I.nextafter(torch.tensor(0.0))),
        torch.where(torch.arange(num_inputs) % 32 == 5, 127.0, halves_I.nextafter(torch.tensor(99.0))),
        (torch.arange(num_inputs) % 32) / 2,
        torch.where(torch.arange(num_inputs) == num_inputs - 1, 5.0, torch.randn(num_inputs, generator=random)),
    ]
    magnitudes = [1.0, 1 / 3, 6e4 / 127, 1e-3, 3e-6, 1e-7, 6e-8, 1e-20, 1e-38, 1e-42]
    return torch.stack([row * magnitude for magnitude in magnitudes for row in rows])


@every_product
@every_number_of_bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_odd_numbers(products: NativeQuantizedProducts, bits: int, dtype: torch.dtype) -> None:
    for num_inputs in (32, 33, 64, 95, 160):
        assert_as_specified(products, odd_rows(num_inputs).to(dtype), bits)


@every_product
@every_number_of_bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_sizes(products: NativeQuantizedProducts, bits: int, dtype: torch.dtype) -> None:
    for num_outputs, num_inputs in ((1, 32), (7, 40), (33, 1000), (64, 64), (300, 288)):
        random = torch.Generator().manual_seed(num_outputs)
        weight_OI = torch.randn(num_outputs, num_inputs, generator=random).mul_(0.02).to(dtype)
        assert_as_specified(products, weight_OI, bits)
        wider = torch.cat((weight_OI, torch.full_like(weight_OI, torch.nan)), dim=1)
        assert_as_specified(products, wider[:, :num_inputs], bits)
        assert_as_specified(products, weight_OI.T.contiguous().T, bits)


@every_product
@every_number_of_bits
def test_coarse_numbers_have_many_ties(products: NativeQuantizedProducts, bits: int) -> None:
    random = torch.Generator().manual_seed(0)
    for levels in (3, 15, 30, 31, 127, 254, 255):
        integers_OI = torch.randint(-levels, levels + 1, (200, 96), generator=random)
        assert_as_specified(products, integers_OI.float() / 64, bits)
        assert_as_specified(products, (integers_OI.float() * 0.37).bfloat16(), bits)


@every_product
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_residual_of_4_bits_is_that_of_the_specification(
    products: NativeQuantizedProducts, dtype: torch.dtype
) -> None:
    for weight_OI in (torch.randn(75, 200).to(dtype), odd_rows(96).to(dtype)):
        expected = quantize_int4(weight_OI)
        packed, residual = packed_at_once(products, weight_OI, 4, 2)
        assert torch.equal(packed, products.pack(expected))
        assert torch.equal(residual, products.pack(quantize_int4_residual(weight_OI, expected)))


@every_product
@every_number_of_bits
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 1e9, -1e9])
def test_numbers_without_scales_of_16_bits_are_reported(
    products: NativeQuantizedProducts, bits: int, value: float
) -> None:
    for row, column in ((0, 0), (0, 31), (20, 17), (69, 99), (3, 96)):
        weight_OI = torch.randn(70, 100)
        weight_OI[row, column] = value
        shape = products.nearest_shape(weight_OI, bits)
        assert shape is not None
        assert not products.pack_nearest(weight_OI, shape, torch.empty(products.packed_bytes(shape), dtype=torch.uint8))
        assert QUANTIZERS[bits](weight_OI).shape.scale_bytes == 4


@every_product
def test_weights_that_have_no_such_format(products: NativeQuantizedProducts) -> None:
    assert products.nearest_shape(torch.randn(4, 31), 8) is None
    assert products.nearest_shape(torch.randn(4, 64).double(), 8) is None
    assert products.nearest_shape(torch.randn(4, 64, device="meta"), 8) is None
