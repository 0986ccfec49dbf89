"""Parallel sampling over a fake core with scripted tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.config import EngineConfig
from penstock.contract import SamplingParams
from penstock.engine.messages import EngineRequest
from penstock.engine.output.fan_out import merged_metrics, sample_requests
from penstock.engine.output.output_processor import OutputProcessor
from penstock.engine.output.outputs import RequestMetrics
from penstock.engine.output.progress import Progress
from penstock.engine.session import Session
from penstock.errors import ContextTooLong, InvalidRequest
from support.fake_engine import FakeCore, write_model

LONG_PROMPT = list(range(9, 40))


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
def session(tmp_path: Path, core: FakeCore) -> Iterator[Session]:
    config = EngineConfig.create(str(write_model(tmp_path / "model")), block_size=16)
    session = Session(config, load_core=lambda config: core)
    yield session
    session.close()


def serve(session: Session, prompt: list[int], params: SamplingParams) -> list[Progress]:
    return list(session.run([session.accept(prompt, params)]))


def test_all_outputs_come_in_one_and_finish_together(session: Session) -> None:
    request = session.accept(LONG_PROMPT, SamplingParams(n=3, seed=5, max_tokens=4))
    steps = [(progress.finished, progress) for progress in session.run([request])]
    assert [finished for finished, _ in steps] == [False, False, False, False, True]
    output = steps[-1][1].output()
    assert output.finished
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert [len(completion.token_ids) for completion in output.outputs] == [4, 4, 4]
    assert output.request_id == "0"


def test_the_samples_differ_and_the_first_is_that_of_the_seed_alone(session: Session) -> None:
    progress = serve(session, LONG_PROMPT, SamplingParams(n=4, seed=5, max_tokens=6))[-1]
    alone = serve(session, LONG_PROMPT, SamplingParams(seed=5, max_tokens=6))[-1].output().outputs[0]
    texts = [tuple(completion.token_ids) for completion in progress.output().outputs]
    assert texts[0] == tuple(alone.token_ids)
    assert len(set(texts)) == 4
    neighbour = serve(session, LONG_PROMPT, SamplingParams(seed=6, max_tokens=6))[-1].output().outputs[0]
    assert tuple(neighbour.token_ids) not in texts


def test_the_others_start_when_the_first_has_computed_the_prompt(session: Session, core: FakeCore) -> None:
    seen = []
    core.on_step = lambda step: seen.append(len(core.running))
    serve(session, LONG_PROMPT, SamplingParams(n=3, seed=5, max_tokens=4))
    assert seen == [1, 3, 3, 3, 2]


def test_a_prompt_without_a_block_to_share_is_computed_by_all_at_once(session: Session, core: FakeCore) -> None:
    seen = []
    core.on_step = lambda step: seen.append(len(core.running))
    serve(session, LONG_PROMPT[:16], SamplingParams(n=3, seed=5, max_tokens=4))
    assert seen == [3, 3, 3, 3]


def test_without_a_prefix_cache_no_sample_waits(tmp_path: Path, core: FakeCore) -> None:
    config = EngineConfig.create(str(write_model(tmp_path / "plain")), enable_prefix_caching=False)
    session = Session(config, load_core=lambda config: core)
    request = session.accept(LONG_PROMPT, SamplingParams(n=3, max_tokens=4))
    next(session.run([request]))
    assert len(core.added) == 3


def test_prompt_logprobs_are_asked_for_once(session: Session, core: FakeCore) -> None:
    accepted = session.accept(LONG_PROMPT, SamplingParams(n=2, seed=5))
    params = SamplingParams(n=2, seed=5, prompt_logprobs=1)
    requests = sample_requests(msgspec.structs.replace(accepted.request, sampling_params=params))
    assert [request.sampling_params.prompt_logprobs for request in requests] == [1, None]
    assert [request.sampling_params.n for request in requests] == [1, 1]


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_leaving_early_ends_every_sample(session: Session, core: FakeCore, num_steps: int) -> None:
    steps = session.run([session.accept(LONG_PROMPT, SamplingParams(n=3, max_tokens=9))])
    for _ in range(num_steps):
        next(steps)
    steps.close()
    assert not core.running
    assert {request.req_id for request in core.added} == set(core.aborted)


def test_a_sample_that_fails_does_not_stop_the_others(session: Session, core: FakeCore) -> None:
    core.refuses = lambda request: request.req_id.endswith("#1")
    output = serve(session, LONG_PROMPT, SamplingParams(n=3, max_tokens=2))[-1].output()
    assert [completion.finish_reason for completion in output.outputs] == ["length", "error", "length"]
    assert output.error == "The cache is too small for this one."


def test_a_first_sample_that_fails_lets_the_others_start(session: Session, core: FakeCore) -> None:
    core.failing, core.fail_after = {LONG_PROMPT[0]}, 0
    output = serve(session, LONG_PROMPT, SamplingParams(n=3, max_tokens=2))[-1].output()
    assert {completion.finish_reason for completion in output.outputs} == {"error"}
    assert len(core.added) == 3


def test_a_request_that_the_core_refuses_leaves_no_sample(session: Session, core: FakeCore) -> None:
    core.refuses = lambda request: request.req_id.endswith("#2")
    with pytest.raises(ContextTooLong):
        serve(session, LONG_PROMPT[:8], SamplingParams(n=3, max_tokens=2))
    assert not core.running
    core.refuses = lambda request: False
    assert serve(session, LONG_PROMPT[:8], SamplingParams(n=3, max_tokens=2))[-1].finished


def test_a_sample_never_takes_the_name_of_another_request(session: Session) -> None:
    processor = OutputProcessor(session.tokenizer)
    params = SamplingParams(n=2, seed=1)
    other = EngineRequest(req_id="a#1", prompt_token_ids=[9], sampling_params=SamplingParams(seed=1))
    processor.add(other, None, deque())
    with pytest.raises(InvalidRequest, match="request_id='a' with n=2 needs the names 'a#0' to 'a#1'"):
        processor.add(msgspec.structs.replace(other, req_id="a", sampling_params=params), None, deque())
    assert processor.forget(["a", "a#1"]) == ["a#1"]


def test_metrics_are_those_of_all_samples() -> None:
    first = RequestMetrics(
        arrival_time=1.0,
        first_scheduled_time=2.0,
        first_token_time=3.0,
        last_token_time=5.0,
        finished_time=5.0,
        num_preemptions=1,
        num_generated_tokens=5,
        num_cached_tokens=16,
        decoding_s=2.0,
    )
    second = RequestMetrics(
        arrival_time=1.0,
        first_scheduled_time=3.0,
        first_token_time=4.0,
        last_token_time=10.0,
        finished_time=11.0,
        num_generated_tokens=3,
        decoding_s=6.0,
    )
    merged = merged_metrics([first, second])
    assert (merged.time_in_queue_s, merged.time_to_first_token_s, merged.latency_s) == (1.0, 2.0, 10.0)
    assert (merged.num_generated_tokens, merged.num_preemptions, merged.num_cached_tokens) == (8, 1, 16)
    # Four intervals of half a second and two of three.
    assert merged.time_per_output_token_s == pytest.approx((4 * 0.5 + 2 * 3.0) / 6)
    waiting = RequestMetrics(arrival_time=1.0)
    assert merged_metrics([first, waiting]).finished_time is None
    assert merged_metrics([first, waiting]).time_per_output_token_s == 0.5
