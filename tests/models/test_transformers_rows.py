"""Models that run through Transformers compute a token with the same bits alone and in any batch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.kernels.native import NATIVE
from penstock.models.transformers_fallback.invariance import OperatorWatch, RowInvariant
from support.checkpoints import VOCAB_SIZE
from support.engines import greedy, make_core, random_prompts, run
from support.transformers_models import load, save_for_fallback, tiny_transformers_model, wider_overrides

pytestmark = pytest.mark.skipif(NATIVE is None, reason="row-invariant products are those of the C++ kernels")
_GENERATOR = torch.Generator().manual_seed(0)
_WEIGHT = nn.Parameter(torch.randn(19, 45, generator=_GENERATOR))
_BIAS = torch.randn(19, generator=_GENERATOR)
OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu with tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "a tensor's sigmoid": Tensor.sigmoid,
    "softplus": F.softplus,
    "silu of half of each row": lambda x: F.silu(x.chunk(2, -1)[1]),
    "linear": lambda x: F.linear(x, _WEIGHT, _BIAS),
    "matmul": lambda x: x @ _WEIGHT.t(),
    "addmm": lambda x: torch.addmm(_BIAS, x[0], _WEIGHT.t())[None],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_gives_each_row_the_same_bits_in_any_batch(name: str) -> None:
    operator = OPERATORS[name]
    x_1TI = 3 * torch.randn(1, 37, 45, generator=torch.Generator().manual_seed(1))
    with RowInvariant():
        whole_1TO = operator(x_1TI)
        for num_rows in (1, 2, 5, 16):
            for first in range(0, 37 - num_rows, 4):
                rows = slice(first, first + num_rows)
                assert torch.equal(operator(x_1TI[:, rows].clone()), whole_1TO[:, rows])
    torch.testing.assert_close(whole_1TO, operator(x_1TI), rtol=1e-5, atol=1e-5)


def test_the_modules_whose_own_code_calls_such_an_operator_are_found() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.SiLU()))
    watch = OperatorWatch()
    with watch.watching(model):
        model(torch.zeros(1, 4))
    assert [type(module) for module in watch.modules] == [nn.Linear, nn.SiLU]


@pytest.mark.parametrize("class_name", ["FlexOlmoForCausalLM", "LlamaForCausalLM"])
def test_a_request_has_the_same_bits_alone_and_in_a_batch(class_name: str, tmp_path: Path) -> None:
    save_for_fallback(tiny_transformers_model(class_name, **wider_overrides(class_name)), tmp_path)
    prompts = random_prompts((1, 3, 40, 17, 8), VOCAB_SIZE)
    core = make_core(tmp_path, model_impl="transformers", enable_prefix_caching=False, max_num_batched_tokens=40)
    together = run(core, prompts, greedy(6, logprobs=3))
    for prompt, one in zip(prompts, together, strict=True):
        (alone,) = run(core, [prompt], greedy(6, logprobs=3))
        assert (alone.tokens, alone.logprobs) == (one.tokens, one.logprobs)
    core.close()


@pytest.mark.parametrize("has_other_bits", [False, True])
def test_a_model_with_other_bits_in_a_batch_says_so_at_start(
    has_other_bits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class_name = "FlexOlmoForCausalLM"
    config = save_for_fallback(tiny_transformers_model(class_name, **wider_overrides(class_name)), tmp_path)
    if has_other_bits:
        monkeypatch.setattr(RowInvariant, "install", lambda *_: None)
    with caplog.at_level(logging.WARNING, logger="penstock"):
        load(config)
    assert has_other_bits == ("FlexOlmoForCausalLM in Transformers computes a token with other bits" in caplog.text)
