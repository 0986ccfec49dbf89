"""Parts of messages: they survive the wire with their types, and nothing of a user's is in logs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock.contract as contract
from penstock.contract import ContractVersionError, Part, Parts, decode, encode, part_of, parts, register_part
from penstock.errors import ConfigError, InvalidParameter


class NotePart(Part, frozen=True, kw_only=True):
    """A part of a test's feature."""

    feature: ClassVar[str] = "note"
    text: str
    numbers: tuple[int, ...] = ()

    def anon_repr(self) -> str:
        return f"NotePart({len(self.text)} characters)"


class SecretPart(Part, frozen=True, kw_only=True):
    """A part that says nothing about how it is shown."""

    feature: ClassVar[str] = "secret"
    text: str


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(parts, "_types", {})
    register_part(NotePart)
    register_part(SecretPart)
    return


_numbers = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3).map(tuple)
_parts = st.none() | st.lists(st.one_of(st.builds(NotePart, numbers=_numbers), st.builds(SecretPart)), max_size=2).map(
    Parts.of
)


def new_request(given_parts: Parts | None) -> contract.NewRequestData:
    return contract.NewRequestData(
        req_id="r",
        prompt_token_ids=[1],
        prefill_token_ids=[1],
        sampling_params=contract.SamplingParams(),
        block_ids=([1],),
        num_computed_tokens=0,
        parts=given_parts,
    )


@given(of_request=_parts, of_step=_parts, of_results=_parts)
def test_parts_survive_the_wire_with_their_types(
    of_request: Parts | None, of_step: Parts | None, of_results: Parts | None
) -> None:
    step = contract.SchedulerOutput(step_id=1, scheduled_new_reqs=[new_request(of_request)], parts=of_step)
    again = decode(encode(step), contract.SchedulerOutput)
    assert again == step
    assert type(again.parts) is type(step.parts)
    for results in (contract.SampledOutput(step_id=1, parts=of_results), contract.PooledOutput(step_id=1)):
        assert decode(encode(results), type(results)) == results
    assert part_of(again.parts, NotePart) == part_of(of_step, NotePart) == (of_step or {}).get("note")


def test_a_part_that_no_plugin_registered_is_named() -> None:
    data = encode(contract.SchedulerOutput(step_id=1, parts=Parts.of([NotePart(text="a")])))
    parts._types.pop("note")
    with pytest.raises(ContractVersionError, match=r"damaged SchedulerOutput: There is no part 'note'.*secret"):
        decode(data, contract.SchedulerOutput)


def test_plain_data_becomes_parts_or_is_refused() -> None:
    assert Parts.read({"note": {"text": "a", "numbers": [1, 2]}}) == {"note": NotePart(text="a", numbers=(1, 2))}
    with pytest.raises(InvalidParameter, match="The part 'note' is not valid: .*text"):
        Parts.read({"note": {"text": 3}})
    with pytest.raises(InvalidParameter, match="The part 'note' is not valid: .*unknown field `number`"):
        Parts.read({"note": {"text": "a", "number": [1]}})
    with pytest.raises(InvalidParameter, match=r"Parts are \[1\]. Allowed: a mapping"):
        Parts.read([1])  # type: ignore[arg-type]


def test_one_name_has_one_type_which_a_plugin_may_register_again() -> None:
    register_part(NotePart)
    other = msgspec.defstruct("Other", [], bases=(Part,), frozen=True, namespace={"feature": "note"})
    with pytest.raises(ConfigError, match="Two types of parts are named 'note'"):
        register_part(other)


def test_logs_show_of_a_part_what_its_type_says() -> None:
    given_parts = Parts.of([NotePart(text="Kant"), SecretPart(text="Hegel")])
    step = contract.SchedulerOutput(step_id=1, scheduled_new_reqs=[new_request(given_parts)], parts=given_parts)
    shown = step.anon_repr()
    assert shown.count("parts=[NotePart(4 characters), SecretPart]") == 2
    assert "Kant" not in shown
    assert "Hegel" not in shown


def test_a_step_with_a_part_and_nothing_else_reaches_the_workers() -> None:
    assert contract.SchedulerOutput(step_id=1).is_empty
    assert not contract.SchedulerOutput(step_id=1, parts=Parts.of([NotePart(text="a")])).is_empty
