"""The C++ kernels of every instruction set that runs here, against float64, the torch kernels, and themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.errors import ConfigError
from penstock.kernels.activation import ClampedSwiglu, gelu_tanh_and_mul_reference, silu_and_mul_reference
from penstock.kernels.logits_shaping import allow_by_bits_reference
from penstock.kernels.native import NativeKernels, load_native_kernels
from penstock.kernels.norm import rms_norm_reference
from penstock.kernels.rotary import apply_rotary, gather_rotation_reference, rotary_table
from penstock.kernels.sampling import draw_tokens_reference
from support.instruction_sets import needs_native_kernels

WEIGHT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = needs_native_kernels

GATED_REFERENCES = {"silu": silu_and_mul_reference, "gelu_tanh": gelu_tanh_and_mul_reference}


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.view(torch.int32).tolist() == expected.view(torch.int32).tolist()


def exact(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return F.linear(x_TI.double(), weight_OI.double(), None if bias_O is None else bias_O.double())


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
@pytest.mark.each_value_quick
def test_products_equal_float64(kernels: NativeKernels, dtype: torch.dtype, data: st.DataObject) -> None:
    rows = data.draw(st.integers(0, 40) | st.sampled_from([97, 400]), label="rows")
    inputs = data.draw(st.integers(1, 70) | st.sampled_from([256, 257, 600]), label="inputs")
    outputs = data.draw(st.integers(1, 140), label="outputs")
    torch.manual_seed(data.draw(st.integers(0, 99)))
    x_TI = torch.randn(rows, 2 * inputs)[:, :inputs] if data.draw(st.booleans()) else torch.randn(rows, inputs)
    weight_OI = torch.randn(outputs, inputs).to(dtype)
    bias_O = torch.randn(outputs) if data.draw(st.booleans()) else None
    with threads(data.draw(st.sampled_from([1, 2, 3, 7]))):
        actual = kernels.linear(x_TI, kernels.pack_weight(weight_OI), outputs, bias_O)
    torch.testing.assert_close(actual.double(), exact(x_TI, weight_OI, bias_O), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 8), (50, 33), (96, 512), (33, 700), (250, 1100)])
@pytest.mark.one_case_quick
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(
    kernels: NativeKernels, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    packed, bias_O = kernels.pack_weight(torch.randn(outputs, inputs).to(dtype)), torch.randn(outputs)
    x_TI = torch.randn(150, inputs)
    with threads(1):
        together = kernels.linear(x_TI, packed, outputs, bias_O)
    for num_threads in (1, 2, 3, 7):
        with threads(num_threads):
            for first, rows in [
                (0, 150),
                (7, 1),
                (9, 2),
                (20, 3),
                (31, 4),
                (40, 5),
                (60, 6),
                (70, 7),
                (80, 13),
                (3, 64),
            ]:
                alone = kernels.linear(x_TI[first : first + rows], packed, outputs, bias_O)
                assert torch.equal(alone, together[first : first + rows]), (num_threads, first, rows)


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (16, 5), (17, 40), (100, 64)])
def test_unpacking_gives_every_bit_back(kernels: NativeKernels, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    weight_OI = torch.randn(outputs, inputs).to(dtype)
    assert torch.equal(kernels.unpack_weight(kernels.pack_weight(weight_OI), outputs), weight_OI)


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (31, 17), (70, 130), (300, 515)])
def test_packed_weights_lie_in_panels_whatever_the_number_of_threads(
    kernels: NativeKernels, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    weight_OI = torch.randn(outputs, inputs).to(dtype)
    width = kernels.instruction_set.panel_width
    panels = F.pad(weight_OI, (0, 0, 0, -outputs % width)).view(-1, width, inputs)
    if dtype is torch.bfloat16:  # the two halves of a panel alternate
        panels = panels.unflatten(1, (2, width // 2)).transpose(1, 2).flatten(1, 2)
    expected = panels.transpose(1, 2).reshape(-1, inputs)
    for num_threads in (1, 2, 3):
        with threads(num_threads):
            assert torch.equal(kernels.pack_weight(weight_OI), expected)


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES[1:], ids=str)
def test_every_value_of_a_narrow_dtype_is_widened_exactly(kernels: NativeKernels, dtype: torch.dtype) -> None:
    weight_OI = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).view(512, 128)
    packed = kernels.pack_weight(weight_OI)
    rows = kernels.rows(torch.arange(512), packed)
    torch.testing.assert_close(rows, weight_OI.float(), rtol=0, atol=0, equal_nan=True)
    finite_OI = torch.where(weight_OI.isfinite(), weight_OI, 0.0)
    unit_vectors = torch.eye(128)
    product = kernels.linear(unit_vectors, kernels.pack_weight(finite_OI), 512, None)
    assert torch.equal(product, finite_OI.float().T)


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES[1:], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 11, 40])
@pytest.mark.parametrize(("outputs", "inputs"), [(5, 3), (64, 32), (150, 700)])
@pytest.mark.each_value_quick
def test_narrow_weights_give_the_bits_of_their_float32_values(
    kernels: NativeKernels, dtype: torch.dtype, rows: int, outputs: int, inputs: int
) -> None:
    x_TI, weight_OI, bias_O = torch.randn(rows, inputs), torch.randn(outputs, inputs).to(dtype), torch.randn(outputs)
    narrow = kernels.linear(x_TI, kernels.pack_weight(weight_OI), outputs, bias_O)
    wide = kernels.linear(x_TI, kernels.pack_weight(weight_OI.float()), outputs, bias_O)
    assert torch.equal(narrow, wide)


def test_what_is_not_a_number_stays_in_its_row(kernels: NativeKernels) -> None:
    weight_OI, x_TI = torch.randn(40, 30), torch.randn(9, 30)
    x_TI[4, 7] = float("nan")
    product = kernels.linear(x_TI, kernels.pack_weight(weight_OI), 40, None)
    assert product[4].isnan().all()
    assert product[[row for row in range(9) if row != 4]].isfinite().all()


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 700])
@pytest.mark.parametrize("size", [1, 6, 48, 512])
@pytest.mark.each_value_quick
def test_rms_norm(kernels: NativeKernels, num_tokens: int, size: int) -> None:
    x_TD, residual_TD, weight_D = torch.randn(num_tokens, size), torch.randn(num_tokens, size), torch.randn(size)
    torch.testing.assert_close(kernels.rms_norm(x_TD, weight_D, 1e-3), rms_norm_reference(x_TD, weight_D, 1e-3))
    expected = rms_norm_reference(x_TD + residual_TD, weight_D, 1e-3)
    total_TD = x_TD + residual_TD
    torch.testing.assert_close(kernels.rms_norm(x_TD, weight_D, 1e-3, residual_TD), expected)
    assert torch.equal(x_TD, total_TD)


@pytest.mark.parametrize("shared", [True, False])
def test_rms_norm_of_heads_that_lie_in_wider_rows(kernels: NativeKernels, shared: bool) -> None:
    heads_THD = torch.randn(5, 9, 24)[:, 2:6]
    weight = torch.randn(24) if shared else torch.randn(4, 24)
    torch.testing.assert_close(kernels.rms_norm(heads_THD, weight, 1e-5), rms_norm_reference(heads_THD, weight, 1e-5))


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0,), (1,), (5,), (300,), (2, 70)], ids=str)
@pytest.mark.parametrize("size", [1, 8, 24, 129])
def test_rows_of_a_table(kernels: NativeKernels, dtype: torch.dtype, shape: tuple[int, ...], size: int) -> None:
    table_VD = torch.randn(37, size).to(dtype)
    table_VD[3, 0] = float("inf")
    ids = torch.randint(37, shape, dtype=torch.int32)
    for num_threads in (1, 3):
        with threads(num_threads):
            assert torch.equal(kernels.lookup(ids, table_VD), F.embedding(ids, table_VD).float())
            assert torch.equal(kernels.lookup(ids.long(), table_VD), F.embedding(ids, table_VD).float())


@pytest.mark.parametrize("bad", [-1, 37])
def test_rows_that_a_table_does_not_have_are_refused(kernels: NativeKernels, bad: int) -> None:
    with pytest.raises(IndexError, match=f"row {bad} of a table of 37 rows"):
        kernels.lookup(torch.tensor([3, bad]), torch.randn(37, 8))


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 300])
@pytest.mark.parametrize("size", [1, 7, 8, 24, 129])
@pytest.mark.parametrize("activation", GATED_REFERENCES)
@pytest.mark.each_value_quick
def test_gate_and_mul(kernels: NativeKernels, num_tokens: int, size: int, activation: str) -> None:
    gate_up_TI = torch.randn(num_tokens, 2 * size) * 20
    expected = GATED_REFERENCES[activation](gate_up_TI.double()).float()
    torch.testing.assert_close(kernels.gate_and_mul(activation, gate_up_TI), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1, 24, 67])
def test_clamped_swiglu(kernels: NativeKernels, size: int) -> None:
    gate_up_TI = torch.randn(5, 2 * size) * 5
    expected = ClampedSwiglu(1.702, 7.0).reference(gate_up_TI.double()).float()
    torch.testing.assert_close(kernels.clamped_swiglu(gate_up_TI, 1.702, 7.0), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("activation", GATED_REFERENCES)
def test_gate_and_mul_at_the_ends(kernels: NativeKernels, activation: str) -> None:
    gate_T1 = torch.tensor([-1e30, -200.0, -0.0, 200.0, 1e12, float("nan")])[:, None]
    result_T1 = kernels.gate_and_mul(activation, torch.cat((gate_T1, torch.ones_like(gate_T1)), dim=1))
    expected_T1 = torch.tensor([0.0, 0.0, 0.0, 200.0, 1e12, float("nan")])[:, None]
    torch.testing.assert_close(result_T1, expected_T1, equal_nan=True)


@pytest.mark.parametrize(("head_size", "rotated"), [(8, 8), (16, 6), (20, 20), (64, 64), (128, 32)])
@pytest.mark.parametrize("num_tokens", [1, 6, 400])
@pytest.mark.each_value_quick
def test_rotary(kernels: NativeKernels, head_size: int, rotated: int, num_tokens: int) -> None:
    table_PR = rotary_table(torch.rand(rotated // 2), 50, 1.25)
    positions_T = torch.randint(0, 50, (num_tokens,))
    heads_THD = torch.randn(num_tokens, 7, head_size)
    expected = heads_THD.clone()
    apply_rotary(expected[:, 1:5], gather_rotation_reference(table_PR, positions_T, torch.float32))
    kernels.apply_rotary(heads_THD[:, 1:5], table_PR, positions_T)
    torch.testing.assert_close(heads_THD, expected, rtol=1e-6, atol=1e-6)


def test_an_instruction_set_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"PENSTOCK_CPU_KERNELS='mmx'.*auto, torch.*generic"):
        load_native_kernels("mmx")
    assert load_native_kernels("torch") is None


@pytest.mark.parametrize("arithmetic", ["bfloat16", "float32"])
def test_the_arithmetic_of_another_processor_is_taken_by_name(kernels: NativeKernels, arithmetic: str) -> None:
    name = kernels.instruction_set.name
    loaded = load_native_kernels(f"{name}+{arithmetic}")
    assert loaded is not None
    assert loaded.instruction_set.name == name
    assert loaded.prefers_bfloat16 == (arithmetic == "bfloat16")


@pytest.mark.parametrize("requested", ["generic+int8", "generic+", "torch+bfloat16", "mmx+float32"])
def test_another_arithmetic_is_refused(requested: str) -> None:
    with pytest.raises(ConfigError, match=r"all but torch also with \+bfloat16 or \+float32"):
        load_native_kernels(requested)


@pytest.mark.parametrize("num_rows", [0, 1, 9, 40])
@pytest.mark.parametrize("size", [1, 7, 8, 33, 1536])
def test_argmax_is_the_first_of_the_largest(kernels: NativeKernels, num_rows: int, size: int) -> None:
    x_RV = torch.randn(num_rows, size).round()  # rounded, so that many are equal
    index_R, failed_R, largest_R = kernels.argmax(x_RV, with_largest=True)
    assert largest_R is not None
    assert index_R.tolist() == x_RV.numpy().argmax(axis=-1).tolist()
    assert_same_bits(largest_R, x_RV.gather(1, index_R[:, None])[:, 0])
    assert not failed_R.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 5, 16, 18])
def test_argmax_fails_where_the_largest_is_not_finite(kernels: NativeKernels, bad: float, place: int) -> None:
    x_RV = torch.randn(3, 19)
    x_RV[1, place] = bad
    x_RV[2, :] = -float("inf")
    index_R, failed_R, largest_R = kernels.argmax(x_RV, with_largest=True)
    assert largest_R is not None
    assert failed_R.tolist() == [False, True, True]
    assert index_R.tolist() == [x_RV[0].argmax(), place, 0]
    assert_same_bits(largest_R, x_RV.gather(1, index_R[:, None])[:, 0])


def test_a_single_row_of_wider_memory_is_as_wide_as_its_shape_says(kernels: NativeKernels) -> None:
    """Such a row is contiguous, though its stride is that of the memory."""
    wide_1X = torch.arange(1.0, 21.0).unsqueeze(0)
    x_1D = wide_1X[:, :16]
    assert x_1D.is_contiguous()
    assert x_1D.stride(0) == 20
    assert kernels.argmax(x_1D)[0].tolist() == [15]
    alone = x_1D.clone(memory_format=torch.contiguous_format).reshape(16).reshape(1, 16)
    assert torch.equal(kernels.sum_rows(x_1D, x_1D), 2 * alone)
    assert torch.equal(kernels.concatenate_rows(x_1D, x_1D), torch.cat([alone, alone], 1))
    assert_same_bits(kernels.gate_and_mul("silu", x_1D), kernels.gate_and_mul("silu", alone))
    assert_same_bits(kernels.rms_norm(x_1D, torch.ones(16), 1e-5), kernels.rms_norm(alone, torch.ones(16), 1e-5))


@pytest.mark.parametrize("first", [-0.0, 0.0])
@pytest.mark.parametrize("size", [2, 19, 70])
def test_of_two_zeros_the_first_is_told_with_its_sign(kernels: NativeKernels, first: float, size: int) -> None:
    x_RV = torch.full((1, size), -1.0)
    x_RV[0, 0], x_RV[0, -1] = first, -first
    index_R, _, largest_R = kernels.argmax(x_RV, with_largest=True)
    assert largest_R is not None
    assert index_R.tolist() == [0]
    assert_same_bits(largest_R, x_RV[:, 0])


@pytest.mark.parametrize("rows", [12, 13, 31, 300])
@pytest.mark.each_value_quick
def test_rows_a_multiple_of_a_page_apart(kernels: NativeKernels, rows: int) -> None:
    """They are computed elsewhere, to the same bits."""
    weight_OI = torch.randn(37, 1024)
    packed = kernels.pack_weight(weight_OI)
    x_RI = torch.randn(rows, 1024)
    together = kernels.linear(x_RI, packed, 37, None)
    apart = torch.randn(rows, 1031)[:, :1024].copy_(x_RI)
    assert torch.equal(kernels.linear(apart, packed, 37, None), together)
    alone = torch.cat([kernels.linear(row[None], packed, 37, None) for row in x_RI])
    assert torch.equal(alone, together)
    assert torch.equal(kernels.greedy(x_RI, packed, 37)[0], together.argmax(dim=1))


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 3), (15, 8), (64, 5), (250, 1100), (3001, 33)])
@settings(deadline=None, max_examples=12)
@given(data=st.data())
@pytest.mark.one_case_quick
def test_the_greedy_choice_is_that_of_the_products(
    kernels: NativeKernels, dtype: torch.dtype, outputs: int, inputs: int, data: st.DataObject
) -> None:
    rows = data.draw(st.integers(0, 14) | st.sampled_from([33, 130]), label="rows")
    torch.manual_seed(data.draw(st.integers(0, 99)))
    # Of few values, so that many products are equal.
    weight_OI = torch.randint(-1, 2, (outputs, inputs)).to(dtype)
    x_LI = torch.randint(-2, 3, (rows, 2 * inputs)).float()[:, :inputs]
    for _ in range(data.draw(st.integers(0, 3))):
        if rows:
            bad = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
            x_LI[data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, inputs - 1))] = bad
        if data.draw(st.booleans()):
            weight_OI[data.draw(st.integers(0, outputs - 1))] = float("nan")
    packed = kernels.pack_weight(weight_OI)
    with threads(data.draw(st.sampled_from([1, 2, 3, 7]))):
        products_LO = kernels.linear(x_LI, packed, outputs, None)
        expected = kernels.argmax(products_LO)
        chosen = kernels.greedy(x_LI, packed, outputs)
        with_largest = kernels.greedy(x_LI, packed, outputs, with_largest=True)
    largest_L = with_largest[2]
    assert largest_L is not None
    for index_L, failed_L, _ in (chosen, with_largest):
        assert index_L.tolist() == expected[0].tolist()
        assert failed_L.tolist() == expected[1].tolist()
    assert_same_bits(largest_L, products_LO.gather(1, expected[0][:, None])[:, 0])


OUT_OF_MEMORY = """
import resource
from pathlib import Path
import torch
from penstock.kernels.native import load_native_kernels
kernels = load_native_kernels("generic")
long_weight, long_x_TI = kernels.pack_weight(torch.ones(16, 400_000)), torch.ones(40, 400_000)
packed, x_TI = kernels.pack_weight(torch.ones(16, 4)), torch.ones(1_000_000, 4)
torch.set_num_threads(1)
# Room for the results, but not for what is known of a million rows meanwhile.
limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (12 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
print(int(kernels.linear(long_x_TI, long_weight, 16, None).max()))
try:
    kernels.greedy(x_TI, packed, 16)
except MemoryError:
    print("refused")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
@pytest.mark.slow
def test_a_product_needs_no_memory_to_work_in_and_a_choice_without_it_is_refused_rather_than_wrong() -> None:
    done = subprocess.run([sys.executable, "-c", OUT_OF_MEMORY], capture_output=True, text=True, check=True)
    assert done.stdout == "400000\nrefused\n"


FEWER_THREADS = """
import torch
from penstock.kernels.native import load_native_kernels
from penstock.kernels.native.quantized import native_quantized_products
from penstock.layers.quantization.quantize import quantize_int4, quantize_int8
kernels, products = load_native_kernels("auto"), native_quantized_products()
x_TI, weight_OI = torch.randn(200, 300), torch.randn(170, 300)
packed, rounded = kernels.pack_weight(weight_OI), [quantize_int8(weight_OI), quantize_int4(weight_OI, 32)]
made = []
for count in (1, 5):
    torch.set_num_threads(count)
    results = [kernels.linear(x_TI, packed, 170, None), *kernels.greedy(x_TI, packed, 170)[:2]]
    made.append(results + [products.linear(x_TI, products.pack(one), one.shape, None) for one in rounded])
print(all(torch.equal(one, other) for one, other in zip(*made, strict=True)))
"""


@pytest.mark.slow
def test_what_threads_that_the_system_does_not_grant_were_to_do_is_done_by_the_others() -> None:
    environment = {**os.environ, "OMP_THREAD_LIMIT": "2"}
    done = subprocess.run(
        [sys.executable, "-c", FEWER_THREADS], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout == "True\n"


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_draws_are_those_of_the_reference(kernels: NativeKernels, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 9), label="rows")
    size = data.draw(st.integers(1, 40) | st.sampled_from([511, 512, 513, 1030, 5000]), label="size")
    torch.manual_seed(data.draw(st.integers(0, 99)))
    x_RV = torch.randn(rows, size) * data.draw(st.sampled_from([0.1, 3.0, 30.0]), label="spread")
    if data.draw(st.booleans(), label="masked"):
        kept = torch.rand(rows, size) < 0.05
        kept[torch.arange(rows), torch.randint(size, (rows,))] = True
        x_RV.masked_fill_(~kept, -torch.inf)
    seed_S = torch.randint(-(2**62), 2**62, (rows + 3,))
    slots_R, positions_R = torch.randperm(rows + 3)[:rows], torch.randint(0, 10_000, (rows,))
    with threads(data.draw(st.sampled_from([1, 2, 3, 7]), label="threads")):
        drawn_R, failed_R = kernels.draw(x_RV, seed_S, slots_R, positions_R)
    assert not failed_R.any()
    expected = draw_tokens_reference(x_RV, seed_S[slots_R], positions_R)
    assert torch.equal(drawn_R, expected.token_ids_R)


def test_a_row_without_a_distribution_fails_alone(kernels: NativeKernels) -> None:
    bad_rows = [torch.nan, torch.inf, -torch.inf]
    x_RV = torch.zeros(4, 700)
    x_RV[1, 650], x_RV[2, 3], x_RV[3] = bad_rows[0], bad_rows[1], bad_rows[2]
    slots_R = torch.arange(4)
    _, failed_R = kernels.draw(x_RV, slots_R, slots_R, slots_R)
    assert failed_R.tolist() == [False, True, True, True]


def test_draws_follow_the_distribution(kernels: NativeKernels) -> None:
    """Pearson's chi-squared over 20,000 draws of 300 tokens, whose 0.9999 quantile is about 402."""
    num_draws, size = 20_000, 300
    logits_V = torch.randn(size, generator=torch.Generator().manual_seed(5))
    positions_R = torch.arange(num_draws)
    drawn_R, _ = kernels.draw(
        logits_V.expand(num_draws, -1).contiguous(),
        torch.tensor([7]),
        torch.zeros(num_draws, dtype=torch.int64),
        positions_R,
    )
    expected_V = logits_V.double().softmax(-1) * num_draws
    observed_V = drawn_R.bincount(minlength=size)
    assert ((observed_V - expected_V) ** 2 / expected_V).sum() < 402


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_bits_allow_what_the_reference_allows_and_leave_the_rest_untouched(
    kernels: NativeKernels, data: st.DataObject
) -> None:
    num_rows = data.draw(st.integers(1, 40), label="rows")
    size = data.draw(st.integers(1, 200) | st.sampled_from([1536, 4001]), label="size")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x_RV = torch.randn(num_rows, size, generator=generator)
    x_RV[torch.rand(x_RV.shape, generator=generator) < 0.05] = data.draw(
        st.sampled_from([0.0, -0.0, torch.nan, torch.inf, -torch.inf])
    )
    chosen = data.draw(
        st.none() | st.lists(st.integers(0, num_rows - 1), unique=True, min_size=1, max_size=num_rows), label="of"
    )
    num_words = -(-size // 32) + data.draw(st.integers(0, 1), label="words too many")
    rows_N = None if chosen is None else torch.tensor(chosen, dtype=torch.int64)
    shape = (num_rows if chosen is None else len(chosen), num_words)
    words_NW = torch.randint(-(2**31), 2**31, shape, generator=generator).int()
    # Words that forbid nothing or everything go ways of their own.
    kind = torch.randint(0, 3, shape, generator=generator)
    words_NW[kind == 1], words_NW[kind == 2] = 0, -1
    expected = allow_by_bits_reference(x_RV.clone(), rows_N, words_NW)
    with threads(data.draw(st.sampled_from([1, 2, 3, 7]))):
        assert_same_bits(kernels.allow_by_bits(x_RV, rows_N, words_NW), expected)
