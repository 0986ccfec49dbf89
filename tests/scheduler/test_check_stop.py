"""Which token ends a request, against the rules written out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.contract import SamplingParams
from penstock.scheduler.outputs import FinishReason
from penstock.scheduler.request import Request
from penstock.scheduler.results import check_stop

EOS, STOP, BOTH, OTHER = 1, 2, 3, 4


@given(
    output=st.lists(st.sampled_from([EOS, STOP, BOTH, OTHER]), min_size=1, max_size=6),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 6),
    length_limit=st.integers(3, 9),
)
def test_a_request_ends_by_its_end_tokens_and_its_length(
    output: list[int], ignore_eos: bool, min_tokens: int, length_limit: int
) -> None:
    params = SamplingParams(
        seed=0, stop_token_ids=[STOP, BOTH], ignore_eos=ignore_eos, min_tokens=min_tokens, max_tokens=None
    )
    prompt = [EOS, STOP]
    request = Request("r", prompt, params, eos_token_ids=frozenset({EOS, BOTH}))
    request.all_token_ids += output
    request.length_limit = length_limit

    may_stop = len(output) >= min_tokens
    if may_stop and output[-1] in (EOS, BOTH) and not ignore_eos:
        expected = FinishReason.STOP, None
    elif may_stop and output[-1] in (STOP, BOTH):
        expected = FinishReason.STOP, output[-1]
    elif len(prompt) + len(output) >= length_limit:
        expected = FinishReason.LENGTH, None
    else:
        expected = None, None
    assert check_stop(request) == expected
