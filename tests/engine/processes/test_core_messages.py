"""Messages between clients and cores survive encoding, and no other bytes decode as one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract import ArrayBytes, ContractVersionError, LogprobsLists, SamplingParams, decode, encode
from penstock.engine import messages
from penstock.engine.messages import Answer, EngineRequest, FromCore, ToCore
from penstock.engine.statistics.step_log import StepRecord
from penstock.engine.statistics.step_phases import StepPhase
from penstock.errors import WorkerError, error_as_data, error_from_data
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason, SchedulerStats

_ids = st.lists(st.integers(0, 2**31 - 1), max_size=4)
_floats = st.floats(allow_nan=False)
_rows = st.builds(
    LogprobsLists,
    logprob_token_ids=st.lists(_ids, max_size=2),
    logprobs=st.lists(st.lists(_floats, max_size=3), max_size=2),
    sampled_token_ranks=_ids,
)
_params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 5),
    seed=st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(st.text(min_size=1), max_size=2).map(tuple),
    logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=2),
    allowed_token_ids=st.none() | _ids.filter(bool).map(tuple),
    extra_args=st.none() | st.dictionaries(st.text(), st.booleans() | st.integers(-9, 9) | _ids, max_size=2),
)
_requests = st.builds(
    EngineRequest,
    req_id=st.text(),
    prompt_token_ids=_ids,
    sampling_params=_params,
    eos_token_ids=st.frozensets(st.integers(0, 99), max_size=3),
    arrival_time=_floats,
    priority=st.integers(-(2**63), 2**63 - 1),
    cache_salt=st.none() | st.text(),
    output_token_ids=_ids,
)
_outputs = st.builds(
    EngineCoreOutput,
    req_id=st.text(),
    new_token_ids=_ids,
    new_logprobs=st.none() | _rows,
    prompt_logprobs=st.none() | _rows,
    pooled=st.none() | st.lists(_floats, max_size=3).map(ArrayBytes.of),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_reason=st.none() | st.integers(0, 99) | st.text(),
    error=st.none() | st.text(),
    num_draft_tokens=st.integers(0, 9),
    num_cached_tokens=st.integers(0, 99),
    num_preemptions=st.integers(0, 99),
    first_scheduled_time=st.none() | _floats,
)
_numbers = st.integers(0, 2**32)
_times = st.floats(0.0, 1e9)
_stats = st.builds(
    SchedulerStats,
    num_running_reqs=_numbers,
    num_waiting_reqs=_numbers,
    num_blocks=_numbers,
    num_used_blocks=_numbers,
    num_computed_tokens=_numbers,
)
_error = error_as_data(WorkerError("gone", method="get_output", rank=2, cause_type="ValueError"))
_to_core = st.one_of(
    st.builds(messages.AddRequest, call_id=_numbers, request=_requests),
    st.builds(messages.AbortRequests, call_id=_numbers, req_ids=st.lists(st.text(), max_size=3)),
    st.builds(messages.UtilityCall, call_id=_numbers, method=st.text(), arguments=st.binary()),
    st.builds(messages.CloseCore),
).map(ToCore)
_from_core = st.one_of(
    st.builds(messages.CoreStarted, max_model_len=_numbers, vocab_size=_numbers, kv_cache_bytes=_numbers),
    st.builds(messages.CoreBusy),
    st.builds(
        messages.StepOutputs,
        outputs=st.lists(_outputs, max_size=3),
        stats=st.none() | _stats,
        step_s=st.floats(0.0, 1e6),
        phase_s=st.dictionaries(st.sampled_from([phase.value for phase in StepPhase]), st.floats(0.0, 1e6)),
        num_worker_restarts=_numbers,
        recent_steps=st.lists(st.tuples(_times, _times, *[_numbers] * 4).map(lambda row: StepRecord(*row)), max_size=3),
    ),
    st.builds(
        Answer,
        call_id=_numbers,
        result=st.binary(),
        error=st.sampled_from([None, _error]),
    ),
    st.builds(messages.CoreEnded, error=st.just(_error)),
).map(FromCore)


@settings(max_examples=150, deadline=None)
@given(message=_to_core)
def test_what_a_client_says(message: ToCore) -> None:
    again = decode(encode(message), ToCore)
    assert again == message
    assert type(again.message) is type(message.message)


@settings(max_examples=150, deadline=None)
@given(message=_from_core)
def test_what_a_core_says(message: FromCore) -> None:
    again = decode(encode(message), FromCore)
    assert again == message
    assert type(again.message) is type(message.message)


def test_an_error_within_a_message_is_raised_as_it_was() -> None:
    answer = decode(encode(FromCore(Answer(call_id=1, error=_error))), FromCore).message
    assert isinstance(answer, Answer)
    assert answer.error is not None
    error = error_from_data(answer.error)
    assert isinstance(error, WorkerError)
    assert (error.method, error.rank, error.cause_type, str(error)) == ("get_output", 2, "ValueError", "gone")


def test_what_is_of_the_other_direction_is_refused() -> None:
    with pytest.raises(ContractVersionError, match="damaged FromCore"):
        decode(encode(ToCore(messages.CloseCore())), FromCore)
