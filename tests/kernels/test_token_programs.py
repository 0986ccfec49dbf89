"""Programs from tokens to tokens, on every instruction set."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.native import NativeKernels, available_instruction_sets, load_native_kernels
from penstock.kernels.native.program import NativeProgram
from penstock.kernels.native.program_step import BoundChoices, StepTokens
from penstock.kernels.native.quantized import native_quantized_products
from penstock.kernels.quantized import QuantizedShape, QuantizedWeight

pytestmark = pytest.mark.skipif(not available_instruction_sets(), reason="the C++ kernels were not built")

VOCAB_SIZE, WIDTH = 45, 40
FORMS = ["table", "bfloat16 table", "packed", "int8", "int4 and its rest"]


@pytest.fixture(params=[found.name for found in available_instruction_sets()])
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    found = load_native_kernels(request.param)
    assert found is not None
    return found


def rounded(bits: int, seed: int) -> QuantizedWeight:
    random = torch.Generator().manual_seed(seed)
    shape = QuantizedShape(bits, VOCAB_SIZE, WIDTH, WIDTH if bits == 8 else 32)
    values_VD = torch.randint(0, 16, (VOCAB_SIZE, WIDTH), generator=random, dtype=torch.int8)
    zeros_VG = torch.randint(0, 16, (VOCAB_SIZE, shape.num_groups), generator=random, dtype=torch.uint8)
    scales_VG = torch.rand(VOCAB_SIZE, shape.num_groups, generator=random)
    return QuantizedWeight(shape, values_VD, scales_VG, None if bits == 8 else zeros_VG)


def echo(kernels: NativeKernels, form: str) -> tuple[NativeProgram, Tensor]:
    """A program that looks rows up and multiplies by a matrix, and the logits that this gives for every token."""
    torch.manual_seed(1)
    program = NativeProgram(WIDTH, kernels)
    table_VD = torch.randn(VOCAB_SIZE, WIDTH)
    products = native_quantized_products(kernels)
    assert products is not None
    if form == "table":
        program.lookup(table_VD, program.input)
    elif form == "bfloat16 table":
        program.lookup(table_VD.bfloat16(), program.input)
        table_VD = table_VD.bfloat16().float()
    elif form == "packed":
        program.rows(kernels.pack_weight(table_VD), program.input)
    elif form == "int8":
        weight = rounded(8, 2)
        program.quantized_rows(products, products.pack(weight), weight.shape, program.input)
        table_VD = weight.dequantize()
    else:
        weight, rest = rounded(4, 3), rounded(4, 4)
        packed, packed_rest = products.pack(weight), products.pack(rest)
        program.quantized_rows(products, packed, weight.shape, program.input, packed_rest)
        table_VD = weight.dequantize() + rest.dequantize()
    head_VD = torch.randn(VOCAB_SIZE, WIDTH)
    packed_head = kernels.pack_weight(head_VD)
    if form == "packed":
        with program.buffers_of_part(VOCAB_SIZE) as (logits,):
            program.linear(program.input, packed_head, None, logits)
            program.argmax(logits)
    else:
        program.greedy(program.input, packed_head, VOCAB_SIZE)
    return program, kernels.linear(table_VD, packed_head, VOCAB_SIZE, None)


def bind(program: NativeProgram, token_ids: list[int]) -> BoundChoices:
    num_rows = len(token_ids)
    step = StepTokens(torch.zeros(num_rows, dtype=torch.int64), num_rows, [])
    return program.bind(torch.tensor(token_ids, dtype=torch.int32), step)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_rows", [1, 3, 600])
def test_a_bound_program_reads_its_tokens_anew(kernels: NativeKernels, form: str, num_rows: int) -> None:
    program, logits_VV = echo(kernels, form)
    ids_T = torch.zeros(num_rows, dtype=torch.int32)
    bound = program.bind(ids_T, StepTokens(torch.zeros(num_rows, dtype=torch.int64), num_rows, []))
    expected_V = logits_VV.argmax(dim=1)
    for seed in range(3):
        ids_T.copy_(torch.randint(VOCAB_SIZE, (num_rows,), generator=torch.Generator().manual_seed(seed)))
        bound.run()
        assert torch.equal(bound.index_T, expected_V[ids_T.long()])
        assert not bound.failed_T.any()


@pytest.mark.parametrize("form", ["table", "int8"])
@pytest.mark.parametrize("bad", [-1, VOCAB_SIZE])
def test_tokens_that_the_model_does_not_have_are_refused(kernels: NativeKernels, form: str, bad: int) -> None:
    program, _ = echo(kernels, form)
    bound = program.bind(
        torch.tensor([0, bad], dtype=torch.int32), StepTokens(torch.zeros(2, dtype=torch.int64), 2, [])
    )
    with pytest.raises(IndexError, match=f"row {bad} of a table of {VOCAB_SIZE} rows"):
        bound.run()


def test_what_is_not_finite_is_told(kernels: NativeKernels) -> None:
    program = NativeProgram(WIDTH, kernels)
    table_VD = torch.ones(VOCAB_SIZE, WIDTH)
    table_VD[7] = torch.nan
    program.lookup(table_VD, program.input)
    program.greedy(program.input, kernels.pack_weight(torch.randn(VOCAB_SIZE, WIDTH)), VOCAB_SIZE)
    bound = bind(program, [6, 7])
    bound.run()
    assert bound.failed_T.tolist() == [False, True]


def test_arguments_stay_while_a_program_runs(kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    program = NativeProgram(WIDTH, kernels)
    positions_T = torch.zeros(3, dtype=torch.int64)
    seen: list[tuple[int, ...]] = []

    def look(address: int) -> None:
        others = [np.zeros(size, dtype=np.int64) for size in range(1, 64) for _ in range(8)]
        assert others
        seen.append(struct.unpack("15q", ctypes.string_at(address, 15 * 8)))

    monkeypatch.setattr(program, "_run", look)
    input_TD = torch.randn(3, WIDTH)
    program(input_TD, StepTokens(positions_T, 3, []))
    ((input_at, *_, positions_at, num_rows, num_tokens, _, _, _, _, _, num_groups),) = seen
    assert (input_at, positions_at, num_rows, num_tokens) == (input_TD.data_ptr(), positions_T.data_ptr(), 3, 3)
    assert num_groups == 0
