"""Products with quantised weights: of every instruction set that runs here and of plain torch, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.errors import UnsupportedFeature
from penstock.kernels.gpu_quantized import GpuQuantizedProducts
from penstock.kernels.native.quantized import (
    NativeQuantizedProducts,
    available_quantized_products,
    emulated_tile_products,
)
from penstock.kernels.quantized import (
    QuantizedProducts,
    QuantizedShape,
    QuantizedWeight,
    TorchQuantizedProducts,
    minimums_of,
    quantize_rows,
)

EMULATED_TILES = emulated_tile_products()
NATIVE_PRODUCTS = [*available_quantized_products(), *([EMULATED_TILES] if EMULATED_TILES else [])]
ALL_PRODUCTS: list[QuantizedProducts] = [*NATIVE_PRODUCTS, TorchQuantizedProducts()]
NAMES = [getattr(products, "name", "torch") for products in ALL_PRODUCTS]

# First row and number of rows.
PARTS = [(0, 150), (7, 1), (9, 2), (20, 3), (31, 4), (40, 5), (60, 6), (70, 7), (80, 13), (3, 64)]

any_products = pytest.mark.parametrize("products", ALL_PRODUCTS, ids=NAMES)
native_products = pytest.mark.parametrize("products", NATIVE_PRODUCTS, ids=NAMES[: len(NATIVE_PRODUCTS)])


def random_weight(
    bits: int,
    outputs: int,
    inputs: int,
    group_size: int,
    seed: int = 0,
    *,
    has_minimums: bool = False,
    scale_bytes: int = 4,
) -> QuantizedWeight:
    """has_minimums: with 8 bits too."""
    random = torch.Generator().manual_seed(seed)
    shape = QuantizedShape(bits, outputs, inputs, min(group_size, inputs), has_minimums or bits == 4, scale_bytes)
    scales_OG = torch.rand(outputs, shape.num_groups, generator=random) + 0.01
    if scale_bytes == 2:
        scales_OG = (scales_OG * 32).ceil() / 32  # which leaves bits for the zero points
    if not shape.has_minimums:
        return QuantizedWeight(shape, integers(-127, 128, (outputs, inputs), random, torch.int8), scales_OG)
    values_OI = integers(0, 16 if bits == 4 else 128, (outputs, inputs), random, torch.int8)
    # A zero point may lie just outside, as some checkpoints have it.
    zeros_OG = integers(0, 17, (outputs, shape.num_groups), random, torch.uint8)
    return QuantizedWeight(shape, values_OI, scales_OG, minimums_of(zeros_OG, scales_OG))


def random_e2m1(outputs: int, inputs: int, group_size: int = 32, *, are_powers: bool = True) -> QuantizedWeight:
    """Floats of 4 bits, with scales that are powers of two, or any."""
    random = torch.Generator().manual_seed(0)
    numbers = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.int8)
    numbers = torch.cat((numbers, -numbers))
    shape = QuantizedShape(4, outputs, inputs, min(group_size, inputs), scale_bytes=1 if are_powers else 4)
    values_OI = numbers[torch.randint(0, 16, (outputs, inputs), generator=random)]
    scales_OG = torch.rand(outputs, shape.num_groups, generator=random) + 0.01
    if are_powers:
        scales_OG = scales_OG.log2().ceil().exp2()
        scales_OG[0] = 0
    return QuantizedWeight(shape, values_OI, scales_OG)


def integers(low: int, high: int, size: tuple[int, int], random: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randint(low, high, size, dtype=dtype, generator=random)


def magnitudes(weight: QuantizedWeight) -> Tensor:
    """Sum of the magnitudes of the two numbers that are added for each weight: [O, I]."""
    magnitude_OI = replace(weight, minimums_OG=None).dequantize().abs_()
    if weight.minimums_OG is None:
        return magnitude_OI
    one = torch.zeros_like(weight.values_OI)
    return magnitude_OI + replace(weight, values_OI=one, minimums_OG=weight.minimums_OG.abs()).dequantize()


def exact_rows(inputs: int, rows: int, seed: int = 0) -> Tensor:
    """Rows that rounding to 8 bits does not change, up to the last bits of their scales."""
    random = torch.Generator().manual_seed(seed)
    integers_TI = torch.randint(-127, 128, (rows, inputs), generator=random).float()
    integers_TI[:, ::32] = 127
    scales_TG = torch.rand(rows, -(-inputs // 32), generator=random) + 0.1
    return integers_TI * scales_TG.repeat_interleave(32, dim=1)[:, :inputs]


@any_products
@settings(deadline=None, max_examples=60)
@given(data=st.data())
@pytest.mark.one_case_quick
def test_products_equal_float64(products: QuantizedProducts, data: st.DataObject) -> None:
    bits = data.draw(st.sampled_from([8, 4]), label="bits")
    rows = data.draw(st.integers(0, 30) | st.sampled_from([97, 300]), label="rows")
    inputs = data.draw(st.integers(1, 140) | st.sampled_from([512, 1000, 2080]), label="inputs")
    outputs = data.draw(st.integers(1, 80), label="outputs")
    group_sizes = [32, 64, 128, inputs] if bits == 4 else [16, 32, 64, 128, inputs]
    group_size = data.draw(st.sampled_from(group_sizes), label="group_size")
    seed = data.draw(st.integers(0, 99), label="seed")
    has_minimums = data.draw(st.booleans(), label="has_minimums")
    scale_bytes = data.draw(st.sampled_from([2, 4]), label="scale_bytes")
    weight = random_weight(bits, outputs, inputs, group_size, seed, has_minimums=has_minimums, scale_bytes=scale_bytes)
    x_TI = exact_rows(inputs, rows, seed)
    if data.draw(st.booleans(), label="rows lie apart"):
        x_TI = torch.cat((x_TI, torch.full((rows, 5), torch.nan)), dim=1)[:, :inputs]
    bias_O = torch.randn(outputs) if data.draw(st.booleans(), label="bias") else None
    actual = products.linear(x_TI, products.pack(weight), weight.shape, bias_O)
    exact = x_TI.double() @ weight.dequantize().double().T + (0 if bias_O is None else bias_O.double())
    size = (x_TI.double().abs() @ magnitudes(weight).double().T).clamp_(min=1)
    assert actual.shape == (rows, outputs)
    assert ((actual - exact).abs() / size).max() < 1e-6 if rows else True


@any_products
@pytest.mark.parametrize("are_powers", [True, False], ids=["powers of two", "any scales"])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 40), (3, 33, 16), (11, 300, 70), (40, 2080, 17)])
@pytest.mark.each_value_quick
def test_products_of_floats_of_4_bits_equal_float64(
    products: QuantizedProducts, rows: int, inputs: int, outputs: int, are_powers: bool
) -> None:
    weight, x_TI, bias_O = (
        random_e2m1(outputs, inputs, are_powers=are_powers),
        exact_rows(inputs, rows),
        torch.randn(outputs),
    )
    packed = products.pack(weight)
    exact = x_TI.double() @ weight.dequantize().double().T + bias_O.double()
    size = (x_TI.double().abs() @ magnitudes(weight).double().T).clamp_(min=1)
    assert ((products.linear(x_TI, packed, weight.shape, bias_O) - exact).abs() / size).max() < 1e-6
    unpacked = products.unpack(packed, weight.shape)
    assert torch.equal(unpacked.values_OI, weight.values_OI)
    assert torch.equal(unpacked.scales_OG, weight.scales_OG)
    ids_T = torch.tensor([0, outputs - 1, 7])
    assert torch.equal(products.rows(ids_T, packed, weight.shape), weight.dequantize()[ids_T])


@native_products
def test_floats_of_4_bits_take_as_many_bytes_as_in_a_file(products: NativeQuantizedProducts) -> None:
    assert products.pack(random_e2m1(512, 2048)).numel() <= 512 * 2048 // 32 * 17 * 1.01


@native_products
@pytest.mark.parametrize("format", [(8, 64, False), (8, 32, True), (4, 32, True), (4, 32, False)], ids=str)
def test_packed_bytes_do_not_depend_on_threads(
    products: NativeQuantizedProducts, format: tuple[int, int, bool]
) -> None:
    bits, group_size, has_minimums = format
    weight = random_weight(bits, 70, 75, group_size, has_minimums=has_minimums) if has_minimums or bits == 8 else None
    packed, before = [], torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            packed.append(products.pack(weight or random_e2m1(70, 75)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(packed[0], packed[1])
    assert torch.equal(packed[0], packed[2])


@native_products
def test_rounding_of_activations_is_that_of_the_specification(products: NativeQuantizedProducts) -> None:
    x_TI = torch.randn(40, 300) * torch.logspace(-3, 3, 40).unsqueeze(1)
    values_TI, scales_TG = quantize_rows(x_TI)
    shape = QuantizedShape(8, 300, 300, 300)
    identity = QuantizedWeight(shape, torch.eye(300, dtype=torch.int8), torch.ones(300, 1))
    rounded_TI = (
        products.linear(x_TI, products.pack(identity), shape, None) / scales_TG.repeat_interleave(32, dim=1)[:, :300]
    )
    difference_TI = (rounded_TI - values_TI).abs()
    assert difference_TI.max() < 1.01
    # Processors without fused multiply-add round a few ties the other way.
    assert (difference_TI > 0.01).sum() <= (3 if products.name == "generic" else 0)


@native_products
@pytest.mark.parametrize(
    ("bits", "outputs", "inputs", "group_size"),
    [
        (8, 16, 8, 8),
        (8, 50, 33, 32),
        (8, 100, 2100, 2100),
        (8, 70, 2100, 32),
        (8, 70, 300, 16),
        (4, 16, 64, 32),
        (4, 50, 200, 128),
        (4, 33, 2500, 64),
        (None, 50, 200, 32),
    ],
)
@pytest.mark.one_case_quick
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(
    products: NativeQuantizedProducts, bits: int | None, outputs: int, inputs: int, group_size: int
) -> None:
    weight = random_weight(bits, outputs, inputs, group_size) if bits else random_e2m1(outputs, inputs)
    packed, bias_O, x_TI = products.pack(weight), torch.randn(outputs), torch.randn(150, inputs)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = products.linear(x_TI, packed, weight.shape, bias_O)
        for num_threads in (1, 2, 3, 7):
            torch.set_num_threads(num_threads)
            for first, rows in PARTS:
                alone = products.linear(x_TI[first : first + rows], packed, weight.shape, bias_O)
                assert torch.equal(alone, together[first : first + rows]), (num_threads, first, rows)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(EMULATED_TILES is None, reason="a processor without AVX2, or kernels that were not built")
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_products_by_tiles_have_the_bits_of_products_by_vectors(data: st.DataObject) -> None:
    bits, has_minimums = data.draw(st.sampled_from([(8, False), (8, True), (4, True), (4, False)]), label="bits")
    rows = data.draw(st.integers(1, 50) | st.sampled_from([97, 300]), label="rows")
    inputs = data.draw(st.integers(1, 140) | st.sampled_from([512, 1000, 2080]), label="inputs")
    outputs = data.draw(st.integers(1, 80), label="outputs")
    group_size = data.draw(st.sampled_from([32, 64, 128, inputs] if bits == 4 else [16, 32, 64, inputs]))
    scale_bytes, seed = data.draw(st.sampled_from([2, 4])), data.draw(st.integers(0, 99))
    if bits == 4 and not has_minimums:
        weight = random_e2m1(outputs, inputs, are_powers=scale_bytes == 2)
    else:
        weight = random_weight(
            bits, outputs, inputs, group_size, seed, has_minimums=has_minimums, scale_bytes=scale_bytes
        )
    torch.manual_seed(seed)
    x_TI, bias_O = torch.randn(rows, inputs) * 10 ** torch.randn(rows, 1), torch.randn(outputs)
    assert EMULATED_TILES is not None
    by_vectors = next(products for products in NATIVE_PRODUCTS if products.name == "avx2")
    packed = by_vectors.pack(weight)
    for bias in (None, bias_O):
        expected = by_vectors.linear(x_TI, packed, weight.shape, bias)
        assert torch.equal(EMULATED_TILES.linear(x_TI, packed, weight.shape, bias), expected)


@any_products
@pytest.mark.parametrize("format", [(8, 64, False), (4, 64, True), (8, 16, False), (8, 32, True)], ids=str)
@pytest.mark.parametrize("scale_bytes", [2, 4])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (16, 32), (17, 40), (70, 513)])
@pytest.mark.each_value_quick
def test_unpacking_gives_every_bit_back(
    products: QuantizedProducts, format: tuple[int, int, bool], scale_bytes: int, outputs: int, inputs: int
) -> None:
    bits, group_size, has_minimums = format
    weight = random_weight(bits, outputs, inputs, group_size, has_minimums=has_minimums, scale_bytes=scale_bytes)
    unpacked = products.unpack(products.pack(weight), weight.shape)
    assert unpacked.shape == weight.shape
    assert torch.equal(unpacked.values_OI, weight.values_OI)
    assert torch.equal(unpacked.scales_OG, weight.scales_OG)
    assert (unpacked.minimums_OG is None) != weight.shape.has_minimums
    if weight.minimums_OG is not None and unpacked.minimums_OG is not None:
        assert torch.equal(unpacked.minimums_OG, weight.minimums_OG)


@any_products
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("inputs", [1, 64, 300])
def test_rows_are_those_of_the_weight(products: QuantizedProducts, bits: int, inputs: int) -> None:
    weight = random_weight(bits, 50, inputs, 128 if bits == 4 else 16)
    ids_T = torch.tensor([0, 49, 7, 7, 16, 31])
    packed, expected = products.pack(weight), weight.dequantize()[ids_T]
    assert torch.equal(products.rows(ids_T, packed, weight.shape), expected)
    rest = random_weight(bits, 50, inputs, weight.shape.group_size, seed=1)
    rows = products.rows(ids_T, packed, weight.shape, products.pack(rest))
    assert torch.equal(rows, expected + rest.dequantize()[ids_T])


@any_products
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(products: QuantizedProducts, bits: int, bad: float) -> None:
    weight, x_TI = random_weight(bits, 40, 70, 32), torch.randn(9, 70)
    x_TI[4, 7] = bad
    product = products.linear(x_TI, products.pack(weight), weight.shape, None)
    assert product[4].isnan().all()
    assert product[[row for row in range(9) if row != 4]].isfinite().all()


@any_products
@pytest.mark.parametrize("bits", [8, 4])
def test_rows_of_nothing_and_of_almost_nothing_give_the_bias(products: QuantizedProducts, bits: int) -> None:
    weight, bias_O = random_weight(bits, 40, 70, 32), torch.randn(40)
    x_TI = torch.zeros(3, 70)
    x_TI[1] = 1e-40
    product = products.linear(x_TI, products.pack(weight), weight.shape, bias_O)
    assert torch.equal(product, bias_O.expand(3, 40))


@any_products
def test_the_largest_sums_do_not_overflow(products: QuantizedProducts) -> None:
    for bits, value, zero in [(8, 127, None), (8, -127, None), (4, 15, 0), (4, 0, 16), (4, 12, None), (4, -12, None)]:
        shape = QuantizedShape(bits, 20, 4096, 4096 if bits == 8 else 128, zero is not None)
        weight = QuantizedWeight(
            shape,
            torch.full((20, 4096), value, dtype=torch.int8),
            torch.ones(20, shape.num_groups),
            None if zero is None else torch.full((20, shape.num_groups), -float(zero)),
        )
        x_TI = torch.ones(7, 4096)
        x_TI[3:] = -1
        exact = x_TI.double() @ weight.dequantize().double().T
        actual = products.linear(x_TI, products.pack(weight), shape, None)
        torch.testing.assert_close(actual.double(), exact, rtol=1e-6, atol=0)


@any_products
@pytest.mark.parametrize(
    "pair", [(1, 127), (127, 1), (64, 64), (-128, 0), (-64, -64), (-1, -127), (127, -127), (127, 2)]
)
@pytest.mark.parametrize("inputs", [6, 4096])
@pytest.mark.each_value_quick
def test_neighbours_at_the_limit_of_16_bits_do_not_overflow(
    products: QuantizedProducts, pair: tuple[int, int], inputs: int
) -> None:
    values_OI = torch.tensor(pair, dtype=torch.int8).repeat(20, inputs // 2)
    weight = QuantizedWeight(QuantizedShape(8, 20, inputs, inputs), values_OI, torch.ones(20, 1))
    packed = products.pack(weight)
    for first in (1, -1):
        for second in (1, -1):
            x_TI = torch.tensor([first, second]).repeat(7, inputs // 2).float()
            exact = x_TI.double() @ weight.dequantize().double().T
            actual = products.linear(x_TI, packed, weight.shape, None)
            torch.testing.assert_close(actual.double(), exact, rtol=1e-6, atol=0)


@any_products
@pytest.mark.parametrize("bits", [8, 4])
def test_a_massive_activation_leaves_the_other_groups_of_its_row_as_they_are(
    products: QuantizedProducts, bits: int
) -> None:
    weight, x_TI = random_weight(bits, 40, 96, 32), torch.randn(3, 96)
    packed = products.pack(weight)
    x_TI[:, 40] = 0
    massive_TI = torch.zeros(3, 96)
    massive_TI[:, 40] = 5000
    alone_TI = x_TI.clone()
    alone_TI[:, 32:64] = 0
    both_TO = products.linear(alone_TI + massive_TI, packed, weight.shape, None)
    apart_TO = products.linear(alone_TI, packed, weight.shape, None) + massive_TI @ weight.dequantize().T
    torch.testing.assert_close(both_TO, apart_TO, rtol=1e-5, atol=1e-2)


@any_products
def test_more_dimensions_than_two_are_kept(products: QuantizedProducts) -> None:
    weight, x = random_weight(8, 20, 30, 30), torch.randn(2, 3, 30)
    packed = products.pack(weight)
    flat = products.linear(x.view(6, 30), packed, weight.shape, None)
    assert torch.equal(products.linear(x, packed, weight.shape, None), flat.view(2, 3, 20))


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (random_weight(8, 20, 64, 32, has_minimums=True), "8 bits whose groups have minimums"),
        (
            replace(random_weight(4, 20, 64, 32), minimums_OG=torch.rand(20, 2)),
            "minimums instead of integer zero points",
        ),
    ],
    ids=["int8 with minimums", "minimums"],
)
def test_formats_that_the_kernels_of_a_gpu_do_not_have_are_refused_by_name(
    weight: QuantizedWeight, message: str
) -> None:
    with pytest.raises(UnsupportedFeature, match=message):
        GpuQuantizedProducts().pack(weight)
