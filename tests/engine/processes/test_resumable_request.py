"""A request that several cores continue is one request to its reader, wherever the cores were lost."""

from __future__ import annotations

import sys

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract import LogprobsLists, SamplingParams
from penstock.engine.messages import EngineRequest
from penstock.engine.processes.resumable_request import ResumableRequest
from penstock.scheduler.outputs import EngineCoreOutput

_known = st.lists(st.integers(0, 99), max_size=3)


@settings(deadline=None)
@given(
    _known,
    # By core: how many preemptions it had, what its steps brought, and which of these tell the history.
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.tuples(st.lists(st.integers(0, 99), max_size=3), st.booleans()))),
        min_size=1,
        max_size=4,
    ),
)
def test_no_output_is_lost_or_repeated(known: list[int], lives: list[tuple[int, list[tuple[list[int], bool]]]]) -> None:
    request = EngineRequest(
        req_id="a",
        prompt_token_ids=[1, 2],
        sampling_params=SamplingParams(seed=3, logprobs=1),
        priority=7,
        cache_salt="salt",
        output_token_ids=known,
    )
    kept = ResumableRequest(request)
    told: list[int] = []
    histories = []
    given = request
    for life, (num_preemptions, steps) in enumerate(lives):
        # The next core is asked for everything that the first one was asked for, behind what was told.
        assert given.output_token_ids == [*known, *told]
        assert given.is_admitted == (life > 0)
        assert msgspec.structs.replace(given, output_token_ids=known, is_admitted=False) == request
        for token_ids, tells_history in steps:
            history = {
                "num_cached_tokens": life,
                "first_scheduled_time": 5.0 + life,
                "num_preemptions": num_preemptions,
            }
            output = EngineCoreOutput(req_id="a", new_token_ids=token_ids, **(history if tells_history else {}))
            taken = kept.take(output)
            told += taken.new_token_ids
            assert (taken.first_scheduled_time is None) == (not tells_history)
            if tells_history:
                histories.append((life, num_preemptions, taken))
        given = kept.resume()
    for life, num_preemptions, taken in histories:
        first_life, _, first = histories[0]
        assert (taken.first_scheduled_time, taken.num_cached_tokens) == (5.0 + first_life, first_life)
        assert first.num_preemptions <= taken.num_preemptions
        # As many as any one core told, and one for each core that it had run in.
        assert taken.num_preemptions >= num_preemptions + (life - first_life)


def test_only_tokens_of_the_outputs_are_kept() -> None:
    rows = LogprobsLists(logprob_token_ids=[[1]], logprobs=[[-1.0]], sampled_token_ranks=[1])
    before = sys.getrefcount(rows)
    kept = ResumableRequest(EngineRequest(req_id="a", prompt_token_ids=[1, 2], sampling_params=SamplingParams(seed=3)))
    kept.take(EngineCoreOutput(req_id="a", new_token_ids=[5], prompt_logprobs=rows, first_scheduled_time=1.0))
    assert sys.getrefcount(rows) == before
