"""End tokens of a request, among one or several new tokens, against the rules written out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.contract import SamplingParams
from penstock.scheduler.outputs import FinishReason
from penstock.scheduler.request import Request
from penstock.scheduler.results import tokens_to_end

EOS, STOP, BOTH, OTHER = 1, 2, 3, 4
PROMPT = [EOS, STOP]
TOKENS = st.lists(st.sampled_from([EOS, STOP, BOTH, OTHER]), max_size=6)


def end_of(
    output: list[int], *, ignore_eos: bool, min_tokens: int, length_limit: int
) -> tuple[FinishReason | None, int | None]:
    """Why a request with this output ends now."""
    may_stop = len(output) >= min_tokens
    if may_stop and output[-1] in (EOS, BOTH) and not ignore_eos:
        return FinishReason.STOP, None
    if may_stop and output[-1] in (STOP, BOTH):
        return FinishReason.STOP, output[-1]
    if len(PROMPT) + len(output) >= length_limit:
        return FinishReason.LENGTH, None
    return None, None


@given(
    before=TOKENS,
    new=TOKENS.filter(bool),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 9),
    length_limit=st.integers(3, 12),
)
def test_a_request_takes_the_tokens_up_to_its_end(
    before: list[int], new: list[int], ignore_eos: bool, min_tokens: int, length_limit: int
) -> None:
    params = SamplingParams(
        seed=0, stop_token_ids=[STOP, BOTH], ignore_eos=ignore_eos, min_tokens=min_tokens, max_tokens=None
    )
    request = Request("r", PROMPT, params, eos_token_ids=frozenset({EOS, BOTH}), output_token_ids=before)
    request.length_limit = length_limit
    for num_taken in range(1, len(new) + 1):
        end = end_of(before + new[:num_taken], ignore_eos=ignore_eos, min_tokens=min_tokens, length_limit=length_limit)
        if end[0] is not None:
            break

    assert tokens_to_end(request, new) == (new[:num_taken], *end)
