"""Products of few rows with a weight in Triton against plain torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

import support.triton_interpreter  # noqa: F401 - repairs the interpreter
from penstock.kernels.linear import linear
from penstock.kernels.triton import linear as kernels
from penstock.kernels.triton.linear import Tiling, choose_tiling, skinny_linear, takes
from support.triton_device import DEVICE, needs_triton

pytestmark = needs_triton

ELEMENTS, PIPELINED = Tiling(4, 256, num_warps=1), Tiling(2, 256, num_warps=1, num_stages=3)
DOTS = Tiling(16, 64, num_warps=4, num_stages=3, dots=True)


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def _assert_close(actual: Tensor, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
    expected = F.linear(x_TI.float(), weight_OI.float(), None if bias_O is None else bias_O.float())
    assert actual.dtype is x_TI.dtype
    assert actual.is_contiguous()
    torch.testing.assert_close(actual.float(), expected, rtol=torch.finfo(x_TI.dtype).eps, atol=1e-4)


@pytest.mark.parametrize("tiling", [ELEMENTS, PIPELINED, DOTS])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 16])
def test_products(tiling: Tiling, num_rows: int) -> None:
    x_TI, weight_OI = _random(num_rows, 512), _random(32, 512)

    _assert_close(skinny_linear(x_TI, weight_OI, tiling=tiling), x_TI, weight_OI)


@pytest.mark.parametrize("tiling", [ELEMENTS, PIPELINED, DOTS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sizes_that_no_tile_divides(tiling: Tiling, dtype: torch.dtype) -> None:
    x_TI, weight_OI, bias_O = _random(3, 296, dtype=dtype), _random(37, 296, dtype=dtype), _random(37, dtype=dtype)

    _assert_close(skinny_linear(x_TI, weight_OI, bias_O, tiling=tiling), x_TI, weight_OI, bias_O)


def test_a_row_does_not_depend_on_the_others() -> None:
    x_TI, weight_OI = _random(4, 256), _random(8, 256)
    result_TO = skinny_linear(x_TI, weight_OI, tiling=ELEMENTS)

    x_TI[:3] = float("nan")

    assert torch.equal(skinny_linear(x_TI, weight_OI, tiling=ELEMENTS)[3:], result_TO[3:])


def test_linear_takes_the_kernel_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[Tiling | None] = []

    def counted(*arguments: Tensor, tiling: Tiling | None) -> Tensor:
        launches.append(tiling)
        return skinny_linear(*arguments, tiling=tiling)

    monkeypatch.setattr(kernels, "skinny_linear", counted)
    weight_OI, bias_O = _random(512, 512), _random(512)
    for x_TI in (_random(1, 512), _random(2, 512)):
        _assert_close(linear(x_TI, weight_OI, bias_O), x_TI, weight_OI, bias_O)
        _assert_close(linear(x_TI, weight_OI.float()), x_TI, weight_OI)
    assert launches == [choose_tiling(num_rows, 512, 512) for num_rows in (1, 1, 2, 2)]

    launches.clear()
    for x_TI in (
        _random(17, 512),
        _random(1, 512, dtype=torch.float32),
        _random(1, 1024)[:, ::2],
        _random(2, 520)[:, :512],
        _random(0, 512),
    ):
        torch.testing.assert_close(linear(x_TI, weight_OI.to(x_TI.dtype)), F.linear(x_TI, weight_OI.to(x_TI.dtype)))
    assert linear(_random(1, 2, 512), weight_OI).shape == (1, 2, 512)
    assert launches == []


def test_tensors_that_the_kernels_do_not_take() -> None:
    x_TI, weight_OI = _random(2, 64), _random(64, 64)

    assert takes(x_TI, weight_OI)
    assert takes(x_TI, weight_OI, weight_OI[0])
    assert not takes(x_TI.float(), weight_OI.float())
    assert not takes(x_TI, weight_OI.half())
    assert not takes(x_TI, weight_OI.t())
    assert not takes(x_TI, weight_OI, weight_OI[0].float())
    assert not takes(_random(2, 68), _random(64, 68))
    assert not takes(_random(17, 64), weight_OI)


_COMPILED = """
import sys
import pytest, torch
sys.path[:0] = {paths!r}
from support.triton_compile import compile_only
from penstock.kernels.triton.linear import choose_tiling, skinny_linear
counts = compile_only(pytest.MonkeyPatch())
shapes = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)]
shapes += [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
for num_rows in {rows}:
    for num_outputs, num_inputs in shapes:
        x = torch.empty(num_rows, num_inputs, dtype=torch.bfloat16)
        weight = torch.empty(1, dtype=torch.bfloat16).expand(num_outputs, num_inputs)
        skinny_linear(x, weight)
print(counts)
"""


def test_the_kernels_compile_for_an_h100_once_for_several_shapes() -> None:
    """In a process without the interpreter; no GPU is needed."""
    here = Path(__file__)
    script = _COMPILED.format(paths=[str(here.parents[2])], rows=[1, 4, 8])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ast.literal_eval(done.stdout) == {"_elements_kernel": 5, "_dot_kernel": 1}
