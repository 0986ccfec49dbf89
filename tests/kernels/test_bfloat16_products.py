"""Products in bfloat16 arithmetic, bit for bit, against additions one at a time in torch.

AVX512-BF16 and AMX are tested where the processor has them; the other instruction sets compute the same bits without.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.native import Bfloat16Layout, NativeKernels, available_instruction_sets
from support.bfloat16_sums import SMALLEST_NORMAL, sum_in_order
from support.instruction_sets import needs_native_kernels

pytestmark = needs_native_kernels


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.view(torch.int32), expected.view(torch.int32))


@settings(deadline=None, max_examples=25)
@given(data=st.data())
@pytest.mark.each_value_quick
def test_products_have_the_bits_of_the_reference(
    kernels: NativeKernels, layout: Bfloat16Layout, data: st.DataObject
) -> None:
    rows = data.draw(st.integers(1, 40) | st.just(130), label="rows")
    inputs = 2 * data.draw(st.integers(1, 40) | st.just(260), label="pairs")
    outputs = data.draw(st.integers(1, 140), label="outputs")
    torch.manual_seed(data.draw(st.integers(0, 99)))
    x_TI = torch.randn(rows, 2 * inputs)[:, :inputs] if data.draw(st.booleans()) else torch.randn(rows, inputs)
    weight_OI, bias_O = torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs)
    packed = kernels.pack_weight(weight_OI, bfloat16=layout)
    expected_TO = sum_in_order(x_TI, weight_OI, layout)
    assert same_bits(kernels.linear(x_TI, packed, outputs, None), expected_TO)
    assert same_bits(kernels.linear(x_TI, packed, outputs, bias_O), expected_TO + bias_O)
    tokens_T, failed_T, largest_T = kernels.greedy(x_TI, packed, outputs, with_largest=True)
    assert torch.equal(tokens_T, expected_TO.argmax(1))
    assert not failed_T.any()
    assert largest_T is not None
    assert same_bits(largest_T, expected_TO.amax(1))


@pytest.mark.parametrize(("outputs", "inputs"), [(50, 34), (96, 512), (33, 1536)])
@pytest.mark.each_value_quick
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(
    kernels: NativeKernels, layout: Bfloat16Layout, num_threads: int, outputs: int, inputs: int
) -> None:
    packed = kernels.pack_weight(torch.randn(outputs, inputs).bfloat16(), bfloat16=layout)
    x_TI = torch.randn(61, inputs)
    alone = [kernels.linear(row, packed, outputs, None) for row in x_TI.split(1)]
    for count in (2, 3, 5, 8, 12, 13, 25, 61):
        assert same_bits(kernels.linear(x_TI[:count], packed, outputs, None), torch.cat(alone[:count]))


@pytest.mark.slow
def test_rows_of_several_chunks_have_the_bits_of_rows_alone(
    kernels: NativeKernels, layout: Bfloat16Layout, num_threads: int
) -> None:
    packed = kernels.pack_weight(torch.randn(70, 3200).bfloat16(), bfloat16=layout)
    x_TI = torch.randn(530, 3200)
    together = kernels.linear(x_TI, packed, 70, None)
    for first in (0, 170, 300, 529):
        assert same_bits(kernels.linear(x_TI[first : first + 1], packed, 70, None), together[first : first + 1])
    tokens_T, _, largest_T = kernels.greedy(x_TI, packed, 70, with_largest=True)
    assert largest_T is not None
    assert torch.equal(tokens_T, together.argmax(1))
    assert same_bits(largest_T, together.amax(1))


def test_denormal_numbers_count_as_zero(kernels: NativeKernels, layout: Bfloat16Layout) -> None:
    tiny = SMALLEST_NORMAL / 4
    are_pairs = layout is Bfloat16Layout.PAIRS
    cases = [  # x, weight, product
        ([tiny, 1.0], [1.0, 1.0], 1.0),
        ([1.0, 0.0], [tiny, 1.0], 0.0),
        # Rounding alone would make it a normal number.
        ([SMALLEST_NORMAL * (1 - 2.0**-23), 0.0], [1.0, 1.0], 0.0),
        ([2.0**-70, 0.0], [2.0**-60, 0.0], 0.0),  # the sum would be denormal
        # The denormal sum is flushed before the next product is added: of a pair the first one, or the next pair's.
        ([2.0**-63 * 1.5, 2.0**-70], [2.0**-63, 2.0**-60], 2.0**-126 * 1.5),
        ([2.0**-70, 0.0, 2.0**-63 * 1.5, 0.0], [2.0**-60, 0.0, 2.0**-63, 0.0], 2.0**-126 * 1.5),
        # Even and odd inputs of a tile are sums of their own: their denormal difference is flushed with them.
        ([2.0**-63 * 1.5, 2.0**-63], [2.0**-63, -(2.0**-63)], 0.0),
        (
            [2.0**-63, 2.0**-63, 2.0**-62, 0.0],
            [2.0**-63, -(2.0**-63) * 1.5, 2.0**-63, 0.0],
            2.0**-125 if are_pairs else 1.5 * 2.0**-126,
        ),
    ]
    for x, weight, product in cases:
        packed = kernels.pack_weight(torch.tensor([weight]).bfloat16(), bfloat16=layout)
        assert kernels.linear(torch.tensor([x]), packed, 1, None).item() == product, (x, weight)


def test_rows_are_rounded_to_the_nearest_bfloat16_and_ties_to_even(
    kernels: NativeKernels, layout: Bfloat16Layout
) -> None:
    x_I = torch.cat([torch.randn(4000), 1 + torch.arange(64) / 256, torch.tensor([3.4e38, -3.4e38])])
    identity = torch.eye(2).bfloat16()
    packed = kernels.pack_weight(identity, bfloat16=layout)
    found = kernels.linear(x_I.view(-1, 2), packed, 2, None).view(-1)
    assert torch.equal(found.isfinite(), x_I.bfloat16().isfinite())
    assert torch.equal(found[:-2], x_I[:-2].bfloat16().float())


def test_what_is_not_a_number_stays_in_its_row(kernels: NativeKernels, layout: Bfloat16Layout) -> None:
    x_TI = torch.randn(14, 64)
    packed = kernels.pack_weight(torch.randn(40, 64).bfloat16(), bfloat16=layout)
    before_TO = kernels.linear(x_TI, packed, 40, None)
    x_TI[3, 63], x_TI[7, 0] = float("nan"), float("inf")
    after_TO = kernels.linear(x_TI, packed, 40, None)
    assert after_TO[3].isnan().all()
    assert not after_TO[7].isfinite().any()
    rest = [row for row in range(14) if row not in (3, 7)]
    assert torch.equal(after_TO[rest], before_TO[rest])


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (33, 30), (64, 128)])
def test_unpacking_gives_every_bit_back_and_rows_are_read_exactly(
    kernels: NativeKernels, layout: Bfloat16Layout, outputs: int, inputs: int
) -> None:
    weight_OI = torch.randint(-(2**15), 2**15, (outputs, inputs), dtype=torch.int16).view(torch.bfloat16)
    packed = kernels.pack_weight(weight_OI, bfloat16=layout)
    assert torch.equal(kernels.unpack_weight(packed, outputs).view(torch.int16), weight_OI.view(torch.int16))
    ids_T = torch.tensor([outputs - 1, 0, outputs // 2, 0, outputs - 1])
    assert torch.equal(kernels.rows(ids_T, packed).nan_to_num(), weight_OI[ids_T].float().nan_to_num())


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (31, 34), (70, 260), (300, 1030)])
def test_packed_pairs_lie_in_panels_whatever_the_number_of_threads(
    kernels: NativeKernels, layout: Bfloat16Layout, num_threads: int, outputs: int, inputs: int
) -> None:
    weight_OI = torch.randn(outputs, inputs).bfloat16()
    packed = kernels.pack_weight(weight_OI, bfloat16=layout)
    pairs_OP = weight_OI.view(torch.int32)
    if layout is Bfloat16Layout.TILES:  # tiles of 16 pairs by 16 outputs, two of them side by side
        padded = F.pad(pairs_OP, (0, -pairs_OP.shape[1] % 16, 0, -outputs % 32))
        expected = padded.unflatten(1, (-1, 16)).unflatten(0, (-1, 2, 16)).permute(0, 3, 1, 4, 2)
    else:
        width = kernels.instruction_set.panel_width
        expected = F.pad(pairs_OP, (0, 0, 0, -outputs % width)).unflatten(0, (-1, width)).transpose(1, 2)
    size = packed.shape[0] * packed.stride(0)
    assert torch.equal(packed.view(torch.int32).as_strided((size,), (1,)), expected.flatten())


@pytest.mark.each_value_quick
def test_rows_and_outputs_of_every_edge_have_the_bits_of_the_reference(
    kernels: NativeKernels, layout: Bfloat16Layout
) -> None:
    weight_OI = torch.randn(97, 1070).bfloat16()  # more inputs than a thread multiplies at once
    x_TI = torch.randn(67, 1070)
    expected_TO = sum_in_order(x_TI, weight_OI, layout)
    for outputs in (1, 15, 16, 17, 31, 32, 33, 96, 97):
        packed = kernels.pack_weight(weight_OI[:outputs], bfloat16=layout)
        for rows in (1, 15, 16, 17, 31, 33, 48, 49, 67):
            assert same_bits(kernels.linear(x_TI[:rows], packed, outputs, None), expected_TO[:rows, :outputs])


def test_the_check_of_tiles_finds_equal_and_different_products(kernels: NativeKernels) -> None:
    alike = kernels.module.multiply_tiles_alike
    generic = available_instruction_sets()[-1].index
    assert alike(kernels.instruction_set.index, 1, generic, 1)
    assert not alike(kernels.instruction_set.index, 1, generic, 2)


def test_a_packed_weight_takes_the_bytes_of_the_checkpoint(kernels: NativeKernels, layout: Bfloat16Layout) -> None:
    weight_OI = torch.randn(1000, 512).bfloat16()
    assert kernels.pack_weight(weight_OI, bfloat16=layout).nbytes <= 1.05 * weight_OI.nbytes
