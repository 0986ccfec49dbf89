"""Whatever happens to requests, each gets the tokens of an undisturbed run, and no block is lost or shared wrongly.

The checks are in the driver (after each move, and when a request ends) and in the worker (on each read and write).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import event, given, settings
from hypothesis import strategies as st
from scheduler_driver import Driver, make_request
from scheduler_fakes import cache_of, chunk_spec, full_spec, latent_spec, state_spec, undisturbed, window_spec

from penstock.contract import RecurrentStateSpec
from penstock.errors import ContextTooLong, InvalidRequest

LAYOUTS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "full": lambda size: (full_spec(size),),
    "window": lambda size: (window_spec(5, size),),
    "chunks": lambda size: (chunk_spec(7, size),),
    "full and chunks": lambda size: (full_spec(size), chunk_spec(2 * size, size)),
    "window of one": lambda size: (window_spec(1, size),),
    "full and window": lambda size: (full_spec(size), window_spec(3, size)),
    "two windows": lambda size: (window_spec(6, size), full_spec(size), window_spec(2, size)),
    "latents": lambda size: (latent_spec(size),),
    "latents and window": lambda size: (latent_spec(size), window_spec(3, 2 * size)),
    "state": lambda size: (state_spec(size),),
    "state and full": lambda size: (state_spec(size), full_spec(size)),
    "two states and window": lambda size: (state_spec(2 * size), window_spec(4, size), state_spec(size)),
    "nothing": lambda size: (),
    "two block sizes": lambda size: (full_spec(2 * size), window_spec(4, size)),
}

# Few distinct prompts with common beginnings, so that prefixes are shared often.
PROMPTS = st.builds(
    lambda length, base, tail: [base] * length + tail,
    st.sampled_from([1, 4, 6, 8, 9, 12, 16]),
    st.sampled_from([1, 1, 2]),
    st.lists(st.sampled_from([1, 2, 3]), max_size=3),
)
REQUESTS = st.fixed_dictionaries(
    {
        "prompt": PROMPTS,
        "max_tokens": st.sampled_from([None, 12, 9, 5, 2, 1]),
        "ignore_eos": st.sampled_from([True, True, False]),
        "stop_token_ids": st.sampled_from([(), (), (3,), (4, 9)]),
        "priority": st.integers(0, 2),
        "arrival_time": st.sampled_from([0.0, 1.0, 2.0]),
        "cache_salt": st.sampled_from([None, None, None, "salt"]),
        "logprobs": st.sampled_from([None, None, None, 2]),
        "num_resumed": st.sampled_from([0, 0, 0, 1, 5]),
    }
)
SETUPS = st.fixed_dictionaries(
    {
        "layout": st.sampled_from(sorted(LAYOUTS)),
        "block_size": st.sampled_from([4, 2, 1]),
        "num_blocks": st.sampled_from([8, 10, 12, 16, 24, 40]),
        "num_pools": st.sampled_from([1, 1, 1, 2]),
        # Beyond those that one request needs.
        "num_states": st.sampled_from([0, 1, 3, 12, 40]),
        "snapshots": st.sampled_from(["align", "align", "all", "none"]),
        "blocks_need_next_token": st.sampled_from([False, False, False, True]),
        "max_num_seqs": st.sampled_from([4, 3, 5, 2, 1]),
        "max_num_batched_tokens": st.sampled_from([20, 12, 8, 5, 2, 1]),
        "max_model_len": st.integers(20, 32),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "depth": st.integers(1, 3),
        "async_scheduling": st.booleans(),
        "enable_prefix_caching": st.sampled_from([True, True, True, False]),
        "max_drafts": st.sampled_from([0, 0, 1, 2, 5]),
        "seed": st.integers(0, 3),
        "pools": st.sampled_from([False, False, False, False, True]),
        "num_lookahead_tokens": st.sampled_from([0, 0, 0, 2]),
        "num_speculative_tokens": st.sampled_from([0, 0, 0, 1, 3]),
        "max_concurrent_steps": st.sampled_from([1, 1, 2, 3]),
    }
)
# Moves, with a number where they concern a request. Disasters are rare enough to let something grow between them.
MOVES = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 7)),
    st.tuples(st.just("add"), st.integers(0, 7)),
    st.tuples(st.sampled_from(["step", "deliver"]), st.just(0)),
    st.tuples(st.just("turns"), st.integers(2, 6)),
    st.tuples(st.just("turns"), st.integers(2, 6)),
    st.tuples(st.sampled_from(["hold", "release", "not ready", "ready"]), st.integers(0, 7)),
    st.tuples(st.sampled_from(["abort", "fail", "crash", "reset cache", "reset all"]), st.integers(0, 7)),
)


def make_driver(setup: dict[str, Any]) -> Driver:
    """Make the driver of one of the `SETUPS`."""
    setup = dict(setup)
    most_drafts = max(setup["max_drafts"], setup["num_speculative_tokens"])
    of_states = {"max_drafts": most_drafts, "snapshots": setup.pop("snapshots")}
    specs = [
        msgspec.structs.replace(spec, **of_states) if isinstance(spec, RecurrentStateSpec) else spec
        for spec in LAYOUTS[setup.pop("layout")](setup.pop("block_size"))
    ]
    num_states = 1 + 2 * (2 + most_drafts) + setup.pop("num_states")
    return Driver(cache_of(setup.pop("num_blocks"), specs, num_states, setup.pop("num_pools")), **setup)


def play(driver: Driver, wanted: list[dict[str, Any]], moves: list[tuple[str, int]]) -> None:
    """Make the moves. A request's id is used again once it has ended, even while its results are in flight."""
    for move, number in moves:
        req_id = f"r{number}"
        if move == "add":
            add(driver, req_id, wanted[number % len(wanted)])
        elif move == "abort":
            driver.abort(req_id, "unknown")
        elif move == "crash":
            driver.crash()
        elif move == "reset cache":
            may_reset = driver.scheduler.kv_cache.num_used_blocks == 0
            assert driver.scheduler.reset_prefix_cache() is may_reset
        elif move == "reset all":
            driver.scheduler.preempt_all()
            assert driver.scheduler.reset_prefix_cache() is (not any(driver.holds.values()))
            driver.scheduler.kv_cache.check_integrity()
        elif move == "hold":
            if req_id in driver.scheduler.kv_cache._held:
                driver.hold(req_id, f"holder {len(driver.steps)}.{len(driver.holds)}")
        elif move in ("not ready", "ready"):
            change = driver.scheduler.wait_for if move == "not ready" else driver.scheduler.ready
            change(req_id, "its grammar")
        elif move == "release":
            for hold in list(driver.holds)[:1]:
                driver.release(*hold)
        elif move == "turns":
            for _ in range(number):
                driver.turn()
        elif move == "deliver" and driver.in_flight:
            driver.deliver()
        elif move in ("step", "fail") and len(driver.in_flight) < driver.depth:
            driver.step(failing=(req_id,) if move == "fail" else ())


def add(driver: Driver, req_id: str, request: dict[str, Any]) -> None:
    if req_id in driver.requests and req_id not in driver.ends:
        return
    options = dict(request)
    num_resumed = options.pop("num_resumed")
    if num_resumed and not driver.pools:
        # It comes with the first tokens of its output.
        params = make_request(req_id, **options).sampling_params
        tokens, _ = undisturbed(request["prompt"], params, request["cache_salt"], driver.max_model_len)
        options["output_token_ids"] = tokens[: min(num_resumed, len(tokens) - 1)]
    try:
        driver.add(req_id, **options)
    except ContextTooLong:
        event("refused")
    except InvalidRequest:
        # The id of a request that ended while its blocks were being transferred.
        assert driver.scheduler.kv_cache.is_transferring(req_id)
        event("its blocks are being transferred")


@settings(max_examples=300, deadline=None)
@given(setup=SETUPS, wanted=st.lists(REQUESTS, min_size=3, max_size=8), moves=st.lists(MOVES, min_size=8, max_size=50))
def test_every_request_gets_the_tokens_of_an_undisturbed_run(
    setup: dict[str, Any], wanted: list[dict[str, Any]], moves: list[tuple[str, int]]
) -> None:
    driver = make_driver(setup)

    play(driver, wanted, moves)
    driver.drain()

    assert set(driver.ends) == set(driver.requests)
    if driver.scheduler.num_preemptions:
        event("preempted")
    if any(end.num_cached_tokens for end in driver.ends.values()):
        event("shared a prefix")
    if any(step.scheduled_spec_decode_tokens for step in driver.steps):
        event("verified drafts")
