"""Whatever happens to requests with media, the workers' cache of features is as the scheduler believes, within its
bounds, and every request ends."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from scheduler_driver import Driver, make_request
from scheduler_fakes import cache_config

from penstock.config import SchedulerConfig
from penstock.config.multimodal import MultimodalConfig
from penstock.contract import ArrayBytes, Parts, RpcCall, SchedulerOutput, part_of
from penstock.contract.feature import register_feature
from penstock.errors import ContextTooLong, InvalidRequest
from penstock.features.multimodal import FEATURE
from penstock.features.multimodal.messages import RESET, MediaItem, MediaPart, Run, StepMediaPart
from penstock.features.multimodal.scheduling import MediaScheduling

register_feature(FEATURE)


def item(start: int, lengths: Sequence[int], key: str, *, may_cut: bool = True) -> MediaItem:
    """An item with runs of these lengths from a position on, and one token of text between two of them."""
    runs = []
    for length in lengths:
        runs.append(Run(start=start, length=length))
        start += length + 1
    return MediaItem(modality="image", runs=tuple(runs), key=key, inputs=pixels_of(key), may_cut=may_cut)


def pixels_of(key: str) -> dict[str, ArrayBytes]:
    return {"pixels": ArrayBytes.of(list(key.encode()))}


class MediaDriver(Driver):
    """An engine loop whose worker keeps features as `MediaFeatures` does.

    features: rows by key. inputs: of items that are still to be encoded. num_encoded: encodings by key. left_over: keys
    of items that a failed request was to encode; the next step that needs one encodes it beside those of its budget.
    """

    def __init__(self, capacity: int, budget: int, **options: Any) -> None:
        multimodal = MultimodalConfig(encoder_cache_size=capacity, max_num_encoder_input_tokens=budget)
        self.capacity, self.budget = capacity, min(budget, capacity)
        self.features: dict[str, int] = {}
        self.inputs: dict[str, dict[str, ArrayBytes]] = {}
        self.num_encoded: dict[str, int] = {}
        self.left_over: set[str] = set()
        self.items: dict[str, list[MediaItem]] = {}

        def make(scheduler: Any) -> MediaScheduling:
            step = SchedulerConfig(max_num_batched_tokens=options["max_num_batched_tokens"])
            config: Any = SimpleNamespace(multimodal=multimodal, scheduler=step)
            return MediaScheduling(SimpleNamespace(config=config))  # type: ignore[arg-type]

        super().__init__(**options, features=[make])
        (found,) = self.scheduler.features
        assert isinstance(found, MediaScheduling)
        self.media = found

    def step(self, failing: tuple[str, ...] = ()) -> SchedulerOutput:
        output = super().step(failing)
        part = part_of(output.parts, StepMediaPart)
        for new in output.scheduled_new_reqs:
            found = part_of(new.parts, MediaPart)
            self.items[new.req_id] = [] if found is None else found.items
        starts = dict(output.first_positions())
        wanted = {
            (req_id, start + row)
            for req_id, start in starts.items()
            for row in range(output.num_scheduled_tokens[req_id])
            for one in self.items[req_id]
            if any(run.start <= start + row < run.stop for run in one.runs)
        }
        for key in () if part is None else part.evicted:
            self.features.pop(key, None)
            self.inputs.pop(key, None)
            self.left_over.discard(key)
        sent = {} if part is None else part.inputs
        # Only what is not there is sent.
        assert sent.keys().isdisjoint({**self.features, **self.inputs})
        self.inputs.update(sent)
        num_new = 0
        for rows in () if part is None else part.rows:
            one = self.items[rows.req_id][rows.item]
            assert one.inputs == {}
            if one.key not in self.features and rows.req_id in failing:
                self.left_over.add(one.key)
            elif one.key not in self.features:
                assert self.inputs.pop(one.key) == pixels_of(one.key)
                num_new += 0 if one.key in self.left_over else one.num_rows
                self.left_over.discard(one.key)
                self.features[one.key] = one.num_rows
                self.num_encoded[one.key] = self.num_encoded.get(one.key, 0) + 1
            for number in range(rows.count):
                wanted.remove((rows.req_id, starts[rows.req_id] + rows.token + number))
        assert not wanted
        assert num_new <= self.budget
        assert sum(self.features.values()) <= self.capacity
        cached = self.media.cache._rows
        assert self.features.items() <= cached.items()
        assert self.inputs.keys() == cached.keys() - self.features.keys()
        for req_id, start in starts.items():
            stop = start + output.num_scheduled_tokens[req_id]
            for one in self.items[req_id]:
                assert one.may_cut or not one.start < stop < one.stop
                # Only a cached prefix, which was computed with the whole item, may end inside it.
                is_new = any(new.req_id == req_id for new in output.scheduled_new_reqs)
                assert one.may_cut or is_new or not one.start < start < one.stop
        return output

    def crash(self) -> None:
        super().crash()
        self.forget()

    def forget(self) -> None:
        """Drop the worker's features, as its method does."""
        self.features.clear()
        self.inputs.clear()
        self.left_over.clear()

    def check_empty(self) -> None:
        super().check_empty()
        media = self.media
        assert (media.cache.num_used_rows, media.cache._users, media._running, media._planned) == (0, {}, {}, {})
        assert media.cache.num_rows == sum(media.cache._rows.values()) <= self.capacity
        assert not media._items


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[MediaItem]]:
    """A prompt with items, of few contents."""
    items: list[MediaItem] = []
    position = draw(st.integers(0, 3))
    for _ in range(draw(st.integers(0, 3))):
        number = draw(st.integers(0, 4))
        lengths = [[3], [5], [2, 3], [7], [1, 1, 4]][number]
        items.append(item(position, lengths, f"item {number}", may_cut=draw(st.booleans())))
        position = items[-1].stop + draw(st.integers(0, 2))
    return [1 + position % 2] * max(1, position + draw(st.integers(0, 2))), items


MOVES = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 7)),
    st.tuples(st.just("add"), st.integers(0, 7)),
    st.tuples(st.just("turns"), st.integers(1, 4)),
    st.tuples(st.just("turns"), st.integers(1, 4)),
    st.tuples(st.sampled_from(["abort", "fail", "crash", "preempt all", "reset", "drop features"]), st.integers(0, 7)),
)


def play(driver: MediaDriver, wanted: list[tuple[list[int], list[MediaItem]]], moves: list[tuple[str, int]]) -> None:
    for move, number in moves:
        req_id = f"r{number}"
        if move == "add" and (req_id not in driver.requests or req_id in driver.ends):
            prompt, items = wanted[number % len(wanted)]
            parts = Parts.of([MediaPart(items=items)]) if items else None
            try:
                driver.add(req_id, prompt, parts=parts, max_tokens=4, ignore_eos=True)
            except (InvalidRequest, ContextTooLong):
                event("refused")
        elif move == "abort":
            if any(req_id in users for users in driver.media.cache._users.values()):
                event("aborted within an item")
            driver.abort(req_id)
        elif move == "crash":
            driver.crash()
        elif move == "preempt all":
            driver.scheduler.preempt_all()
        elif move == "reset":
            driver.scheduler.reset_prefix_cache(reset_running_requests=True)
        elif move == "drop features":
            driver.media.before_call(RpcCall(RESET))
            driver.forget()
        elif move == "turns":
            for _ in range(number):
                driver.turn()
        elif move == "fail" and len(driver.in_flight) < driver.depth:
            driver.step(failing=(req_id,))


@settings(max_examples=120, deadline=None)
@given(
    capacity=st.sampled_from([7, 8, 10, 16, 40]),
    budget=st.sampled_from([5, 7, 9, 40]),
    num_blocks=st.sampled_from([12, 14, 20, 40]),
    max_num_batched_tokens=st.sampled_from([3, 5, 8, 10, 16]),
    depth=st.integers(1, 3),
    max_concurrent_steps=st.sampled_from([1, 1, 2]),
    enable_prefix_caching=st.booleans(),
    wanted=st.lists(prompts(), min_size=2, max_size=6),
    moves=st.lists(MOVES, min_size=6, max_size=40),
)
def test_the_cache_is_kept_within_its_bounds_and_every_request_ends(
    capacity: int,
    budget: int,
    num_blocks: int,
    wanted: list[tuple[list[int], list[MediaItem]]],
    moves: list[tuple[str, int]],
    **options: Any,
) -> None:
    driver = MediaDriver(capacity, budget, kv_cache_config=cache_config(num_blocks), max_model_len=40, **options)
    play(driver, wanted, moves)
    driver.drain()
    assert set(driver.ends) == set(driver.requests)
    if driver.scheduler.num_preemptions:
        event("preempted")
    if any(count > 1 for count in driver.num_encoded.values()):
        event("encoded again")


def test_later_requests_do_not_take_the_room_that_an_item_waits_for_again_and_again() -> None:
    driver = MediaDriver(8, 8, max_num_batched_tokens=4, max_num_seqs=4)

    def add(req_id: str, num_words: int, num_rows: int) -> None:
        part = MediaPart(items=[item(num_words, [num_rows], req_id)])
        driver.add(req_id, [1] * (num_words + num_rows), parts=Parts.of([part]), max_tokens=1)

    add("first", 1, 4)
    add("large", 1, 8)
    # Half of the cache is used between any two steps, if these are admitted one after the other.
    for number in range(20):
        add(f"r{number}", 0, 4)
    for _ in range(10):
        driver.turn()
    assert "large" in driver.ends
    driver.drain()


def test_requests_with_one_item_share_its_bytes() -> None:
    driver = MediaDriver(8, 8, max_num_batched_tokens=8, max_num_seqs=1)
    parts = [Parts.of([MediaPart(items=[item(1, [4], key)])]) for key in "aab"]
    requests = [driver.add(f"r{number}", [1] * 6, parts=one, max_tokens=1) for number, one in enumerate(parts)]
    found = [part_of(request.parts, MediaPart) for request in requests]
    first, second, other = (part.items[0].inputs["pixels"] for part in found if part is not None)
    assert first is second is not other
    del first, second, other, found, requests
    driver.drain()
    driver.requests.clear()
    parts.clear()
    assert not list(driver.media._inputs)


@pytest.mark.parametrize("runs_chunks", [True, False])
def test_without_chunks_the_items_of_a_prompt_fit_together(runs_chunks: bool) -> None:
    step = SchedulerConfig(max_num_batched_tokens=64, enable_chunked_prefill=runs_chunks)
    config = SimpleNamespace(multimodal=MultimodalConfig(encoder_cache_size=8), scheduler=step)
    media = MediaScheduling(SimpleNamespace(config=config))  # type: ignore[arg-type]
    for keys, is_refused in (("aa", False), ("ab", not runs_chunks)):
        items = [item(6 * number, [5], key) for number, key in enumerate(keys)]
        request = make_request("a", [1] * 12, parts=Parts.of([MediaPart(items=items)]))
        with pytest.raises(InvalidRequest, match="media have 10 tokens") if is_refused else nullcontext():
            media.request_added(request)
