"""Admission to a bounded queue: the samples of a prompt are admitted or refused together."""

from __future__ import annotations

import pytest

from penstock import SamplingParams
from penstock.config.queue import QueueLimits
from penstock.engine.messages import EngineRequest
from penstock.engine.output.fan_out import sample_requests
from penstock.engine.processes.admission import Admission
from penstock.errors import InvalidParameter, Overloaded


def samples_of(req_id: str, n: int) -> list[EngineRequest]:
    params = SamplingParams(n=n, seed=0)
    return sample_requests(EngineRequest(req_id=req_id, prompt_token_ids=[1], sampling_params=params))


def test_all_samples_need_room_in_the_queue() -> None:
    admission = Admission(QueueLimits(max_num_queued_requests=4), capacity=2)
    first, *others = samples_of("a", 4)
    admission.check(first)
    for sample in (first, *others):
        admission.check(sample)
        admission.add(sample)
    admission.check(samples_of("b", 2)[0])
    with pytest.raises(Overloaded, match="2 requests are queued, this request has 3 choices, and max_num_queued_reque"):
        admission.check(samples_of("b", 3)[0])
    assert admission.num_requests == 4


def test_more_samples_than_the_queue_ever_holds_are_invalid() -> None:
    admission = Admission(QueueLimits(max_num_queued_requests=4), capacity=2)
    with pytest.raises(
        InvalidParameter, match="The request has 7 choices, more than run and wait at once. Allowed: at most 6"
    ):
        admission.check(samples_of("a", 7)[0])
    Admission(QueueLimits(max_num_queued_requests=None), capacity=2).check(samples_of("a", 700)[0])
