"""Kinds of KV cache whose blocks do not grow with a request's tokens, and models that keep none."""

from __future__ import annotations

import pytest
from scheduler_driver import Driver
from scheduler_fakes import STATE, cache_config, cache_of, encoder_spec, full_spec, latent_spec, window_spec

from penstock.errors import ContextTooLong, UnsupportedFeature

PROMPT = [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("num_encoder_tokens", "num_blocks"), [(0, 0), (1, 1), (8, 2), (9, 3)])
def test_the_encoders_positions_get_their_blocks_once(num_encoder_tokens: int, num_blocks: int) -> None:
    driver = Driver(cache_config(20, full_spec(2), encoder_spec(4)), max_num_batched_tokens=4)
    driver.add("r", PROMPT, max_tokens=5, ignore_eos=True, num_encoder_tokens=num_encoder_tokens)

    [new] = driver.turn().scheduled_new_reqs

    assert [len(ids) for ids in new.block_ids] == [2, num_blocks]
    while "r" not in driver.ends:
        for ids in driver.turn().scheduled_cached_reqs.new_block_ids:
            assert ids is not None
            assert ids[1] == []
    driver.drain()


def test_latents_are_found_as_a_prefix() -> None:
    driver = Driver(cache_config(20, latent_spec(2)))
    for name in ("a", "b"):
        driver.add(name, PROMPT, max_tokens=1)
        driver.drain()

    # All but the block of the last token, which has to run.
    assert driver.ends["b"].num_cached_tokens == 4


def test_the_encoders_keys_are_not_found_again_and_no_prefix_beside_them() -> None:
    driver = Driver(cache_config(20, full_spec(2), encoder_spec(4)))
    for name in ("a", "b"):
        driver.add(name, PROMPT, max_tokens=1, num_encoder_tokens=8)
        driver.drain()

    assert driver.ends["b"].num_cached_tokens == 0


def test_a_recurrent_layer_keeps_one_block_however_long_the_request() -> None:
    driver = Driver(cache_config(3, STATE))
    for name in ("a", "b"):
        driver.add(name, PROMPT, max_tokens=50, ignore_eos=True)
    driver.turn()

    assert driver.scheduler.kv_cache.pool.num_used_blocks == 2
    driver.drain()
    assert driver.scheduler.num_preemptions == 0


def test_who_finds_no_state_waits_for_one() -> None:
    driver = Driver(cache_config(2, STATE))
    for name in ("a", "b"):
        driver.add(name, PROMPT, max_tokens=3, ignore_eos=True)

    assert [list(driver.turn().num_scheduled_tokens) for _ in range(4)] == [["a"], ["a"], ["a"], ["b"]]
    driver.drain()


def test_states_are_there_for_every_token_that_may_be_taken_back() -> None:
    driver = Driver(cache_config(9, STATE), num_lookahead_tokens=3)
    driver.add("r", PROMPT, max_tokens=3)

    assert [len(ids) for ids in driver.turn().scheduled_new_reqs[0].block_ids] == [4]
    driver.drain()


def test_a_model_with_a_state_begins_no_request_in_the_middle() -> None:
    driver = Driver(cache_config(20, full_spec(2), STATE))
    for name in ("a", "b"):
        driver.add(name, PROMPT, max_tokens=1)
        driver.drain()

    assert driver.ends["b"].num_cached_tokens == 0


@pytest.mark.parametrize("num_blocks", [0, 1])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_model_that_keeps_nothing_is_limited_by_no_block(num_blocks: int, depth: int) -> None:
    driver = Driver(cache_of(num_blocks, []), depth=depth, max_num_batched_tokens=8)
    for name in ("a", "b", "c"):
        driver.add(name, PROMPT, max_tokens=20, ignore_eos=True)
    driver.drain()

    assert [len(tokens) for tokens in driver.tokens.values()] == [20] * 3
    assert driver.scheduler.num_preemptions == 0
    assert all(new.block_ids == () for step in driver.steps for new in step.scheduled_new_reqs)
    assert any(step.repeats_step_id is not None for step in driver.steps)


def test_the_encoders_positions_count_when_a_request_is_refused() -> None:
    driver = Driver(cache_config(6, full_spec(), encoder_spec(4)))
    driver.add("fits", PROMPT, max_tokens=2, num_encoder_tokens=12)
    with pytest.raises(ContextTooLong, match="need 6 blocks"):
        driver.add("long", PROMPT, max_tokens=2, num_encoder_tokens=13)
    driver.drain()


def test_a_speculator_has_room_beyond_the_tokens_of_a_step_but_not_beyond_the_end() -> None:
    driver = Driver(num_lookahead_tokens=3)
    driver.add("r", PROMPT, max_tokens=10, ignore_eos=True)
    held = []
    while "r" not in driver.ends:
        driver.step()
        held.append(sum(map(len, driver.scheduler.kv_cache.get_block_ids("r"))))
        driver.deliver()

    # Positions 0 to 8 at first, then one more with each token; it ends at 16 tokens, which are four blocks.
    assert held == [3, 3, 3, 3, 4, 4, 4, 4, 4, 4]


def test_a_window_has_room_for_what_a_speculator_writes() -> None:
    driver = Driver(cache_config(6, window_spec(4)), max_num_batched_tokens=8, num_lookahead_tokens=4)
    driver.add("r", [1] * 40, max_tokens=12, ignore_eos=True)
    driver.drain()

    assert driver.scheduler.num_preemptions == 0


def test_an_unknown_kind_is_refused_by_name() -> None:
    class OddSpec:
        block_size = 4

    with pytest.raises(UnsupportedFeature, match="No KV cache group is registered for OddSpec"):
        Driver(cache_of(4, [OddSpec()]))
