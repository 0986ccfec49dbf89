"""Tracing: supported operations on traced tensors, and that programs run what was traced."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.activation import silu_and_mul
from penstock.kernels.embedding import embedding
from penstock.kernels.linear import linear, pack_weight, packed_linear
from penstock.kernels.native import NATIVE, NativeKernels
from penstock.kernels.native.program import NativeProgram
from penstock.kernels.native.program_step import StepTokens
from penstock.kernels.native.tracing import Trace, TracedRequests, TracedTensor, Untraceable
from penstock.kernels.norm import add_rms_norm, rms_norm, rms_norm_rounded_last
from penstock.kernels.rows import concatenate_rows, sum_rows

pytestmark = pytest.mark.skipif(NATIVE is None, reason="the C++ kernels were not built")

WIDTH, NUM_IDS = 24, 50


def native() -> NativeKernels:
    assert NATIVE is not None
    return NATIVE


@pytest.fixture
def trace() -> Trace:
    return native().trace()


@pytest.fixture
def rows(trace: Trace) -> TracedTensor:
    return looked_up(trace)


def ids_of(trace: Trace) -> TracedTensor:
    return trace.input(f"token_ids {len(trace.inputs)}", torch.int32)


def tokens(num_rows: int, *inputs: Tensor) -> StepTokens:
    """A step with these inputs, of a trace that has them by their numbers."""
    names = "token_ids 0", "given"
    return StepTokens(dict(zip(names, inputs, strict=False)), num_rows, num_rows)


def looked_up(trace: Trace) -> TracedTensor:
    found = embedding(ids_of(trace), torch.randn(NUM_IDS, WIDTH), torch.float32)
    assert isinstance(found, TracedTensor)
    return found


# What a model may do that no kernel of the library does, or that needs values, or a number of rows.
NO_KERNELS: list[Callable[[Tensor], Any]] = [
    lambda x: x + x,
    lambda x: torch.randn(3, WIDTH) + x,
    lambda x: torch.randn(3, WIDTH).mul_(x),
    lambda x: x.mul_(x),
    lambda x: x.mul_(2),
    lambda x: x * 0.5,
    lambda x: x.add_(torch.ones(WIDTH)),
    lambda x: x[0],
    lambda x: x.shape,
    lambda x: len(x),
    lambda x: bool(x),
    lambda x: x.tolist(),
    lambda x: x.numpy(),
    lambda x: x.data_ptr(),
    lambda x: x.view(-1, 4),
    lambda x: x.to(torch.bfloat16),
    lambda x: x.to(torch.float32, copy=True),
    lambda x: x.index_select(0, torch.tensor([0])),
    lambda x: torch.cat([x, torch.ones(3, WIDTH)]),
    lambda x: F.layer_norm(x, (WIDTH,)),
    lambda x: F.linear(x, torch.ones(3, WIDTH)),
    lambda x: linear(x, torch.ones(3, WIDTH)),
    lambda x: packed_linear(x, pack_weight(torch.ones(3, WIDTH))),
    lambda x: F.gelu(x),
    lambda x: rms_norm(x, torch.ones(WIDTH, dtype=torch.bfloat16), 1e-5),
    lambda x: native().rms_norm(x, torch.ones(WIDTH), 1e-5, torch.ones(3, WIDTH)),
    lambda x: native().rms_norm(torch.ones(3, WIDTH), torch.ones(WIDTH), 1e-5, x),
    lambda x: native().linear(x, x, 3, None),
]


@pytest.mark.parametrize("index", range(len(NO_KERNELS)))
def test_what_no_kernel_does_cannot_be_traced(rows: TracedTensor, index: int) -> None:
    with pytest.raises(Untraceable):
        NO_KERNELS[index](rows)


def test_tokens_are_looked_up_and_positions_are_not(trace: Trace) -> None:
    with pytest.raises(Untraceable):
        native().lookup(trace.input("positions", torch.int64), torch.randn(NUM_IDS, WIDTH))
    with pytest.raises(Untraceable):
        embedding(ids_of(trace), torch.randn(NUM_IDS, WIDTH), torch.bfloat16)


def test_rows_of_two_traces_do_not_mix(trace: Trace, rows: TracedTensor) -> None:
    other = looked_up(native().trace())
    with pytest.raises(Untraceable):
        add_rms_norm(rows, other, torch.ones(WIDTH), 1e-5)


def test_kernels_of_another_instruction_set_are_not_part_of_it() -> None:
    rows_TD = looked_up(trace := native().trace())
    trace.instruction_set += 1
    with pytest.raises(Untraceable, match="other kernels"):
        silu_and_mul(rows_TD)


def attend(rows: TracedTensor, *, is_last: bool) -> TracedTensor:
    positions_T = rows.origin.input(f"positions {len(rows.origin.inputs)}", torch.int64)
    arguments = [0] * (len(native().types["attention"].fields) - 2)
    return rows.origin.attend(rows, WIDTH, TracedRequests(0, is_last), positions_T, torch.zeros(1), arguments)


def test_attention_overwrites_what_it_reads(rows: TracedTensor) -> None:
    attend(rows, is_last=False)
    with pytest.raises(Untraceable):
        silu_and_mul(rows)


def test_after_the_last_attention_there_are_rows_of_last_tokens_alone(trace: Trace, rows: TracedTensor) -> None:
    residual_TD = looked_up(trace)
    mixed_TD = attend(rows, is_last=True)
    with pytest.raises(Untraceable):
        add_rms_norm(mixed_TD, residual_TD, torch.ones(WIDTH), 1e-5)
    last_RD = residual_TD.index_select(0, trace.last_rows())
    normed_RD, _ = add_rms_norm(mixed_TD, last_RD, torch.ones(WIDTH), 1e-5)
    with pytest.raises(Untraceable):
        residual_TD.index_select(0, trace.last_rows())
    with pytest.raises(Untraceable):
        attend(last_RD, is_last=True)
    with pytest.raises(Untraceable):
        looked_up(trace)
    assert isinstance(normed_RD, TracedTensor)
    assert trace.result(normed_RD) is normed_RD.cell


def test_a_result_is_hidden_states_of_last_tokens(trace: Trace, rows: TracedTensor) -> None:
    for result in (rows, torch.ones(3, WIDTH), None):
        with pytest.raises(Untraceable):
            trace.result(result)


def test_tokens_are_chosen_once(trace: Trace, rows: TracedTensor) -> None:
    native().argmax(rows)
    with pytest.raises(Untraceable, match="twice"):
        native().argmax(rows)


def mixture(ids_T: Tensor, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A little of everything, with sums in place. Returns the last norm and what it is of."""
    x_TD = embedding(ids_T, weights["table"], torch.float32)
    normed_TD, residual_TD = rms_norm(x_TD, weights["norm"], 1e-5), x_TD
    for _ in range(3):
        up_TI = native().linear(normed_TD, weights["up"], 2 * WIDTH, weights["bias"])
        hidden_TD = silu_and_mul(up_TI).mul_(0.37)
        normed_TD, residual_TD = add_rms_norm(hidden_TD, residual_TD, weights["norm"], 1e-5)
        normed_TD = rms_norm_rounded_last(normed_TD, weights["norm"], 1e-5, 1.0)
    return normed_TD, residual_TD


@pytest.mark.parametrize("result", [0, 1])
@pytest.mark.parametrize("num_rows", [1, 7, 600])
def test_a_program_gives_the_bits_of_its_kernels(trace: Trace, num_rows: int, result: int) -> None:
    torch.manual_seed(3)
    weights = {
        "table": torch.randn(NUM_IDS, WIDTH),
        "norm": torch.randn(WIDTH),
        "up": native().pack_weight(torch.randn(2 * WIDTH, WIDTH)),
        "bias": torch.randn(2 * WIDTH),
    }
    traced = mixture(ids_of(trace), weights)[result]
    assert isinstance(traced, TracedTensor)
    program = NativeProgram(native(), trace, traced.cell)
    ids_T = torch.randint(NUM_IDS, (num_rows,), dtype=torch.int32)
    (found,) = program.run(tokens(num_rows, ids_T))
    assert torch.equal(found, mixture(ids_T, weights)[result])


def joined(ids_T: Tensor, given_TD: Tensor, weights: dict[str, Tensor]) -> list[Tensor]:
    """A model with given input rows and a residual stream."""
    x_TD = embedding(ids_T, weights["table"], torch.float32)
    both_TX = concatenate_rows(x_TD, rms_norm(given_TD, weights["norm"], 1e-5))
    hidden_TD = native().linear(both_TX, weights["down"], WIDTH, None)
    sums = [sum_rows(hidden_TD, given_TD), sum_rows(x_TD, None)]
    normed_TD, residual_TD = add_rms_norm(hidden_TD, x_TD, weights["norm"], 1e-5)
    return [normed_TD, *sums, sum_rows(normed_TD, residual_TD)]


@pytest.mark.parametrize("num_rows", [1, 7, 600])
def test_a_program_takes_rows_and_gives_several(trace: Trace, num_rows: int) -> None:
    torch.manual_seed(3)
    weights = {
        "table": torch.randn(NUM_IDS, WIDTH),
        "norm": torch.randn(WIDTH),
        "down": native().pack_weight(torch.randn(WIDTH, 2 * WIDTH)),
    }
    traced = joined(ids_of(trace), trace.input("given", torch.float32, WIDTH), weights)
    cells = [tensor.cell for tensor in traced if isinstance(tensor, TracedTensor) and tensor.cell is not None]
    assert len(cells) == 4
    program = NativeProgram(native(), trace, cells[0], cells[1:])
    ids_T, given_TD = torch.randint(NUM_IDS, (num_rows,), dtype=torch.int32), torch.randn(num_rows, WIDTH)
    found = program.run(tokens(num_rows, ids_T, given_TD.clone()))
    for one, other in zip(found, joined(ids_T, given_TD, weights), strict=True):
        assert torch.equal(one, other)


def test_a_program_alone_holds_the_weights() -> None:
    """Nor is there anything left that only a collection of garbage would let go of."""
    table_VD = torch.randn(NUM_IDS, WIDTH)
    is_there = weakref.ref(table_VD)
    trace = native().trace()
    traced = embedding(ids_of(trace), table_VD, torch.float32)
    assert isinstance(traced, TracedTensor)
    program = NativeProgram(native(), trace, traced.cell)
    gc.disable()
    try:
        del table_VD, trace, traced
        assert is_there() is not None
        del program
        assert is_there() is None
    finally:
        gc.enable()


def step_with_last(inputs: dict[str, Tensor], num_rows: int, last: list[int]) -> StepTokens:
    """A step that asks for these rows alone."""
    rows_R, count = torch.tensor(last), len(last)
    numbers = torch.arange(count + 1, dtype=torch.int32)
    return StepTokens(inputs, num_rows, num_rows, (), (rows_R, torch.zeros(count, dtype=torch.int64), numbers, numbers))


def doubled_and_rolled(_: object, x_TD: Tensor) -> list[Tensor]:
    return [2 * x_TD, x_TD[:, :3].roll(1, 0)]


def call_opaque(function: Callable[..., list[Tensor]], rows: Tensor, widths: list[int]) -> list[Tensor]:
    """Call an opaque operation; a traced one is recorded."""
    return rows.origin.call_opaque(function, [rows], widths) if isinstance(rows, TracedTensor) else function(None, rows)


def adapted(ids_T: Tensor, adapters_T: Tensor, weights: dict[str, Tensor], last: Tensor | None = None) -> list[Tensor]:
    """Rows of two inputs, an opaque operation, then last rows alone."""
    x_TD = sum_rows(
        embedding(ids_T, weights["table"], torch.float32), embedding(adapters_T, weights["adapters"], torch.float32)
    )
    x_TD, side_T3 = call_opaque(doubled_and_rolled, x_TD, [WIDTH, 3])
    if last is not None:
        x_TD, side_T3, adapters_T = (rows.index_select(0, last) for rows in (x_TD, side_T3, adapters_T))
    normed_RD, _ = add_rms_norm(x_TD, embedding(adapters_T, weights["adapters"], torch.float32), weights["norm"], 1e-5)
    both_RX = concatenate_rows(normed_RD, side_T3)
    return [concatenate_rows(*call_opaque(doubled_and_rolled, both_RX, [WIDTH + 3, 3]))]


@pytest.mark.parametrize("last", [None, [0], [2, 5, 298, 299], list(range(300))])
def test_a_program_reads_inputs_by_name_and_stops_for_opaque_operations(trace: Trace, last: list[int] | None) -> None:
    torch.manual_seed(4)
    weights = {
        "table": torch.randn(NUM_IDS, WIDTH),
        "adapters": torch.randn(3, WIDTH),
        "norm": torch.randn(WIDTH),
    }
    inputs = {
        "token_ids": torch.randint(NUM_IDS, (300,), dtype=torch.int32),
        "adapters": torch.randint(3, (300,), dtype=torch.int32),
    }
    stand_ins = [trace.input(name, torch.int32) for name in inputs]
    (traced,) = adapted(stand_ins[0], stand_ins[1], weights, trace.last_rows())
    program = NativeProgram(native(), trace, trace.result(traced))
    assert program.num_segments == 3
    step = StepTokens(inputs, 300, 300) if last is None else step_with_last(inputs, 300, last)
    rows = None if last is None else torch.tensor(last)
    (found,) = program.run(step)
    (expected,) = adapted(inputs["token_ids"], inputs["adapters"], weights, rows)
    assert torch.equal(found, expected)
    weights["adapters"].neg_()
    (found,) = program.run(step)
    assert torch.equal(found, adapted(inputs["token_ids"], inputs["adapters"], weights, rows)[0])


def test_an_input_that_is_looked_up_has_int32(trace: Trace) -> None:
    with pytest.raises(Untraceable, match=r"lookup reads a step input of torch.int64, not of torch.int32"):
        native()._lookup.look_up(trace.input("adapters", torch.int64), WIDTH, torch.zeros(1, WIDTH), 1, WIDTH, 0)


def test_a_weight_that_does_not_lie_on_a_cache_line_is_refused(trace: Trace, rows: TracedTensor) -> None:
    packed = native().pack_weight(torch.randn(16, WIDTH))
    shifted = torch.empty(packed.numel() + 1)[1:].view(packed.shape)
    with pytest.raises(Untraceable, match=r"weight does not lie on 64 bytes"):
        native().linear(rows, shifted, 16, None)
    with pytest.raises(IndexError, match=f"row {NUM_IDS} of a table of {NUM_IDS} rows"):
        native().lookup(torch.tensor([NUM_IDS]), torch.randn(NUM_IDS, WIDTH))
