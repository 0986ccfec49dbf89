"""Encoder-decoder models: tokens and log-probabilities of Transformers in float32, however work is cut into steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.plugins import assert_equal
from penstock.contract import CrossAttentionSpec, Parts, RpcCall
from penstock.device.tensor_memory import TensorMemory
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.replay import replay
from penstock.errors import ContextTooLong, InvalidRequest
from penstock.features.encoder_decoder.messages import SourcePart
from penstock.features.encoder_decoder.worker import SourceEncoder
from penstock.kernels.native import NATIVE
from support.checkpoints import save_checkpoint
from support.disturbed_workers import FailingWorker
from support.encoder_decoders import (
    ASKED,
    FAMILIES,
    START,
    Asked,
    AskedOfAudio,
    asked_of,
    assert_as_the_oracle,
    run,
    tiny_encoder_decoder,
    write_encoder_decoder,
)
from support.engines import Result, add, greedy, make_core, owner_of

OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4}
has_equal_bits = pytest.mark.skipif(NATIVE is None, reason="torch's own kernels do not promise it")
# Requests in chunks, preempted, and in steps that are scheduled before their tokens are known.
CIRCUMSTANCES: list[dict[str, Any]] = [
    {},
    {"async_scheduling": False},
    {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    {"num_blocks": 27, "max_model_len": 32},
]


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder_decoder(tmp_path_factory.mktemp("bart"))


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Result]]:
    """A T5 model, and each request by itself, layer by layer."""
    folder = write_encoder_decoder(tmp_path_factory.mktemp("t5"), "t5")
    core = make_core(folder, **OPTIONS, fast_paths="off")
    try:
        return folder, [run(core, [asked])[0] for asked in ASKED]
    finally:
        core.close()


@pytest.fixture(scope="module")
def alone(bart: Path) -> list[Result]:
    """Each request by itself, layer by layer."""
    core = make_core(bart, **OPTIONS, fast_paths="off")
    try:
        return [run(core, [asked])[0] for asked in ASKED]
    finally:
        core.close()


def encoder_of(core: EngineCore) -> SourceEncoder:
    return owner_of(core, SourceEncoder)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_log_probabilities_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    oracle = tiny_encoder_decoder(family)
    save_checkpoint(oracle, tmp_path)
    core = make_core(tmp_path, **OPTIONS)
    for asked, result in zip(asked_of(family), run(core, asked_of(family)), strict=True):
        assert_as_the_oracle(oracle, asked, result)
    core.close()


@has_equal_bits
@pytest.mark.parametrize("options", CIRCUMSTANCES, ids=str)
def test_mixed_batches_have_the_bits_of_requests_alone(
    bart: Path, alone: list[Result], options: dict[str, Any]
) -> None:
    core = make_core(bart, **OPTIONS, **options)
    results = run(core, ASKED)
    assert_equal(results, alone)
    num_preemptions = core.scheduler.num_preemptions
    assert (num_preemptions > 0) is ("num_blocks" in options)
    # A preempted request's source is encoded again.
    assert encoder_of(core).num_encoded == len(ASKED) + num_preemptions
    assert core.scheduler.kv_cache.num_used_blocks == 0
    core.scheduler.kv_cache.check_integrity()
    core.close()


@has_equal_bits
def test_biases_by_distance_depend_on_no_other_request_and_no_chunk(t5: tuple[Path, list[Result]]) -> None:
    folder, alone = t5
    core = make_core(folder, **OPTIONS, max_num_batched_tokens=7, max_num_seqs=4)
    assert_equal(run(core, ASKED), alone)
    core.close()


@pytest.mark.one_path(reason="recorded programs belong to the fast paths")
@pytest.mark.parametrize("family", ["bart", "t5", "whisper"])
@pytest.mark.skipif(NATIVE is None, reason="programs are made of the C++ kernels")
def test_the_decoder_is_one_program(family: str, tmp_path: Path) -> None:
    core = make_core(write_encoder_decoder(tmp_path, family), **OPTIONS)
    run(core, asked_of(family), logprobs=None)

    def segments(worker: Any) -> set[int]:
        recorded = worker.runner.execution.programs._recorded.values()
        return {program.num_segments for program in recorded if program is not None}

    assert core.collective_rpc(RpcCall(segments)) == [{1}]
    core.close()


@pytest.mark.one_path(reason="the encoder runs layer by layer in either case")
@pytest.mark.parametrize("family", ["bart", "t5", "umt5", "whisper"])
def test_the_plan_has_room_for_the_longest_source(family: str, tmp_path: Path) -> None:
    core = make_core(write_encoder_decoder(tmp_path, family, d_model=128), **OPTIONS)
    encoder = encoder_of(core)
    plan = core.collective_rpc(RpcCall("determine_available_memory"))[0]
    part = AskedOfAudio(torch.randn(20, 60)).part() if family == "whisper" else Asked([5] * 64).part()
    with TensorMemory() as memory:
        encoder._encode(part)
    assert memory.peak_bytes <= plan["encoder_activations"] <= 4 * memory.peak_bytes
    core.close()


def test_a_request_holds_the_blocks_of_its_own_source(bart: Path) -> None:
    core = make_core(bart, **OPTIONS)
    (group,) = [one for one in core.scheduler.kv_cache.groups if isinstance(one.spec, CrossAttentionSpec)]
    for number, asked in enumerate(ASKED[:2]):
        add(core, f"r{number}", asked.decoder, greedy(3), parts=Parts.of([asked.part()]))
    core.step()
    held = [core.scheduler.kv_cache.get_block_ids(f"r{number}")[group.group_id] for number in range(2)]
    assert [len(blocks) for blocks in held] == [2, 5]
    core.close()


def test_a_step_encodes_no_more_than_it_has_tokens(bart: Path) -> None:
    core = make_core(bart, **OPTIONS, max_num_batched_tokens=64)
    for number, asked in enumerate([ASKED[4], *ASKED[:2]]):
        add(core, f"r{number}", asked.decoder, greedy(3), parts=Parts.of([asked.part()]))
    admitted = [[new.req_id for new in core.scheduler.schedule().scheduled_new_reqs]]
    assert admitted == [["r0"]]
    core.close()


def test_another_source_changes_what_is_generated(bart: Path, alone: list[Result]) -> None:
    core = make_core(bart, **OPTIONS)
    (other,) = run(core, [Asked(ASKED[1].source[::-1], ASKED[1].decoder)])
    assert other.logprobs != alone[1].logprobs
    # Equal decoder tokens share no prefix.
    long = [Asked(ASKED[number].source, [START, *range(5, 45)]) for number in (0, 1)]
    assert [one.num_cached_tokens for one in (*run(core, long[:1]), *run(core, long[1:]))] == [0, 0]
    core.close()


class FailingInADecode(FailingWorker):
    """Fails in a step, once."""


@has_equal_bits
def test_requests_go_on_in_a_worker_that_replaces_a_failed_one(bart: Path, alone: list[Result]) -> None:
    FailingInADecode.fails_at = {("execute", 5)}
    core = make_core(bart, **OPTIONS, worker_cls=f"{__name__}.FailingInADecode")
    assert_equal(run(core, ASKED), alone)
    assert not FailingInADecode.fails_at
    core.close()


@pytest.mark.parametrize("options", [{}, {"record_window_s": 0.02}], ids=str)
@pytest.mark.each_value_quick
def test_recordings_are_replayed_with_their_sources(bart: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    file = tmp_path / "steps.rec"
    core = make_core(bart, **OPTIONS, **options, record=str(file), record_prompts=True)
    for _ in range(4):
        run(core, ASKED)
    core.close()
    for recording in [file, *tmp_path.glob("steps.rec.*")]:
        report = replay(recording)
        assert report.is_equal, report.differences
        assert report.num_steps > 0


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        (None, InvalidRequest, "has no input for the encoder"),
        (Parts.of([SourcePart(length=65, token_ids=[5] * 65)]), ContextTooLong, "has 65 positions.* takes 64"),
    ],
)
def test_requests_that_no_encoder_takes_are_refused(
    bart: Path, parts: Parts | None, error: type[Exception], message: str
) -> None:
    core = make_core(bart, **OPTIONS)
    with pytest.raises(error, match=message):
        add(core, "a", [START], greedy(3), parts=parts)
    assert not core.has_unfinished_requests()
    core.close()


@has_equal_bits
def test_a_wrong_source_ends_its_own_request_only(bart: Path, alone: list[Result]) -> None:
    core = make_core(bart, **OPTIONS)
    wrong = Asked([5, 2000], [START])
    results = run(core, [ASKED[0], wrong, ASKED[1]])
    assert_equal([results[0], results[2]], alone[:2])
    assert "beyond the vocabulary" in str(results[1].error)
    core.close()


@pytest.mark.slow
def test_ranks_of_a_tensor_parallel_group_give_the_tokens_of_transformers(tmp_path: Path) -> None:
    oracle = tiny_encoder_decoder("bart")
    save_checkpoint(oracle, tmp_path)
    core = make_core(tmp_path, **OPTIONS, tensor_parallel_size=2)
    for asked, result in zip(ASKED, run(core, ASKED), strict=True):
        assert_as_the_oracle(oracle, asked, result)
    core.close()
