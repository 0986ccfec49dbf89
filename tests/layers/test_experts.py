"""Routing of tokens to experts, and their weighted sum."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from penstock.attention import NO_CONTEXT
from penstock.kernels.activation import silu_and_mul
from penstock.kernels.experts import mixture_reference
from penstock.kernels.native import NATIVE
from penstock.kernels.stored_weight import ExpertWeights
from penstock.layers.experts import SIGMOID, SOFTMAX, SPARSEMIXER, ExpertRows, Experts, Routing, note_changes
from penstock.layers.linear import LinearLayer, OneDnnMethod
from penstock.parallel import ParallelState
from support.answers import patient

NUM_EXPERTS = 8


def by_definition(routing: Routing, logits: torch.Tensor, bias: torch.Tensor | None) -> list[dict[int, float]]:
    """Weights by expert of each token, one token and expert at a time."""
    found = []
    for row in logits.double():
        scores = row.softmax(-1) if routing.scoring == SOFTMAX else row.sigmoid()
        marks = scores if bias is None else scores + bias.double()
        size = routing.num_experts // routing.num_groups
        groups = [marks[group * size : (group + 1) * size].tolist() for group in range(routing.num_groups)]
        goodness = [sum(sorted(group)[-routing.best_of_group :]) for group in groups]
        best = sorted(range(routing.num_groups), key=lambda group: -goodness[group])[: routing.top_groups]
        allowed = [expert for expert in range(routing.num_experts) if expert // size in best]
        chosen = sorted(allowed, key=lambda expert: -float(marks[expert]))[: routing.top_k]
        total = sum(float(scores[expert]) for expert in chosen) if routing.normalizes else 1.0
        found.append({expert: float(scores[expert]) / total * routing.scale for expert in chosen})
    return found


@pytest.mark.parametrize("scoring", [SOFTMAX, SIGMOID])
@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize(("num_groups", "top_groups", "best_of_group"), [(1, 1, 1), (4, 2, 1), (4, 2, 2), (2, 1, 1)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_experts_and_weights_are_those_of_the_definition(
    scoring: str, normalizes: bool, num_groups: int, top_groups: int, best_of_group: int, has_bias: bool
) -> None:
    routing = Routing(
        NUM_EXPERTS,
        3,
        scoring=scoring,
        normalizes=normalizes,
        scale=2.5,
        num_groups=num_groups,
        top_groups=top_groups,
        best_of_group=best_of_group,
    )
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(50, NUM_EXPERTS, generator=generator)
    bias = torch.randn(NUM_EXPERTS, generator=generator) if has_bias else None
    for choose in (routing.choose, routing.choose_reference):
        experts, weights = choose(logits, bias)
        for row, (ids, values, expected) in enumerate(
            zip(experts.tolist(), weights.tolist(), by_definition(routing, logits, bias), strict=True)
        ):
            assert ids == sorted(expected), row
            assert values == pytest.approx([expected[expert] for expert in ids], rel=1e-5), row


@pytest.mark.parametrize("jitter", [0.01, 0.3])
def test_sparsemixer_is_that_of_transformers(jitter: float) -> None:
    logits = torch.randn(200, NUM_EXPERTS, generator=torch.Generator().manual_seed(4))
    # Negative logits alone, and zeros.
    logits[:50] = -logits[:50].abs()
    logits[50:60] = logits[50:60].clamp(max=0.0)
    weights, experts = sparsemixer(logits, jitter, training=False)
    expected = torch.zeros(200, NUM_EXPERTS).scatter_(1, experts, weights)
    routing = Routing(NUM_EXPERTS, 2, scoring=SPARSEMIXER, normalizes=False, jitter=jitter)
    for choose in (routing.choose, routing.choose_reference):
        found, values = choose(logits)
        is_chosen = torch.zeros(200, NUM_EXPERTS, dtype=torch.bool).scatter_(1, found, True)
        # Of zeros any is the best.
        is_chosen[50:60] = expected[50:60] > 0
        assert torch.equal(is_chosen, expected > 0)
        torch.testing.assert_close(values.sum(-1), expected.sum(-1), rtol=1e-6, atol=0)
        weights = torch.zeros(200, NUM_EXPERTS).scatter_(1, found, values)
        torch.testing.assert_close(weights[60:], expected[60:], rtol=1e-6, atol=0)
        assert (found[:, 0] < found[:, 1]).all()


def test_weights_are_divided_by_their_sum_or_by_the_least_one() -> None:
    logits = torch.tensor([[9.0] + [0.0] * 7, [0.0] * 8])
    bias = torch.tensor([-1.0] + [0.0] * 4 + [1.0] * 3)
    routing = Routing(NUM_EXPERTS, 3, least_sum=0.3)
    for choose in (routing.choose, routing.choose_reference):
        experts, weights = choose(logits, bias)
        assert experts.tolist() == [[5, 6, 7]] * 2
        scores = logits.softmax(-1)[:, 5:]
        assert float(scores[0].sum()) < 0.3 < float(scores[1].sum())
        torch.testing.assert_close(weights, scores / torch.tensor([[0.3], [3 / 8]]))


@pytest.mark.skipif(NATIVE is None, reason="the C++ kernels were not built")
def test_ties_go_to_the_first_experts_and_logits_that_are_no_numbers_still_choose() -> None:
    logits = torch.tensor([[1.0] * 8, [0.0, 3.0, 1.0, 3.0, 1.0, 1.0, 0.0, 0.0], [float("nan")] * 8])
    experts, weights = Routing(NUM_EXPERTS, 3).choose(logits)
    assert experts[:2].tolist() == [[0, 1, 2], [1, 2, 3]]
    assert len({*experts[2].tolist()} & {*range(NUM_EXPERTS)}) == 3
    assert weights[0].tolist() == pytest.approx([1 / 3] * 3)
    assert weights[2].isnan().all()


@patient
@given(st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=2, unique=True), max_size=20))
def test_rows_are_sorted_by_expert_and_then_by_token(chosen: list[list[int]]) -> None:
    rows = ExpertRows.of(torch.tensor(chosen, dtype=torch.int64).reshape(-1, 2), 6)
    pairs = [(expert, place) for place, expert in enumerate(expert for token in chosen for expert in token)]
    assert rows.order.tolist() == [place for _, place in sorted(pairs)]
    for expert, place in rows.pieces():
        assert {pair[0] for pair in sorted(pairs)[place]} == {expert}
    assert sum(rows.counts) == len(pairs)


@pytest.fixture(scope="module")
def experts() -> Experts:
    made = Experts(6, 16, 24, activation="silu", parallel=ParallelState())
    generator = torch.Generator().manual_seed(2)
    for parameter in made.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return made


@pytest.mark.parametrize(
    "chosen", [[[0, 3]] * 7, [[0, 1], [4, 5], [0, 5]], [[2, 2 + 1 + (row % 3)] for row in range(9)]]
)
def test_the_sum_is_that_of_each_tokens_experts(experts: Experts, chosen: list[list[int]]) -> None:
    """All tokens at two experts, an expert without tokens, and one with all."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(len(chosen), 16, generator=generator)
    weights = torch.rand(len(chosen), 2, generator=generator)
    found = experts.partial(hidden, torch.tensor(chosen), weights, NO_CONTEXT)
    for row, token in enumerate(chosen):
        expected = sum(
            weight * experts[expert](hidden[row : row + 1], NO_CONTEXT)[0]
            for expert, weight in zip(token, weights[row], strict=True)
        )
        torch.testing.assert_close(found[row], expected)


class ByAddress:
    """Grouped products that read weights of experts as they were when these products were made, as a GPU's do."""

    def __init__(self, weights: ExpertWeights, *_: object, **__: object) -> None:
        self._weights = [[one.values.clone() for one in given] for given in (weights.gate_up, weights.down)]

    runs = takes = staticmethod(lambda *_: True)

    def mixture(self, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return mixture_reference(hidden_TD, experts_TK, weights_TK, *self._weights, silu_and_mul)


@pytest.mark.parametrize("layer", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("way", ["taken again", "other memory", "packed"])
def test_grouped_products_notice_a_new_weight_of_any_expert(
    layer: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.layers.experts.GroupedExperts", ByAddress)
    experts = Experts(6, 16, 24, activation="silu", parallel=ParallelState())
    generator = torch.Generator().manual_seed(4)
    for parameter in experts.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    hidden = torch.randn(5, 16, generator=generator)
    chosen, weights = torch.tensor([[1, 2]] * 5), torch.rand(5, 2, generator=generator)
    before = experts.partial(hidden, chosen, weights, NO_CONTEXT)
    changed: LinearLayer = getattr(experts[2], layer)
    if way == "taken again":
        changed.take_weight(changed.weight * 2)
    elif way == "other memory":
        changed.weight.data = changed.weight * 2
        # As the runner does after calls that may change the model.
        note_changes(experts)
    else:
        changed.take_weight(changed.weight * 2)
        experts.partial(hidden, chosen, weights, NO_CONTEXT)
        changed.method = OneDnnMethod()
        changed.method.process_weights_after_loading(changed)
    found = experts.partial(hidden, chosen, weights, NO_CONTEXT)
    experts.are_grouped = False
    torch.testing.assert_close(found, experts.partial(hidden, chosen, weights, NO_CONTEXT))
    assert not torch.allclose(found, before)
