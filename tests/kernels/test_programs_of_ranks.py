"""Programs with collectives in shared memory: the same bits as separate kernels and collectives."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.attention import NO_CONTEXT
from penstock.contract import SchedulerOutput
from penstock.errors import RanksDisagree, WaitTimeout
from penstock.kernels.native import NATIVE
from penstock.kernels.native.program import NativeProgram
from penstock.kernels.native.program_step import StepTokens
from penstock.kernels.native.tracing import TracedTensor
from penstock.kernels.sampling import ChosenTokens
from penstock.layers.embedding import LMHead, VocabEmbedding
from penstock.layers.linear import process_weights_after_loading
from penstock.layers.parallel_linear import RowParallelLinear
from penstock.layers.quantization.method import choose_method
from penstock.parallel import GroupAgreement, ParallelState
from support.ranks import run_ranks, shared_memory_groups

pytestmark = pytest.mark.skipif(NATIVE is None, reason="the C++ kernels were not built")

VOCAB_SIZE, WIDTH = 96, 48


def parallel_contexts(size: int, **options: Any) -> list[ParallelState]:
    groups = shared_memory_groups(size, **options)
    return [ParallelState(rank=rank, world_size=size, tensor=group) for rank, group in enumerate(groups)]


class Echo:
    """A rank's embedding, and a head that chooses."""

    def __init__(self, parallel: ParallelState, form: str, table_VD: Tensor, head_VD: Tensor) -> None:
        self.embedding = VocabEmbedding(VOCAB_SIZE, WIDTH, parallel=parallel)
        self.head = LMHead(
            VOCAB_SIZE, WIDTH, parallel=parallel, tied_to=self.embedding if form.startswith("tied") else None
        )
        self.embedding.slots()["weight"].load(table_VD)
        self.head.slots()["weight"].load(table_VD if form.startswith("tied") else head_VD)
        model = torch.nn.ModuleList([self.embedding, self.head])
        quantization = {"int8": "int8", "tied int4": "int4"}.get(form)
        process_weights_after_loading(model, None if quantization is None else choose_method(quantization))

    def hidden(self, ids_T: Tensor) -> Tensor:
        return self.embedding(ids_T, NO_CONTEXT)  # type: ignore[no-any-return]

    def choose(self, ids_T: Tensor) -> ChosenTokens | None:
        return self.head.compute_greedy(self.hidden(ids_T), NO_CONTEXT)


def program_of(run: Callable[[Tensor], Any]) -> NativeProgram:
    assert NATIVE is not None
    trace = NATIVE.trace()
    result = run(trace.input("token_ids", torch.int32))
    return NativeProgram(NATIVE, trace, result.cell if isinstance(result, TracedTensor) else None)


def step_of(ids_T: Tensor) -> StepTokens:
    return StepTokens({"token_ids": ids_T}, len(ids_T), len(ids_T))


@pytest.mark.parametrize("num_rows", [1, 5, 700])
@pytest.mark.parametrize("form", ["plain", "tied", "int8", "tied int4"])
@pytest.mark.parametrize("size", [2, 3])
def test_embeddings_and_choices_of_all_ranks_are_those_of_layers(size: int, form: str, num_rows: int) -> None:
    torch.manual_seed(1)
    table_VD, head_VD = torch.randn(VOCAB_SIZE, WIDTH), torch.randn(VOCAB_SIZE, WIDTH)
    # The same largest logit in several ranks' parts, and in one of them.
    head_VD[VOCAB_SIZE - 5] = head_VD[VOCAB_SIZE // 2] = head_VD[3]
    table_VD[11] = 3 * head_VD[3]
    table_VD[-1] = torch.nan
    ids_T = torch.randint(VOCAB_SIZE, (num_rows,), dtype=torch.int32)
    ids_T[-1], ids_T[0] = VOCAB_SIZE - 1, 11
    parallels = parallel_contexts(size)

    def run(rank: int) -> tuple[Any, ...]:
        echo = Echo(parallels[rank], form, table_VD, head_VD)
        hidden_TD, chosen = echo.hidden(ids_T), echo.choose(ids_T)
        assert chosen is not None
        found_TD = program_of(echo.hidden).run(step_of(ids_T))[0]
        return hidden_TD, found_TD, chosen, program_of(echo.choose).bind(step_of(ids_T)).run()

    results = run_ranks(size, run)
    for result in results:
        assert not isinstance(result, BaseException), result
        hidden_TD, found_TD, chosen, found = result
        assert torch.equal(found_TD.view(torch.int32), hidden_TD.view(torch.int32))
        assert torch.equal(found.has_failed_R, chosen.has_failed_R)
        is_good_R = ~chosen.has_failed_R
        assert torch.equal(found.token_ids_R[is_good_R], chosen.token_ids_R[is_good_R])
        assert torch.equal(chosen.token_ids_R, results[0][2].token_ids_R)  # type: ignore[index]
        if form == "plain" and num_rows > 1:
            assert found.token_ids_R[0] == 3
            assert found.has_failed_R[-1]


def test_products_of_split_inputs_are_added_up_inside_of_a_program() -> None:
    torch.manual_seed(1)
    weight_OI, table_VD = torch.randn(WIDTH, WIDTH), torch.randn(VOCAB_SIZE, WIDTH // 2)
    ids_T = torch.randint(VOCAB_SIZE, (300,), dtype=torch.int32)
    parallels = parallel_contexts(2)

    def run(rank: int) -> tuple[Tensor, Tensor]:
        down = RowParallelLinear(WIDTH, WIDTH, bias=False, parallel=parallels[rank])
        down.slots()["weight"].load(weight_OI)
        process_weights_after_loading(torch.nn.ModuleList([down]))

        def forward(ids_T: Tensor) -> Tensor:
            assert NATIVE is not None
            return down(NATIVE.lookup(ids_T, table_VD), NO_CONTEXT)  # type: ignore[no-any-return]

        return forward(ids_T), program_of(forward).run(step_of(ids_T))[0]

    expected_TO = table_VD[ids_T.long()] @ (weight_OI[:, : WIDTH // 2] + weight_OI[:, WIDTH // 2 :]).T
    for result in run_ranks(2, run):
        assert not isinstance(result, BaseException), result
        assert torch.equal(*result)
        torch.testing.assert_close(result[0], expected_TO, rtol=1e-4, atol=1e-4)


def embedded(parallel: ParallelState) -> NativeProgram:
    embedding = VocabEmbedding(VOCAB_SIZE, WIDTH, parallel=parallel)
    embedding.slots()["weight"].load(torch.ones(VOCAB_SIZE, WIDTH))
    return program_of(lambda ids_T: embedding(ids_T, NO_CONTEXT))


def test_a_rank_that_does_not_come_is_named_by_a_program_too() -> None:
    parallels = parallel_contexts(2, timeout_s=1.0)

    def run(rank: int) -> None:
        ids_T = torch.zeros(3, dtype=torch.int32)
        program = embedded(parallels[rank])
        program.run(step_of(ids_T))
        if rank == 1:
            return
        begin = time.monotonic()
        with pytest.raises(WaitTimeout, match=r"Rank 0 waited 1 s in all_reduce \(call 2 of its .* for rank 1,"):
            program.run(step_of(ids_T))
        assert time.monotonic() - begin >= 1.0
        with pytest.raises(RanksDisagree, match=r"cannot go on in all_reduce, since all_reduce \(call 2"):
            program.run(step_of(ids_T))
        with pytest.raises(RanksDisagree, match="cannot go on in broadcast"):
            parallels[rank].tensor.broadcast(torch.zeros(3))

    assert run_ranks(2, run) == [None] * 2


def test_ranks_whose_programs_have_other_rows_are_told() -> None:
    parallels = parallel_contexts(2)

    def run(rank: int) -> None:
        ids_T = torch.zeros(3 + rank, dtype=torch.int32)
        GroupAgreement(parallels[rank].tensor).on_step(SchedulerOutput(step_id=17))
        embedded(parallels[rank]).run(step_of(ids_T))

    for rank, error in enumerate(run_ranks(2, run)):
        assert isinstance(error, RanksDisagree), error
        assert f"Rank {rank} is in all_reduce (call 2 of its group of 2, step 17)" in str(error)
        assert f"torch.float32 [{3 + rank}, {WIDTH}], while rank {1 - rank} makes another call" in str(error)


@pytest.mark.parametrize("bad", [-1, VOCAB_SIZE])
def test_tokens_that_no_rank_has_are_refused(bad: int) -> None:
    parallels = parallel_contexts(2)

    def run(rank: int) -> None:
        ids_T = torch.tensor([0, bad], dtype=torch.int32)
        embedded(parallels[rank]).run(step_of(ids_T))

    for error in run_ranks(2, run):
        assert isinstance(error, IndexError)
        assert f"row {bad} of a table of {VOCAB_SIZE} rows" in str(error)
