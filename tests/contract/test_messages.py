"""Messages survive the wire unchanged, and nothing else is taken for one."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock.contract as contract
from penstock.contract import ContractVersionError, SchedulerOutput, decode, encode

MESSAGES = [
    contract.NewRequestData,
    contract.CachedRequestData,
    contract.SchedulerOutput,
    contract.SampledOutput,
    contract.DraftTokenIds,
    contract.LogprobsLists,
    contract.KVCacheConfig,
]

# What msgpack can carry; NaN would not equal itself afterwards.
st.register_type_strategy(int, st.integers(-(2**63), 2**63 - 1))
st.register_type_strategy(float, st.floats(allow_nan=False))
_params = st.builds(
    contract.SamplingParams,
    temperature=st.floats(0, 5),
    top_p=st.floats(0.1, 1),
    seed=st.integers(-(2**63), 2**63 - 1),
    stop_token_ids=st.lists(st.integers(0, 9)).map(tuple),
)
_specs = st.one_of(
    st.builds(contract.FullAttentionSpec, dtype=st.just("float32")),
    st.builds(contract.SlidingWindowSpec, dtype=st.just("bfloat16")),
    st.builds(contract.MLAAttentionSpec, dtype=st.just("int8")),
    st.builds(contract.RecurrentStateSpec),
)
_groups = st.builds(contract.KVCacheGroupSpec, spec=_specs)
_new = st.builds(contract.NewRequestData, sampling_params=_params)
_strategies: dict[type, st.SearchStrategy[msgspec.Struct]] = {
    contract.NewRequestData: _new,
    contract.SchedulerOutput: st.builds(contract.SchedulerOutput, scheduled_new_reqs=st.lists(_new, max_size=3)),
    contract.KVCacheConfig: st.builds(
        contract.KVCacheConfig,
        pools=st.lists(st.builds(contract.KVCachePool), max_size=3).map(tuple),
        groups=st.lists(_groups, max_size=3).map(tuple),
    ),
}


@pytest.mark.parametrize("message_type", MESSAGES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_round_trip(message_type: type[msgspec.Struct], data: st.DataObject) -> None:
    message = data.draw(_strategies.get(message_type, st.builds(message_type)))
    again = decode(encode(message), message_type)
    assert again == message
    assert type(again) is message_type


def test_another_version_and_damaged_bytes_are_refused() -> None:
    data = encode(SchedulerOutput(step_id=3))
    newer = data[:8] + (contract.CONTRACT_VERSION + 1).to_bytes(2, "little") + data[10:]
    with pytest.raises(ContractVersionError, match=f"version {contract.CONTRACT_VERSION + 1}"):
        decode(newer, SchedulerOutput)
    with pytest.raises(ContractVersionError, match="damaged SchedulerOutput"):
        decode(data[:-1], SchedulerOutput)
    with pytest.raises(ContractVersionError, match="header is missing"):
        decode(b"hello", SchedulerOutput)


def test_descriptions_for_logs_hold_no_token() -> None:
    request = contract.NewRequestData(
        req_id="a",
        prompt_token_ids=[987654],
        prefill_token_ids=[987654, 123456],
        sampling_params=contract.SamplingParams(),
        block_ids=([1, 2],),
        num_computed_tokens=0,
    )
    text = SchedulerOutput(step_id=1, scheduled_new_reqs=[request]).anon_repr()
    assert "987654" not in text
    assert "123456" not in text
    assert "'a'" in text


def test_every_message_is_plain_data() -> None:
    for message_type in MESSAGES:
        assert issubclass(message_type, msgspec.Struct)
        assert not dataclasses.is_dataclass(message_type)
        assert msgspec.structs.fields(message_type)
