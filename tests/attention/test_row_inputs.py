"""Named step inputs in the forward context: each layer reads those of the rows that it gets."""

from __future__ import annotations

from operator import itemgetter

import torch
from torch import Tensor

from penstock.attention import NO_CONTEXT, ForwardContext, LastTokens
from penstock.attention.row_inputs import RowInputs

VALUES_T = torch.arange(10, 16)


def narrowed(*rows: int) -> ForwardContext:
    rows_R = torch.tensor(rows)
    return ForwardContext(last=LastTokens(rows_R, rows_R, rows_R, rows_R, []))


def values(context: ForwardContext) -> list[int]:
    found = context.input("values")
    assert found is not None
    return found.tolist()


def test_a_narrowed_context_has_the_inputs_of_last_tokens_and_the_one_of_all_tokens_has_all() -> None:
    context = narrowed(1, 4).with_inputs({"values": VALUES_T})
    assert values(context) == [11, 14]
    assert values(context.of_all_tokens()) == VALUES_T.tolist()
    first, second, last = context.by_layer(3)
    assert [values(first), values(second), values(last)] == [VALUES_T.tolist()] * 2 + [[11, 14]]


def test_rows_of_rows_are_selected_from_those() -> None:
    context = narrowed(0, 2, 5).with_inputs({"values": VALUES_T})
    pairs = context.of_rows(lambda rows: rows.index_select(0, torch.tensor([2, 0, 1, 2])))
    assert values(pairs) == [15, 10, 12, 15]
    assert values(pairs.of_rows(itemgetter(slice(1, 3)))) == [10, 12]


def test_an_input_is_selected_once_and_only_if_it_is_read() -> None:
    selected = []

    def select(per_token: Tensor) -> Tensor:
        selected.append(per_token)
        return per_token[:2]

    inputs = RowInputs({"values": VALUES_T, "others": -VALUES_T}).of_rows(select)
    assert inputs.get("values") is inputs.get("values")
    assert len(selected) == 1
    assert inputs.get("unknown") is None


def test_a_step_without_inputs_makes_no_context_anew() -> None:
    context = narrowed(1)
    assert context.with_inputs({}) is context
    assert context.input("values") is None
    assert context.of_rows(itemgetter(slice(0, 1))) is NO_CONTEXT
