"""Programs from tokens to tokens, on every instruction set."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.native import NativeKernels
from penstock.kernels.native.program import BoundChoices, NativeProgram
from penstock.kernels.native.program_step import StepTokens
from penstock.kernels.native.quantized import native_quantized_products
from penstock.kernels.native.tracing import TracedTensor
from penstock.kernels.quantized import QuantizedShape, QuantizedWeight, minimums_of
from support.instruction_sets import needs_native_kernels

pytestmark = needs_native_kernels

VOCAB_SIZE, WIDTH = 45, 40
FORMS = ["table", "bfloat16 table", "packed", "int8", "int4 and its rest"]


def rounded(bits: int, seed: int) -> QuantizedWeight:
    random = torch.Generator().manual_seed(seed)
    shape = QuantizedShape(bits, VOCAB_SIZE, WIDTH, WIDTH if bits == 8 else 32, bits == 4)
    values_VD = torch.randint(0, 16, (VOCAB_SIZE, WIDTH), generator=random, dtype=torch.int8)
    zeros_VG = torch.randint(0, 16, (VOCAB_SIZE, shape.num_groups), generator=random, dtype=torch.uint8)
    scales_VG = torch.rand(VOCAB_SIZE, shape.num_groups, generator=random)
    return QuantizedWeight(shape, values_VD, scales_VG, None if bits == 8 else minimums_of(zeros_VG, scales_VG))


def echo(kernels: NativeKernels, form: str) -> tuple[NativeProgram, Tensor]:
    """A program that looks rows up and multiplies by a matrix, and the logits that this gives for every token."""
    torch.manual_seed(1)
    trace = kernels.trace()
    table_VD = torch.randn(VOCAB_SIZE, WIDTH)
    products = native_quantized_products(kernels)
    assert products is not None
    if form == "table":
        rows_TD = kernels.lookup(trace.input("token_ids", torch.int32), table_VD)
    elif form == "bfloat16 table":
        rows_TD = kernels.lookup(trace.input("token_ids", torch.int32), table_VD.bfloat16())
        table_VD = table_VD.bfloat16().float()
    elif form == "packed":
        rows_TD = kernels.rows(trace.input("token_ids", torch.int32), kernels.pack_weight(table_VD))
    elif form == "int8":
        weight = rounded(8, 2)
        rows_TD = products.rows(trace.input("token_ids", torch.int32), products.pack(weight), weight.shape)
        table_VD = weight.dequantize()
    else:
        weight, rest = rounded(4, 3), rounded(4, 4)
        rows_TD = products.rows(
            trace.input("token_ids", torch.int32), products.pack(weight), weight.shape, products.pack(rest)
        )
        table_VD = weight.dequantize() + rest.dequantize()
    packed_head = kernels.pack_weight(torch.randn(VOCAB_SIZE, WIDTH))
    if form == "packed":
        kernels.argmax(kernels.linear(rows_TD, packed_head, VOCAB_SIZE, None))
    else:
        kernels.greedy(rows_TD, packed_head, VOCAB_SIZE)
    return NativeProgram(kernels, trace, None), kernels.linear(table_VD, packed_head, VOCAB_SIZE, None)


def bind(program: NativeProgram, token_ids: list[int]) -> BoundChoices:
    return program.bind(tokens(torch.tensor(token_ids, dtype=torch.int32)))


def tokens(ids_T: Tensor) -> StepTokens:
    return StepTokens({"token_ids": ids_T}, len(ids_T), len(ids_T))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_rows", [1, 3, 600])
def test_a_bound_program_reads_its_tokens_anew(kernels: NativeKernels, form: str, num_rows: int) -> None:
    program, logits_VV = echo(kernels, form)
    ids_T = torch.zeros(num_rows, dtype=torch.int32)
    bound = program.bind(tokens(ids_T))
    expected_V = logits_VV.argmax(dim=1)
    for seed in range(3):
        ids_T.copy_(torch.randint(VOCAB_SIZE, (num_rows,), generator=torch.Generator().manual_seed(seed)))
        chosen = bound.run()
        assert torch.equal(chosen.token_ids_R, expected_V[ids_T.long()])
        assert not chosen.has_failed_R.any()


def test_the_time_of_operations_is_measured_when_asked_for(kernels: NativeKernels) -> None:
    program, _ = echo(kernels, "table")
    bound = bind(program, [0, 1, 2])
    chosen_R = bound.run().token_ids_R.clone()
    assert program.operation_times() == []
    program.measure()
    assert [nanoseconds for _, nanoseconds in program.operation_times()] == [0, 0]
    for _ in range(20):
        assert torch.equal(bound.run().token_ids_R, chosen_R)
    names = [operation.type.name for operation, nanoseconds in program.operation_times() if nanoseconds > 0]
    assert names == ["lookup", "greedy"]
    program.measure(is_on=False)
    bound.run()
    assert program.operation_times() == []


@pytest.mark.parametrize("form", ["table", "int8"])
@pytest.mark.parametrize("bad", [-1, VOCAB_SIZE])
def test_tokens_that_the_model_does_not_have_are_refused(kernels: NativeKernels, form: str, bad: int) -> None:
    program, _ = echo(kernels, form)
    bound = bind(program, [0, bad])
    with pytest.raises(IndexError, match=f"row {bad} of a table of {VOCAB_SIZE} rows"):
        bound.run()


def test_what_is_not_finite_is_told(kernels: NativeKernels) -> None:
    trace = kernels.trace()
    table_VD = torch.ones(VOCAB_SIZE, WIDTH)
    table_VD[7] = torch.nan
    kernels.greedy(
        kernels.lookup(trace.input("token_ids", torch.int32), table_VD),
        kernels.pack_weight(torch.randn(VOCAB_SIZE, WIDTH)),
        VOCAB_SIZE,
    )
    chosen = bind(NativeProgram(kernels, trace, None), [6, 7]).run()
    assert chosen.has_failed_R.tolist() == [False, True]


@pytest.mark.parametrize("num_rows", [1, 300])
def test_hidden_states_are_written_to_memory_of_their_own(kernels: NativeKernels, num_rows: int) -> None:
    trace = kernels.trace()
    table_VD = torch.randn(VOCAB_SIZE, WIDTH)
    rows_TD = kernels.lookup(trace.input("token_ids", torch.int32), table_VD)
    rows_TD.mul_(0.3)
    assert isinstance(rows_TD, TracedTensor)
    program = NativeProgram(kernels, trace, rows_TD.cell)
    ids_T = torch.randint(VOCAB_SIZE, (num_rows,), dtype=torch.int32)
    found = [program.run(tokens(ids_T.roll(shift)))[0] for shift in range(2)]
    for shift in range(2):
        assert torch.equal(found[shift], table_VD[ids_T.roll(shift).long()] * 0.3)


def test_arguments_stay_while_a_program_runs(kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = kernels.trace()
    rows_TD = kernels.lookup(trace.input("token_ids", torch.int32), torch.randn(VOCAB_SIZE, WIDTH))
    assert isinstance(rows_TD, TracedTensor)
    program = NativeProgram(kernels, trace, rows_TD.cell)
    ids_T = torch.zeros(3, dtype=torch.int32)
    seen: list[tuple[int, ...]] = []

    def look(address: int, _: object) -> None:
        others = [np.zeros(size, dtype=np.int64) for size in range(1, 64) for _ in range(8)]
        assert others
        seen.append(struct.unpack("15q", ctypes.string_at(address, 15 * 8)))

    monkeypatch.setattr(program, "_run", look)
    program.run(tokens(ids_T))
    ((*_, num_rows, num_tokens, _, _, _, _, _, _, num_inputs, ids_at, num_groups),) = seen
    assert (num_rows, num_tokens, num_inputs, ids_at) == (3, 3, 1, ids_T.data_ptr())
    assert num_groups == 0
