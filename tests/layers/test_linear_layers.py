"""Linear layers multiply by the loaded weight in every layout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.attention import NO_CONTEXT
from penstock.kernels.linear import pack_weight, packed_linear, packing_pays, unpack_weight
from penstock.kernels.native import NATIVE
from penstock.kernels.sampling import greedy_tokens
from penstock.layers.embedding import LMHead, VocabEmbedding
from penstock.layers.linear import (
    NativeMethod,
    OneDnnMethod,
    PackedMethod,
    PlainMethod,
    process_weights_after_loading,
    restore_weights,
    weights_size_bytes,
)
from penstock.layers.norm import QueryKeyNorm
from penstock.layers.parallel_linear import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear
from penstock.parallel import ParallelState
from support.ranks import SilentGroup

ONE_RANK = ParallelState()
needs_packing = pytest.mark.skipif(
    not packing_pays(torch.empty(1024, 1024)), reason="this build of torch has no packed oneDNN products"
)


def random_layer(input_size: int, output_size: int, *, bias: bool = True) -> ColumnParallelLinear:
    layer = ColumnParallelLinear(input_size, output_size, bias=bias, parallel=ONE_RANK)
    for parameter in layer.parameters():
        parameter.data.normal_()
    return layer


@needs_packing
@given(st.integers(0, 70), st.integers(1, 90), st.integers(1, 90), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=40)
def test_packed_products_equal_plain_ones(rows: int, inputs: int, outputs: int, bias: bool, strided: bool) -> None:
    x_TI = torch.randn(rows, 2 * inputs)[:, :inputs] if strided else torch.randn(rows, inputs)
    weight_OI, bias_O = torch.randn(outputs, inputs), torch.randn(outputs) if bias else None
    expected = F.linear(x_TI, weight_OI, bias_O)
    torch.testing.assert_close(packed_linear(x_TI, pack_weight(weight_OI), bias_O), expected, rtol=1e-4, atol=1e-4)


@needs_packing
@given(st.integers(1, 90), st.integers(1, 90))
@settings(deadline=None, max_examples=20)
def test_unpacking_gives_every_bit_back(outputs: int, inputs: int) -> None:
    weight_OI = torch.randn(outputs, inputs)
    assert torch.equal(unpack_weight(pack_weight(weight_OI)), weight_OI)


@pytest.fixture(
    params=[
        pytest.param("native", marks=pytest.mark.skipif(NATIVE is None, reason="the C++ kernels were not built")),
        pytest.param("onednn", marks=needs_packing),
    ]
)
def packed_method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[PackedMethod]:
    """Linear method of large layers, with the C++ kernels and without."""
    if request.param == "native":
        return NativeMethod
    monkeypatch.setattr("penstock.layers.linear.NATIVE", None)
    return OneDnnMethod


def test_a_large_layer_is_packed_and_holds_its_weight_once(packed_method: type[PackedMethod]) -> None:
    layer = random_layer(1024, 768)
    x_TI = torch.randn(3, 1024)
    size, before = weights_size_bytes(layer), layer(x_TI, NO_CONTEXT)
    process_weights_after_loading(layer)
    assert isinstance(layer.method, packed_method)
    assert layer.weight.numel() == 0
    assert weights_size_bytes(layer) == size == (1024 + 1) * 768 * 4
    torch.testing.assert_close(layer(x_TI, NO_CONTEXT), before, rtol=1e-4, atol=1e-4)


def test_restoring_gives_the_weight_back(packed_method: type[PackedMethod]) -> None:
    layer = random_layer(1024, 768)
    weight = layer.weight.detach().clone()
    process_weights_after_loading(layer)
    restore_weights(layer)
    assert torch.equal(layer.weight, weight)
    assert isinstance(layer.method, PlainMethod)


def test_a_tied_head_is_packed_and_the_embedding_stays_what_it_was(packed_method: type[PackedMethod]) -> None:
    embedding = VocabEmbedding(1100, 512, parallel=ONE_RANK)
    embedding.weight.data.normal_()
    weight = embedding.weight.detach().clone()
    head = LMHead(1100, 512, parallel=ONE_RANK, tied_to=embedding)
    process_weights_after_loading(head)
    assert isinstance(head.method, packed_method)
    ids = torch.tensor([0, 5, 1099, 1096, 17, 5])
    assert torch.equal(embedding(ids, NO_CONTEXT), weight[ids])
    hidden = torch.randn(2, 512)
    torch.testing.assert_close(head(hidden, NO_CONTEXT), hidden @ weight.T, rtol=1e-4, atol=1e-3)
    restore_weights(head)
    assert head.weight is embedding.weight
    assert torch.equal(embedding(ids, NO_CONTEXT), weight[ids])
    assert torch.equal(embedding.weight, weight)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_head_chooses_the_tokens_of_its_logits(is_packed: bool, dtype: torch.dtype) -> None:
    head = LMHead(1100, 64, parallel=ONE_RANK)
    head.weight = nn.Parameter(torch.randn(1100, 64).round().to(dtype), requires_grad=False)
    head.compute_dtype = torch.float32
    if is_packed:
        process_weights_after_loading(head)
    hidden_LD = torch.randn(40, 64).round()
    hidden_LD[7, 3] = float("nan")
    chosen, expected = head.compute_greedy(hidden_LD, NO_CONTEXT), greedy_tokens(head(hidden_LD, NO_CONTEXT))
    if NATIVE is None or not is_packed:
        assert chosen is None  # the caller computes the logits then
        return
    assert chosen is not None
    assert torch.equal(chosen.token_ids_R, expected.token_ids_R)
    assert chosen.has_failed_R.tolist() == [row == 7 for row in range(40)]


@pytest.mark.skipif(NATIVE is None, reason="the C++ kernels were not built")
def test_a_tied_weight_is_held_once() -> None:
    embedding = VocabEmbedding(96, 8, parallel=ONE_RANK)
    model = nn.ModuleList([embedding, LMHead(96, 8, parallel=ONE_RANK, tied_to=embedding)])
    assert weights_size_bytes(model) == 96 * 8 * 4
    process_weights_after_loading(model)
    assert weights_size_bytes(model) == 96 * 8 * 4


@pytest.mark.parametrize(
    "weight",
    [torch.empty(64, 64), torch.empty(1024, 1024, dtype=torch.bfloat16), torch.empty(1024, 1024, device="meta")],
    ids=["small", "bfloat16", "elsewhere"],
)
def test_other_weights_are_not_packed(weight: torch.Tensor) -> None:
    assert not packing_pays(weight)


def test_merged_projections_lie_side_by_side_in_their_order() -> None:
    layer = MergedColumnParallelLinear.of_sizes(8, {"gate": 3, "up": 5}, bias=True, parallel=ONE_RANK)
    parts = {"gate": random_layer(8, 3), "up": random_layer(8, 5)}
    for shard in ("up", "gate"):
        slots = layer.fused_slots(shard)
        for name, parameter in parts[shard].named_parameters():
            assert slots[name].shape == parameter.shape
            slots[name].load(parameter)
    x_TI = torch.randn(4, 8)
    expected = torch.cat([parts[shard](x_TI, NO_CONTEXT) for shard in ("gate", "up")], -1)
    torch.testing.assert_close(layer(x_TI, NO_CONTEXT), expected)


def test_query_key_and_value_have_the_sizes_of_their_heads() -> None:
    layer = QKVParallelLinear(16, num_heads=6, num_kv_heads=2, head_size=4, bias=False, parallel=ONE_RANK)
    assert {shard: layer.fused_slots(shard)["weight"].shape for shard in "qkv"} == {
        "q": (24, 16),
        "k": (8, 16),
        "v": (8, 16),
    }
    assert layer.weight.shape == (40, 16)


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_pairs_that_are_adjacent_in_a_checkpoint_are_half_a_head_apart(rank: int | None) -> None:
    """In adapters too. Values are not rotated."""
    parallel = ONE_RANK if rank is None else ParallelState(tensor=SilentGroup(rank, 2))
    layer = QKVParallelLinear(
        3, num_heads=4, num_kv_heads=2, head_size=6, bias=True, parallel=parallel, is_interleaved=True
    )
    for shard, count in (("q", 4), ("k", 2), ("v", 2)):
        slots = layer.fused_slots(shard)
        weight, bias = torch.randn(slots["weight"].shape), torch.randn(slots["bias"].shape)
        slots["weight"].load(weight)
        slots["bias"].load(bias)
        heads = range(count) if rank is None else range(rank * count // 2, (rank + 1) * count // 2)
        order = (0, 1, 2, 3, 4, 5) if shard == "v" else (0, 2, 4, 1, 3, 5)
        rows = [head * 6 + place for head in heads for place in order]
        part, place = layer.rows_of(shard), layer.adapter_place(shard)
        assert layer.bias is not None
        assert torch.equal(layer.weight[part], weight[rows])
        assert torch.equal(layer.bias[part], bias[rows])
        assert place.shape == weight.shape
        assert torch.equal(weight if place.output_part is None else place.output_part.of(weight), weight[rows])


def test_query_and_key_norms_reach_their_own_heads() -> None:
    norm = QueryKeyNorm(num_heads=3, num_kv_heads=2, head_size=4, eps=1e-6)
    norm.fused_slots("k")["weight"].load(torch.full((4,), 5.0))
    norm.fused_slots("q")["weight"].load(torch.full((4,), 2.0))
    heads = norm(torch.ones(1, 5, 4))
    assert heads[0, :, 0].tolist() == pytest.approx([2, 2, 2, 5, 5], rel=1e-5)


def test_the_largest_logits_count_a_bias() -> None:
    head = LMHead(11, 8, bias=True, parallel=ONE_RANK)
    random = torch.Generator().manual_seed(3)
    for parameter in head.parameters():
        parameter.data.normal_(generator=random)
    hidden = torch.randn(20, 8, generator=random)
    chosen = head.compute_greedy(hidden, NO_CONTEXT)
    assert head.bias is not None
    expected = (hidden @ head.weight.T + head.bias).argmax(-1)
    assert not torch.equal(expected, (hidden @ head.weight.T).argmax(-1))
    if chosen is not None:  # with the C++ kernels
        assert torch.equal(chosen.token_ids_R, expected)
    torch.testing.assert_close(head(hidden, NO_CONTEXT).argmax(-1), expected)


def test_logits_are_float32_whatever_the_weights_are() -> None:
    head = LMHead(11, 8, parallel=ONE_RANK)
    head.weight = nn.Parameter(torch.randn(11, 8, dtype=torch.bfloat16), requires_grad=False)
    assert head(torch.randn(2, 8, dtype=torch.bfloat16), NO_CONTEXT).dtype == torch.float32
