"""Output processor: tokens of a step become text, log-probabilities, metrics and ends of each request."""

from __future__ import annotations

import time
from collections import deque

import pytest

from penstock.contract import ArrayBytes, LogprobsLists, SamplingParams
from penstock.engine.messages import EngineRequest
from penstock.engine.output.output_processor import OutputProcessor
from penstock.engine.output.outputs import RequestMetrics
from penstock.engine.output.progress import Inbox, Progress, RequestProgress
from penstock.errors import InvalidRequest
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from support.fake_engine import byte_level_tokenizer, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_level_tokenizer()))


@pytest.fixture
def processor(tokenizer: Tokenizer) -> OutputProcessor:
    return OutputProcessor(tokenizer)


def request(req_id: str = "r", **params: object) -> EngineRequest:
    sampling_params = SamplingParams(seed=0, **params)  # type: ignore[arg-type]
    return EngineRequest(req_id=req_id, prompt_token_ids=[0, 40], sampling_params=sampling_params, arrival_time=100.0)


def add(processor: OutputProcessor, **params: object) -> RequestProgress:
    return follow(processor, request(**params), deque())


def follow(processor: OutputProcessor, followed: EngineRequest, inbox: Inbox) -> RequestProgress:
    progress, _ = processor.add(followed, "prompt", inbox)
    assert isinstance(progress, RequestProgress)
    return progress


def token(token_id: int, req_id: str = "r", **fields: object) -> EngineCoreOutput:
    return EngineCoreOutput(req_id=req_id, new_token_ids=[token_id], **fields)  # type: ignore[arg-type]


def end(reason: FinishReason, req_id: str = "r", **fields: object) -> EngineCoreOutput:
    return EngineCoreOutput(req_id=req_id, finish_reason=reason, **fields)  # type: ignore[arg-type]


def test_tokens_become_text_bit_by_bit(processor: OutputProcessor, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the lazy Ж dog", add_special_tokens=False)
    progress = add(processor)
    taken = []
    for token_id in ids:
        processor.process([token(token_id)])
        taken.append(progress.take_text())
    assert "".join(taken) == progress.text == "the lazy Ж dog"
    assert "" in taken  # the first half of Ж
    assert progress.take_text() == ""


def test_text_waits_until_it_is_taken(processor: OutputProcessor, tokenizer: Tokenizer) -> None:
    progress = add(processor)
    for token_id in tokenizer.encode("the fox", add_special_tokens=False):
        processor.process([token(token_id)])
    assert progress.take_text() == "the fox"


def test_several_tokens_may_come_at_once(processor: OutputProcessor, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the lazy dog", add_special_tokens=False)
    progress = add(processor)
    processor.process([EngineCoreOutput(req_id="r", new_token_ids=ids, finish_reason=FinishReason.LENGTH)])
    assert progress.output().outputs[0].text == "the lazy dog"


def test_the_end_gives_what_was_held_back(processor: OutputProcessor, tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("Ж", add_special_tokens=False)[0]
    progress = add(processor)
    processor.process([token(half, finish_reason=FinishReason.LENGTH)])
    assert progress.text == "\ufffd"


def test_a_stop_token_is_among_the_ids_but_not_in_the_text(processor: OutputProcessor, tokenizer: Tokenizer) -> None:
    the, fox = tokenizer.encode("the", add_special_tokens=False), tokenizer.encode(" fox", add_special_tokens=False)
    progress = add(processor, stop_token_ids=(fox[-1],))
    for token_id in the + fox[:-1]:
        processor.process([token(token_id)])
    processor.process([token(fox[-1], finish_reason=FinishReason.STOP, stop_reason=fox[-1])])
    completion = progress.output().outputs[0]
    assert completion.token_ids == the + fox
    assert completion.text == tokenizer.decode(the + fox[:-1])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", fox[-1])


def test_the_last_token_is_in_the_text_when_the_length_ended_it(processor: OutputProcessor) -> None:
    progress = add(processor)
    processor.process([token(40, finish_reason=FinishReason.LENGTH)])
    assert progress.output().outputs[0].text != ""
    assert progress.output().outputs[0].finish_reason == "length"


def test_an_output_is_a_snapshot(processor: OutputProcessor) -> None:
    progress = add(processor, logprobs=1)
    rows = LogprobsLists(logprob_token_ids=[[41, 42]], logprobs=[[-2.0, -1.0]], sampled_token_ranks=[2])
    processor.process([token(41, new_logprobs=rows)])
    before = progress.output()
    processor.process([token(41, new_logprobs=rows, finish_reason=FinishReason.LENGTH)])
    assert not before.finished
    assert before.outputs[0].finish_reason is None
    assert len(before.outputs[0].token_ids) == len(before.outputs[0].logprobs or []) == 1
    assert before.metrics.num_generated_tokens == 1
    assert progress.output().metrics.num_generated_tokens == 2


def test_a_failed_request_keeps_its_text_and_has_its_error(processor: OutputProcessor) -> None:
    progress = add(processor)
    processor.process([token(40)])
    text = progress.text
    processor.process([end(FinishReason.ERROR, error="the logits are NaN")])
    output = progress.output()
    assert output.finished
    assert output.outputs[0].finish_reason == "error"
    assert output.error == "the logits are NaN"
    assert output.outputs[0].text == text != ""


def test_logprobs_are_cut_to_what_each_request_asked_for(processor: OutputProcessor, tokenizer: Tokenizer) -> None:
    columns = [50, 60, 61, 62]
    rows = LogprobsLists(logprob_token_ids=[columns], logprobs=[[-5.0, -1.0, -2.0, -3.0]], sampled_token_ranks=[9])
    kept = {}
    for number in (0, 2, 3):
        inbox: deque[Progress] = deque()
        progress = follow(processor, request(str(number), logprobs=number), inbox)
        processor.process([token(50, str(number), new_logprobs=rows)])
        logprobs = progress.output().outputs[0].logprobs
        assert logprobs is not None
        kept[number] = logprobs[0]
    assert {number: list(row) for number, row in kept.items()} == {0: [50], 2: [50, 60, 61], 3: columns}
    assert [(value.logprob, value.rank) for value in kept[3].values()] == [(-5.0, 9), (-1.0, 1), (-2.0, 2), (-3.0, 3)]
    assert kept[3][60].decoded_token == tokenizer.token_text(60)


def test_a_sampled_token_among_the_likeliest_is_listed_once(processor: OutputProcessor) -> None:
    progress = add(processor, logprobs=2)
    rows = LogprobsLists(logprob_token_ids=[[60, 61, 60]], logprobs=[[-2.0, -1.0, -2.0]], sampled_token_ranks=[2])
    processor.process([token(60, new_logprobs=rows)])
    (row,) = progress.output().outputs[0].logprobs or []
    assert [(token_id, value.rank) for token_id, value in row.items()] == [(60, 2), (61, 1)]


def test_logprobs_add_up_and_are_absent_unless_asked_for(processor: OutputProcessor) -> None:
    asked, other = add(processor, logprobs=0), follow(processor, request("other"), deque())
    row = LogprobsLists(logprob_token_ids=[[60, 61]], logprobs=[[-1.5, -1.0]], sampled_token_ranks=[2])
    for _ in range(2):
        processor.process([token(60, new_logprobs=row), token(60, "other", new_logprobs=row)])
    assert asked.output().outputs[0].cumulative_logprob == -3.0
    assert other.output().outputs[0].cumulative_logprob is None
    assert other.output().outputs[0].logprobs is None


def test_an_output_of_what_is_new_has_each_row_of_logprobs_once(processor: OutputProcessor) -> None:
    progress = add(processor, logprobs=0)
    new = []
    for number in (41, 42, 43):
        row = LogprobsLists(logprob_token_ids=[[number]], logprobs=[[-1.0]], sampled_token_ranks=[1])
        processor.process([token(number, new_logprobs=row)])
        # Two tokens come with the second output that is taken.
        if number != 42:
            new.append([list(row) for row in progress.take_output().outputs[0].logprobs or []])
    assert new == [[[41]], [[42], [43]]]
    assert progress.take_output().outputs[0].logprobs == []


def test_metrics_have_the_times_of_a_request(processor: OutputProcessor) -> None:
    progress = add(processor)
    start = time.monotonic()
    processor.process([token(40, first_scheduled_time=103.0, num_cached_tokens=16)])
    processor.process([token(40)])
    processor.process([token(40, first_scheduled_time=103.0, num_cached_tokens=16, num_preemptions=2)])
    processor.process([token(40, finish_reason=FinishReason.LENGTH)])
    output = progress.output()
    metrics = output.metrics
    assert output.num_cached_tokens == 16
    assert (metrics.arrival_time, metrics.first_scheduled_time) == (100.0, 103.0)
    assert metrics.time_in_queue_s == 3.0
    assert (metrics.num_generated_tokens, metrics.num_preemptions) == (4, 2)
    assert metrics.first_token_time is not None
    assert metrics.last_token_time is not None
    assert metrics.finished_time is not None
    assert start <= metrics.first_token_time <= metrics.last_token_time <= metrics.finished_time <= time.monotonic()


def test_spans_of_time_follow_from_the_metrics() -> None:
    metrics = RequestMetrics(
        arrival_time=1.0,
        first_token_time=1.5,
        last_token_time=3.5,
        finished_time=4.0,
        num_generated_tokens=5,
        decoding_s=2.0,
    )
    assert (metrics.time_to_first_token_s, metrics.time_per_output_token_s, metrics.latency_s) == (0.5, 0.5, 3.0)
    metrics.num_generated_tokens = 1
    assert metrics.time_per_output_token_s is None
    assert RequestMetrics(arrival_time=1.0).latency_s is None


def test_each_consumer_gets_its_own_requests(processor: OutputProcessor) -> None:
    mine: deque[Progress] = deque()
    yours: deque[Progress] = deque()
    processor.add(request("mine"), None, mine)
    processor.add(request("yours"), None, yours)
    processor.process([token(40, "mine"), token(40, "yours"), token(40, "unknown")])
    assert ([p.req_id for p in mine], [p.req_id for p in yours]) == (["mine"], ["yours"])


def test_finished_and_forgotten_requests_are_followed_no_longer(processor: OutputProcessor) -> None:
    finished, forgotten = add(processor), follow(processor, request("forgotten"), deque())
    processor.process([end(FinishReason.ABORT)])
    processor.forget(["forgotten", "unknown"])
    processor.process([token(40), token(40, "forgotten")])
    assert finished.token_ids == forgotten.token_ids == []
    assert finished.output().outputs[0].finish_reason == "abort"


def test_two_running_requests_cannot_share_an_id(processor: OutputProcessor) -> None:
    add(processor)
    with pytest.raises(InvalidRequest, match="'r' is that of a running request"):
        add(processor)
    processor.process([end(FinishReason.LENGTH)])
    add(processor)


def test_a_stop_string_among_several_tokens_takes_back_those_behind_it(
    processor: OutputProcessor, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("the quick brown fox", add_special_tokens=False)
    progress = add(processor, stop=["quick"], logprobs=0)
    rows = LogprobsLists(
        logprob_token_ids=[[token_id] for token_id in ids],
        logprobs=[[-1.0 - index] for index in range(len(ids))],
        sampled_token_ranks=[1] * len(ids),
    )
    together = EngineCoreOutput(req_id="r", new_token_ids=ids, new_logprobs=rows, finish_reason=FinishReason.LENGTH)
    processor.process([together])

    one_by_one = follow(processor, request("s", stop=["quick"], logprobs=0), deque())
    for index, token_id in enumerate(ids):
        row = LogprobsLists(logprob_token_ids=[[token_id]], logprobs=[[-1.0 - index]], sampled_token_ranks=[1])
        processor.process([token(token_id, "s", new_logprobs=row)])
    assert progress.output().outputs == one_by_one.output().outputs
    (completion,) = progress.output().outputs
    assert (completion.text, completion.stop_reason) == ("the ", "quick")
    assert completion.token_ids == ids[: len(completion.token_ids)]
    assert len(completion.token_ids) < len(ids)
    assert together.new_token_ids == ids


def test_what_was_pooled_is_in_the_output(processor: OutputProcessor) -> None:
    progress = add(processor)
    processor.process([end(FinishReason.STOP, pooled=ArrayBytes.of([0.5, -1.0]))])
    output = progress.output()
    assert output.finished
    assert output.pooled == [0.5, -1.0]
    (completion,) = output.outputs
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("", [], "stop")


def test_an_output_that_cannot_be_made_ends_its_request_alone(
    processor: OutputProcessor, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (the,) = tokenizer.encode("the", add_special_tokens=False)[:1]
    bad, good = follow(processor, request("bad"), deque()), follow(processor, request("good"), deque())
    processor.process([token(the, "bad"), token(the, "good")])
    advance = RequestProgress.advance

    def failing(progress: RequestProgress, output: EngineCoreOutput, now: float) -> None:
        if progress is bad:
            raise UnicodeDecodeError("utf-8", b"", 0, 1, "a defect")
        advance(progress, output, now)

    monkeypatch.setattr(RequestProgress, "advance", failing)
    follow_up = processor.process([token(the, "bad"), token(the, "good")])
    assert follow_up is not None
    assert follow_up.req_ids_to_abort == ["bad"]
    assert (bad.finish_reason, good.finish_reason) == (FinishReason.ERROR, None)
    assert "The output of this request failed with UnicodeDecodeError" in (bad.output().error or "")
    processor.process([end(FinishReason.LENGTH, "good")])
    assert good.output().outputs[0].token_ids == [the, the]
