"""Kinds of KV cache whose blocks do not grow with a request's tokens, and models that keep none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest
from scheduler_driver import Driver
from scheduler_fakes import cache_config, cache_of, full_spec, latent_spec, state_spec, window_spec

from penstock.contract import FullAttentionSpec
from penstock.errors import ContextTooLong, UnsupportedFeature
from penstock.scheduler.block_pool import KVCacheBlock
from penstock.scheduler.kv_cache_groups import FullAttentionGroup

PROMPT = [1, 2, 3, 4, 5, 6]


def test_latents_are_found_as_a_prefix() -> None:
    driver = Driver(cache_config(20, latent_spec(2)))
    for name in ("a", "b"):
        driver.add(name, PROMPT, max_tokens=1)
        driver.drain()

    # All but the block of the last token, which has to run.
    assert driver.ends["b"].num_cached_tokens == 4


def test_a_recurrent_layer_keeps_one_state_however_long_the_request() -> None:
    driver = Driver(cache_config(5, state_spec()), enable_prefix_caching=False)
    for name in ("a", "b"):
        driver.add(name, PROMPT, max_tokens=50, ignore_eos=True)
    driver.turn()

    assert driver.scheduler.kv_cache.num_used_blocks == 2
    driver.drain()
    assert driver.scheduler.num_preemptions == 0


def test_who_finds_no_state_waits_for_one() -> None:
    # Its own, and the snapshot that a request may begin from.
    driver = Driver(cache_config(3, state_spec()))
    for name in ("a", "b"):
        driver.add(name, PROMPT, max_tokens=3, ignore_eos=True)

    assert [list(driver.turn().num_scheduled_tokens) for _ in range(4)] == [["a"], ["a"], ["a"], ["b"]]
    driver.drain()


def test_states_are_there_for_every_token_that_may_be_taken_back() -> None:
    driver = Driver(cache_config(9, state_spec(16, max_drafts=3)))
    driver.add("r", PROMPT, max_tokens=3)

    assert [len(ids) for ids in driver.turn().scheduled_new_reqs[0].block_ids] == [4]
    driver.drain()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_prompt_goes_on_from_the_deepest_snapshot_that_it_shares(depth: int) -> None:
    driver = Driver(cache_of(40, [full_spec(2), state_spec(4)]), max_num_batched_tokens=9, depth=depth)
    prompt = list(range(1, 11)) * 3
    driver.add("a", prompt, max_tokens=2, ignore_eos=True)
    driver.drain()
    # Chunks of 9 tokens, and the last one: snapshots at 8, 16, 24 and 28.
    for name, num_shared, num_cached in (("b", 30, 28), ("c", 27, 24), ("d", 23, 16), ("e", 7, 0)):
        driver.add(name, [*prompt[:num_shared], *[10] * 5], max_tokens=2, ignore_eos=True)
        driver.drain()
        assert driver.ends[name].num_cached_tokens == num_cached


def test_a_snapshot_stays_until_the_token_behind_it_has_read_it() -> None:
    # A chunk ends at the snapshot's border, and another request wants its block in the step of the next one.
    driver = Driver(cache_of(40, [full_spec(), state_spec()], num_states=3), max_num_batched_tokens=8)
    driver.add("a", [1] * 9, max_tokens=3, ignore_eos=True)
    driver.add("b", [2] * 9, max_tokens=3, ignore_eos=True)

    assert [list(driver.turn().num_scheduled_tokens) for _ in range(2)] == [["a"], ["a"]]
    driver.drain()
    assert driver.scheduler.num_preemptions == 0


def test_a_snapshot_is_one_block_earlier_where_the_last_one_of_a_hit_is_left_out() -> None:
    driver = Driver(cache_of(40, [full_spec(2), state_spec(2)]))
    driver.scheduler.kv_cache._blocks_need_next_token = True
    for name in ("a", "b"):
        driver.add(name, [1, 2, 3, 4, 5, 6, 7], max_tokens=1)
        driver.drain()

    assert driver.ends["b"].num_cached_tokens == 4


def test_a_snapshot_is_found_after_the_step_that_takes_it() -> None:
    driver = Driver(cache_of(40, [full_spec(2), state_spec(2)]))
    for name in ("a", "b"):
        driver.add(name, PROMPT, max_tokens=1)

    assert [new.num_computed_tokens for new in driver.turn().scheduled_new_reqs] == [0, 0]
    driver.drain()


def test_snapshots_make_room_for_requests() -> None:
    driver = Driver(cache_of(40, [full_spec(), state_spec()], num_states=5))
    for name in range(8):
        driver.add(f"{name}", [name + 1] * 9, max_tokens=2, ignore_eos=True)
    driver.drain()

    assert driver.scheduler.num_preemptions == 0
    # Those of the last prompts are left.
    states = driver.scheduler.kv_cache.pools[1]
    assert 0 < states.num_cached_blocks <= 4
    driver.add("again", [8] * 9, max_tokens=2, ignore_eos=True)
    driver.drain()
    assert driver.ends["again"].num_cached_tokens == 8


def test_blocks_of_a_model_with_states_are_not_reserved() -> None:
    driver = Driver(cache_of(40, [full_spec(), state_spec()]))
    driver.add("r", PROMPT, max_tokens=2)

    assert driver.scheduler.reserve_blocks("r", 4, "load") is None
    driver.drain()


def test_pages_of_one_pool_are_no_room_for_another() -> None:
    driver = Driver(cache_of(4, [full_spec(), full_spec()], num_pools=2))
    driver.add("fits", PROMPT, max_tokens=6)
    with pytest.raises(ContextTooLong, match="need 4 blocks of KV cache, but there are 3"):
        driver.add("long", PROMPT, max_tokens=7)
    driver.drain()


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
        block_size, num_own_blocks = 4, 0

    with pytest.raises(UnsupportedFeature, match="OddSpec names no KV cache group. Set its kv_cache_group"):
        Driver(cache_of(4, [OddSpec()]))


class OneBlockGroup(FullAttentionGroup):
    """Group in which a prefix is one cached block at most."""

    def find_hit(self, block_hashes: Sequence[bytes], max_num_tokens: int) -> list[KVCacheBlock]:
        return super().find_hit(block_hashes, max_num_tokens)[:1]


def test_a_kind_of_a_plugin_is_managed_by_the_group_that_its_spec_names() -> None:
    class OddSpec(FullAttentionSpec, frozen=True, kw_only=True, tag=True):
        kv_cache_group: ClassVar[str] = f"{__name__}:OneBlockGroup"

    driver = Driver(cache_of(9, [OddSpec(block_size=2, num_kv_heads=1, head_size=8, dtype="float32")]))
    for name in ("a", "b"):
        driver.add(name, PROMPT, max_tokens=1)
        driver.drain()

    assert driver.ends["b"].num_cached_tokens == 2
