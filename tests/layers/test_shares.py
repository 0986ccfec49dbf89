"""Tensor parallel layers: all ranks together compute the result of one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from penstock.attention import NO_CONTEXT
from penstock.errors import UnsupportedFeature
from penstock.kernels.native import NATIVE
from penstock.kernels.quantized import QuantizedWeight
from penstock.kernels.sampling import greedy_tokens, largest_logits, merge_largest
from penstock.layers.embedding import LMHead, VocabEmbedding
from penstock.layers.linear import NativeMethod, process_weights_after_loading
from penstock.layers.mlp import GatedMLP, PlainMLP
from penstock.layers.parallel_linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from penstock.layers.quantization.method import QuantizedMethod
from penstock.layers.quantization.quantize import quantize_int4, quantize_int8
from penstock.layers.weights import weight_slots
from penstock.parallel import ParallelState, Share, heads_of_rank, share_of_rank
from support.ranks import SilentGroup, contexts, run_ranks

ONE = ParallelState()
Make = Callable[[ParallelState], nn.Module]


def load(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load whole tensors, by module and parameter, into a rank's parts of them."""
    for name, module in model.named_modules():
        for parameter, slot in weight_slots(module, None).items():
            tensor = tensors[f"{name}.{parameter}"]
            assert slot.shape == tensor.shape
            slot.load(tensor)


def whole_tensors(model: nn.Module) -> dict[str, Tensor]:
    names = [(name, slots) for name, module in model.named_modules() for slots in [weight_slots(module, None)]]
    return {
        f"{name}.{parameter}": torch.randn(slot.shape) for name, slots in names for parameter, slot in slots.items()
    }


def by_rank(make: Make, size: int, x: Tensor, *, is_packed: bool = False) -> tuple[Tensor, list[Tensor]]:
    """Results of one rank, and of each of several."""
    whole = make(ONE)
    tensors = whole_tensors(whole)
    load(whole, tensors)
    ranks = [make(parallel) for parallel in contexts(size)]
    for model in ranks:
        load(model, tensors)
    if is_packed:
        for model in (whole, *ranks):
            process_weights_after_loading(model)
    outputs = run_ranks(size, lambda rank: ranks[rank](x, NO_CONTEXT))
    for output in outputs:
        if isinstance(output, BaseException):
            raise output
    return whole(x, NO_CONTEXT).detach(), outputs  # type: ignore[return-value]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_columns_side_by_side_are_the_whole_product(size: int) -> None:
    expected, outputs = by_rank(
        lambda parallel: ColumnParallelLinear(8, 12, bias=True, parallel=parallel), size, torch.randn(5, 8)
    )
    torch.testing.assert_close(torch.cat(outputs, -1), expected)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "make",
    [
        lambda parallel: GatedMLP(8, 12, bias=True, parallel=parallel),
        lambda parallel: PlainMLP(8, 12, activation="gelu_new", parallel=parallel),
    ],
    ids=["gated", "plain"],
)
def test_every_rank_has_the_sum_of_partial_products_with_one_bias(make: Make, size: int) -> None:
    expected, outputs = by_rank(make, size, torch.randn(5, 8), is_packed=True)
    for output in outputs:
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocab_size", [16, 17, 18, 19])  # the last rank has fewer
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_has_the_rows_and_logits_of_all(size: int, vocab_size: int) -> None:
    ids = torch.tensor([0, 7, 3, vocab_size - 1, 8, 4], dtype=torch.int32)
    expected, outputs = by_rank(lambda parallel: VocabEmbedding(vocab_size, 6, parallel=parallel), size, ids)
    for output in outputs:
        assert torch.equal(output, expected)
    expected, outputs = by_rank(lambda parallel: LMHead(vocab_size, 6, parallel=parallel), size, torch.randn(3, 6))
    for output in outputs:
        assert output.is_contiguous()
        torch.testing.assert_close(output, expected)


def make_heads(size: int, form: str, weight: Tensor) -> list[LMHead]:
    """Layers of all ranks, then of one rank alone, with a weight in this layout."""
    heads = [LMHead(*weight.shape, parallel=parallel) for parallel in [*contexts(size), ONE]]
    for head in heads:
        head.slots()["weight"].load(weight)
        if form == "bfloat16":
            head.weight = nn.Parameter(head.weight.bfloat16(), requires_grad=False)
            head.compute_dtype = torch.float32
        if form != "as loaded":
            process_weights_after_loading(head, CHOICES.get(form))
    return heads


def round_with(quantize: Callable[[Tensor], QuantizedWeight]) -> Callable[[nn.Module], QuantizedMethod]:
    return lambda layer: QuantizedMethod(quantize)


CHOICES = {"int8": round_with(quantize_int8), "int4": round_with(lambda weight: quantize_int4(weight, 32))}


@pytest.mark.parametrize(
    "form", ["as loaded", "float32", "bfloat16", "int8", "int4"]
)  # shares are no whole number of vectors
@pytest.mark.parametrize(("size", "vocab_size"), [(2, 154), (4, 148), (2, 155), (4, 149)])
def test_ranks_choose_the_token_of_all_logits_and_the_first_of_equals(size: int, vocab_size: int, form: str) -> None:
    weight = torch.randint(-3, 4, (vocab_size, 40)).float()
    weight[120] = weight[9] = weight[17] = 9.0
    hidden = torch.randint(-2, 3, (30, 40)).float()
    hidden[0], hidden[1] = 1.0, -1.0
    hidden[2, 3] = torch.nan
    hidden[3, 5] = torch.inf
    *heads, whole = make_heads(size, form, weight)
    expected = greedy_tokens(whole(hidden, NO_CONTEXT))
    assert expected.token_ids_R[0] == 9
    for chosen in run_ranks(size, lambda rank: heads[rank].compute_greedy(hidden, NO_CONTEXT)):
        assert not isinstance(chosen, BaseException), chosen
        assert chosen is not None
        assert chosen.token_ids_R.tolist() == expected.token_ids_R.tolist()
        assert chosen.has_failed_R.tolist() == expected.has_failed_R.tolist() == [row in (2, 3) for row in range(30)]


@pytest.mark.skipif(NATIVE is None, reason="without the C++ kernels all products are written down")
def test_a_rank_writes_no_logits_down_where_the_choice_is_made_in_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    *heads, whole = make_heads(2, "float32", torch.randn(154, 40))
    hidden = torch.randn(5, 40)
    expected = greedy_tokens(whole(hidden, NO_CONTEXT)).token_ids_R.tolist()

    def refuse(*_: object) -> Tensor:
        raise AssertionError("the logits are written down")

    monkeypatch.setattr(NativeMethod, "apply", refuse)
    for chosen in run_ranks(2, lambda rank: heads[rank].compute_greedy(hidden, NO_CONTEXT)):
        assert not isinstance(chosen, BaseException), chosen
        assert chosen is not None
        assert chosen.token_ids_R.tolist() == expected


@pytest.mark.parametrize("is_a_view", [False, True])  # for which there is no kernel
def test_merged_choices_are_those_of_the_whole_row(is_a_view: bool) -> None:
    logits = torch.randint(0, 4, (200, 24)).float()
    logits[5, 20], logits[6, 3], logits[7] = torch.nan, torch.inf, -torch.inf
    parts = [largest_logits(part if is_a_view else part.contiguous()) for part in logits.split(6, -1)]
    values = torch.stack([part.values_R for part in parts], -1)
    ids = torch.stack([part.token_ids_R + 6 * index for index, part in enumerate(parts)], -1)
    merged, expected = merge_largest(values, ids), greedy_tokens(logits)
    assert torch.equal(merged.token_ids_R, expected.token_ids_R)
    assert torch.equal(merged.has_failed_R, expected.has_failed_R)


def heads_taken(num_heads: int, num_kv_heads: int, size: int) -> list[tuple[list[int], list[int]]]:
    """By rank, the query heads and KV heads that its projection has."""
    taken = []
    for rank in range(size):
        layer = QKVParallelLinear(
            1,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=2,
            bias=True,
            parallel=ParallelState(tensor=SilentGroup(rank, size)),
        )
        for shard, count in (("q", num_heads), ("k", num_kv_heads), ("v", num_kv_heads)):
            slots = layer.fused_slots(shard)
            heads = torch.arange(count).repeat_interleave(2).float()
            slots["weight"].load(heads.unsqueeze(-1))
            slots["bias"].load(heads)
        rows = layer.weight[:, 0].view(-1, 2)[:, 0].int().tolist()
        assert layer.bias is not None
        assert layer.bias.view(-1, 2)[:, 1].int().tolist() == rows
        keys = rows[layer.num_heads : layer.num_heads + layer.num_kv_heads]
        assert rows[layer.num_heads + layer.num_kv_heads :] == keys
        taken.append((rows[: layer.num_heads], keys))
    return taken


def test_a_rank_has_the_kv_heads_of_its_query_heads() -> None:
    assert heads_taken(8, 4, 2) == [([0, 1, 2, 3], [0, 1]), ([4, 5, 6, 7], [2, 3])]
    # Where there are fewer KV heads than ranks, several ranks have the same.
    assert heads_taken(8, 2, 4) == [([0, 1], [0]), ([2, 3], [0]), ([4, 5], [1]), ([6, 7], [1])]


def test_a_checkpoint_that_holds_them_fused_gives_a_rank_its_rows_of_each() -> None:
    parallel = ParallelState(tensor=SilentGroup(1, 2))
    layer = MergedColumnParallelLinear.of_sizes(1, {"gate": 4, "up": 6}, bias=False, parallel=parallel)
    slot = weight_slots(layer, None)["weight"]
    assert slot.shape == (10, 1)
    slot.load(torch.arange(10.0).unsqueeze(-1))
    assert layer.weight[:, 0].tolist() == [2, 3, 7, 8, 9]


def test_what_does_not_divide_is_refused() -> None:
    group = SilentGroup(0, 4)
    assert share_of_rank(12, SilentGroup(2, 4), "features") == Share(6, 3, 12)
    with pytest.raises(UnsupportedFeature, match="6 features cannot be shared by 4 ranks"):
        share_of_rank(6, group, "features")
    with pytest.raises(UnsupportedFeature, match="12 attention heads with 6 KV heads cannot be shared by 4 ranks"):
        heads_of_rank(12, 6, group)
    with pytest.raises(UnsupportedFeature, match="6 input features cannot be shared by 4 ranks"):
        RowParallelLinear(6, 8, bias=False, parallel=ParallelState(tensor=group))
    with pytest.raises(UnsupportedFeature, match="6 tokens of the vocabulary are too few"):
        VocabEmbedding(6, 8, parallel=ParallelState(tensor=group))
