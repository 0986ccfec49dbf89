"""Workers that keep some tokens each of what is between layers give the tokens of those that keep all."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_tensor_parallel import make
from torch import Tensor

from penstock.contract import RpcCall
from penstock.errors import UnsupportedFeature
from penstock.parallel.scattered_rows import ScatteredRows
from penstock.worker import WorkerBase
from support.arrangements import PARAMS, PROMPTS, VOCAB_SIZE, assert_same
from support.checkpoints import tiny_checkpoint
from support.engines import run


def counting_scattered_steps(worker: WorkerBase) -> None:
    """From now on, `num_scattered` says how many steps this worker's model scattered, in programs or not."""
    own = ScatteredRows.own
    worker.num_scattered = 0  # type: ignore[attr-defined]

    def counting(rows: ScatteredRows, whole_TD: Tensor) -> Tensor:
        worker.num_scattered += 1  # type: ignore[attr-defined]
        return own(rows, whole_TD)

    ScatteredRows.own = counting  # type: ignore[method-assign]


def scattered_steps(worker: WorkerBase) -> int:
    return worker.num_scattered  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("family", "size", "least"),
    [
        ("llama", 2, 1),
        ("llama", 4, 8),
        ("gemma3", 2, 8),
        ("olmo2", 2, 8),
    ],
)
@pytest.mark.slow
def test_scattered_hidden_states_give_the_same_tokens(family: str, size: int, least: int, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, family, vocab_size=VOCAB_SIZE, head_dim=16)
    results = []
    for options in ({}, {"enable_sp": True, "sp_min_token_num": least}):
        core = make(tmp_path, size, **options)
        try:
            core.collective_rpc(RpcCall(counting_scattered_steps))
            results.append(run(core, PROMPTS, PARAMS) + run(core, PROMPTS, PARAMS))
            counts = core.collective_rpc(RpcCall(scattered_steps))
        finally:
            core.close()
        assert len(set(counts)) == 1
        assert (counts[0] > 0) == bool(options)
    assert_same(results[1], results[0])


def test_models_that_keep_all_rows_refuse_by_name(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "gpt2", vocab_size=VOCAB_SIZE)
    with pytest.raises(UnsupportedFeature, match="enable_sp with GPT2LMHeadModel: its residual stream is not split"):
        make(tmp_path, 2, enable_sp=True)
