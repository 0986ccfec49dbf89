"""KV cache manager: blocks per request and group, prefix-cache hits, windows, and room for admission."""

from __future__ import annotations

from typing import Any

from scheduler_driver import make_request
from scheduler_fakes import cache_config, full_spec, state_spec, window_spec

from penstock.contract import KVCacheConfig
from penstock.scheduler.kv_cache_manager import KVCacheManager, PrefixHit
from penstock.scheduler.request import Request


def make_manager(num_blocks: int, *specs: Any, caching: bool = True, **options: Any) -> KVCacheManager:
    config = cache_config(num_blocks, *specs)
    return KVCacheManager(config, enable_prefix_caching=caching, max_num_batched_tokens=16, **options)


def start(manager: KVCacheManager, request: Request, num_tokens: int | None = None) -> PrefixHit:
    """Admit a request and run its first tokens, all known ones by default."""
    hit = manager.get_computed_blocks(request)
    num_new = (request.num_tokens if num_tokens is None else num_tokens) - hit.num_tokens
    assert manager.allocate_slots(request, num_new, hit) is not None
    request.num_computed_tokens = hit.num_tokens
    finish_step(manager, request, num_new)
    return hit


def run(manager: KVCacheManager, request: Request, num_tokens: int) -> tuple[list[int], ...] | None:
    new_block_ids = manager.allocate_slots(request, num_tokens)
    if new_block_ids is not None:
        finish_step(manager, request, num_tokens)
    return new_block_ids


def finish_step(manager: KVCacheManager, request: Request, num_tokens: int) -> None:
    request.num_computed_tokens += num_tokens
    missing = request.num_computed_tokens - request.num_tokens
    request.all_token_ids += [9] * missing
    manager.cache_blocks(request, request.num_computed_tokens)
    manager.check_integrity()


def hit_length(manager: KVCacheManager, prompt: list[int], salt: str | None = None) -> int:
    return manager.get_computed_blocks(make_request("probe", prompt, cache_salt=salt)).num_tokens


def test_blocks_are_given_as_positions_need_them() -> None:
    manager = make_manager(10)
    request = make_request("r", [1] * 6)

    start(manager, request, 3)
    assert manager.get_block_ids("r") == ([1],)
    assert run(manager, request, 1) == ()
    assert run(manager, request, 1) == ([2],)
    assert run(manager, request, 3) == ()
    assert run(manager, request, 9) == ([3, 4, 5],)
    assert manager.get_block_ids("r") == ([1, 2, 3, 4, 5],)


def test_without_room_a_request_keeps_what_it_holds() -> None:
    manager = make_manager(4)
    request = make_request("r", [1] * 8)
    start(manager, request)

    assert run(manager, request, 5) is None
    assert manager.get_block_ids("r") == ([1, 2],)
    manager.check_integrity()
    assert run(manager, request, 4) == ([3],)


def test_a_first_allocation_without_room_takes_nothing() -> None:
    manager = make_manager(4)
    start(manager, make_request("a", [1] * 8))

    request = make_request("b", [1] * 4 + [2] * 8)
    hit = manager.get_computed_blocks(request)
    assert hit.num_tokens == 4
    assert manager.allocate_slots(request, 8, hit) is None
    manager.check_integrity()
    assert manager.pools[0].num_free_blocks == 1


def test_blocks_of_a_hit_that_are_free_count_as_taken() -> None:
    manager = make_manager(5)
    first = make_request("a", [1] * 8)
    start(manager, first)
    manager.free(first)
    start(manager, make_request("b", [2] * 8))

    # Two cached blocks are all that is free: they cannot be a prefix and a new block at once.
    request = make_request("c", [1] * 9)
    hit = manager.get_computed_blocks(request)
    assert hit.num_tokens == 8
    assert not manager.has_room_for(request, hit)
    assert manager.allocate_slots(request, 1, hit) is None
    manager.check_integrity()


def test_a_prefix_is_found_in_full_blocks_and_short_of_the_last_token() -> None:
    manager = make_manager(20)
    start(manager, make_request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9]))

    assert hit_length(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8
    assert hit_length(manager, [1, 2, 3, 4, 5, 6, 7, 8]) == 4
    assert hit_length(manager, [1, 2, 3, 4, 5, 6, 7, 0, 9]) == 4
    assert hit_length(manager, [0, 2, 3, 4, 5, 6, 7, 8, 9]) == 0
    assert hit_length(manager, [1]) == 0


def test_the_last_block_of_a_prefix_is_left_where_it_depends_on_what_follows() -> None:
    manager = make_manager(20, blocks_need_next_token=True)
    start(manager, make_request("a", [*range(14)]))

    assert hit_length(manager, [*range(14)]) == 8
    assert hit_length(manager, [*range(8), 99, 99]) == 4
    assert hit_length(manager, [*range(4), 99, 99]) == 0
    assert hit_length(manager, [99] * 14) == 0


def test_a_prefix_without_its_last_block_is_still_covered_by_windows() -> None:
    manager = make_manager(40, full_spec(), window_spec(6), blocks_need_next_token=True)
    request = make_request("a", [*range(30)])
    start(manager, request, 14)
    run(manager, request, 10)

    hit = manager.get_computed_blocks(make_request("probe", [*range(30)]))
    full, window = hit.blocks
    assert hit.num_tokens == 20
    assert len(full) == len(window) == 5
    # Those that a token at position 20 reads: 15 to 19.
    assert all(block is not manager.pools[0].null_block for block in window[3:])


def test_requests_share_the_blocks_of_a_common_prefix() -> None:
    manager = make_manager(20)
    start(manager, make_request("a", [1] * 9))
    start(manager, make_request("b", [1] * 8 + [2]))

    assert manager.get_block_ids("a") == ([1, 2, 3],)
    assert manager.get_block_ids("b") == ([1, 2, 4],)
    assert [manager.pools[0].blocks[number].ref_count for number in (1, 2, 3, 4)] == [2, 2, 1, 1]


def test_salts_keep_prefixes_apart() -> None:
    manager = make_manager(20)
    start(manager, make_request("a", [1] * 9, cache_salt="mine"))

    assert hit_length(manager, [1] * 9, "mine") == 8
    assert hit_length(manager, [1] * 9, "yours") == 0
    assert hit_length(manager, [1] * 9) == 0


def test_only_positions_that_were_offered_are_shared() -> None:
    manager = make_manager(20)
    request = make_request("a", [1] * 12)
    hit = manager.get_computed_blocks(request)
    manager.allocate_slots(request, 12, hit)
    assert hit_length(manager, [1] * 12) == 0

    assert [block.block_id for block in manager.cache_blocks(request, 7)] == [1]
    assert hit_length(manager, [1] * 12) == 4
    assert [block.block_id for block in manager.cache_blocks(request, 8)] == [2]
    assert hit_length(manager, [1] * 12) == 8


def test_what_was_not_computed_after_all_is_not_found_any_more() -> None:
    manager = make_manager(20)
    first, second = make_request("a", [1] * 12), make_request("b", [1] * 12)
    start(manager, first, 8)
    start(manager, second)
    assert hit_length(manager, [1] * 13) == 12

    manager.forget_content(manager.pools[0].blocks[2:3])
    manager.check_integrity()
    assert hit_length(manager, [1] * 13) == 4
    manager.free(second)
    manager.check_integrity()


def test_generated_tokens_are_shared_too() -> None:
    manager = make_manager(20)
    request = make_request("a", [1] * 3)
    start(manager, request)
    for _ in range(6):
        run(manager, request, 1)

    assert hit_length(manager, [1, 1, 1, 9, 9, 9, 9, 9, 9]) == 8


def test_freed_blocks_are_found_until_reused_and_tails_go_first() -> None:
    manager = make_manager(5)
    first = make_request("a", [1] * 16)
    start(manager, first)
    manager.free(first)
    assert hit_length(manager, [1] * 17) == 16

    start(manager, make_request("b", [2] * 8))

    assert hit_length(manager, [1] * 17) == 8


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = make_manager(20, caching=False)
    first = make_request("a", [1] * 9)
    start(manager, first)
    manager.free(first)

    assert hit_length(manager, [1] * 9) == 0
    assert first.block_hashes == []


def test_blocks_that_slide_out_of_the_window_are_given_back() -> None:
    manager = make_manager(20, window_spec(5))
    request = make_request("a", [1] * 8)
    start(manager, request)
    assert manager.get_block_ids("a") == ([1, 2],)

    # The token at position 8 reads positions 4 to 8; the one at position 9 reads 5 to 9.
    run(manager, request, 1)
    assert manager.get_block_ids("a") == ([0, 2, 3],)
    run(manager, request, 3)
    assert manager.get_block_ids("a") == ([0, 2, 3],)
    run(manager, request, 1)
    assert manager.get_block_ids("a")[0][:3] == [0, 0, 3]
    assert manager.pools[0].num_used_blocks == 2


def test_a_long_request_in_a_window_stays_within_what_the_plan_says() -> None:
    manager = make_manager(100, window_spec(6))
    request = make_request("a", [1] * 200)
    start(manager, request, 16)
    while request.num_computed_tokens < 200:
        run(manager, request, min(16, 200 - request.num_computed_tokens))
        assert [manager.num_used_blocks] <= manager.blocks_needed(request, 200)

    assert manager.blocks_needed(request, 200) == [7]


def test_a_window_needs_only_the_blocks_that_it_covers() -> None:
    manager = make_manager(30, window_spec(6))
    first = make_request("a", [1] * 20)
    start(manager, first)
    manager.free(first)

    hit = manager.get_computed_blocks(make_request("b", [1] * 20))
    # Position 16 reads 11 to 16: two blocks before it.
    assert hit.num_tokens == 16
    assert [block.block_id for block in hit.blocks[0]] == [0, 0, 3, 4]


def test_a_window_that_ends_at_a_border_needs_no_block_beyond() -> None:
    manager = make_manager(30, window_spec(5))
    first = make_request("a", [1] * 20)
    start(manager, first)
    manager.free(first)

    hit = manager.get_computed_blocks(make_request("b", [1] * 20))
    # Position 16 reads 12 to 16.
    assert [block.block_id for block in hit.blocks[0]] == [0, 0, 0, 4]


def test_a_window_falls_back_to_where_it_is_covered() -> None:
    manager = make_manager(30, window_spec(6))
    first = make_request("a", [1] * 24)
    start(manager, first)
    manager.free(first)
    evict(manager, 4)

    # Without the fourth block, nothing up to position 20 can go on; before it, positions 0 to 11 are whole.
    assert hit_length(manager, [1] * 20) == 12
    # At 24 the window is covered by blocks five and six.
    assert hit_length(manager, [1] * 26) == 24


def evict(manager: KVCacheManager, block_id: int) -> None:
    block = manager.pools[0].blocks[block_id]
    manager.pools[0]._forget(block)


def test_groups_agree_on_the_longest_prefix_that_all_have() -> None:
    manager = make_manager(60, full_spec(), window_spec(6))
    first = make_request("a", [1] * 24)
    start(manager, first)
    windows = manager.get_block_ids("a")[1]
    manager.free(first)
    assert hit_length(manager, [1] * 25) == 24

    # The window cannot go on after the fifth nor the sixth block, full attention can.
    evict(manager, windows[4])
    assert hit_length(manager, [1] * 25) == 16
    # Neither after the third nor the fourth.
    evict(manager, windows[2])
    assert hit_length(manager, [1] * 25) == 8


def test_a_hole_in_full_attention_shortens_the_prefix_of_a_window() -> None:
    manager = make_manager(60, window_spec(6), full_spec())
    first = make_request("a", [1] * 24)
    start(manager, first)
    full = manager.get_block_ids("a")[1]
    manager.free(first)

    evict(manager, full[3])

    hit = manager.get_computed_blocks(make_request("b", [1] * 25))
    assert hit.num_tokens == 12
    assert [len(blocks) for blocks in hit.blocks] == [3, 3]


def test_groups_do_not_find_each_others_blocks() -> None:
    manager = make_manager(60, full_spec(), window_spec(100))
    first = make_request("a", [1] * 8)
    start(manager, first)

    hit = manager.get_computed_blocks(make_request("b", [1] * 9))
    assert tuple([block.block_id for block in blocks] for blocks in hit.blocks) == manager.get_block_ids("a")
    assert not {*manager.get_block_ids("a")[0]} & {*manager.get_block_ids("a")[1]}


def test_groups_may_have_blocks_of_different_sizes() -> None:
    manager = make_manager(60, full_spec(8), window_spec(3, 4))
    first = make_request("a", [1] * 24)
    start(manager, first)
    assert [len(ids) for ids in manager.get_block_ids("a")] == [3, 6]

    assert hit_length(manager, [1] * 16 + [2] * 8) == 16
    # The window's blocks reach to 12, but full attention's only to 8.
    assert hit_length(manager, [1] * 12 + [2] * 8) == 8


def test_a_large_block_is_known_by_all_its_tokens() -> None:
    # A window of one position is always covered, so that full attention alone decides.
    manager = make_manager(60, full_spec(8), window_spec(1, 4))
    start(manager, make_request("a", [1] * 24))

    assert hit_length(manager, [1] * 12 + [2] * 12) == 8


def test_room_is_counted_for_all_known_tokens_less_what_others_hold() -> None:
    manager = make_manager(6)
    start(manager, make_request("a", [1] * 8))

    for prompt, has_room in [([2] * 12, True), ([2] * 13, False), ([1] * 20, True), ([1] * 21, False)]:
        request = make_request("b", prompt)
        assert manager.has_room_for(request, manager.get_computed_blocks(request)) is has_room


def test_the_prefix_cache_can_be_reset_only_when_nothing_is_held() -> None:
    manager = make_manager(6)
    first = make_request("a", [1] * 8)
    start(manager, first)

    assert manager.reset_prefix_cache() is False
    manager.free(first)
    assert manager.reset_prefix_cache() is True
    assert hit_length(manager, [1] * 8) == 0


def test_a_state_is_found_again_at_its_snapshot_and_a_request_has_its_own() -> None:
    manager = make_manager(20, state_spec(), full_spec())
    prompt = list(range(30))
    first = make_request("a", prompt)
    start(manager, first)
    # Its own, and one at the last border before the last token.
    assert [len(blocks) for blocks in manager.get_block_ids("a")] == [1 + 7, 8]
    assert [index for index, block_id in enumerate(manager.get_block_ids("a")[0]) if block_id] == [0, 7]
    second = make_request("b", [*prompt, 5])
    assert manager.get_computed_blocks(second).num_tokens == 28
    start(manager, second)
    (own, *snapshots), _ = manager.get_block_ids("b")
    assert own != manager.get_block_ids("a")[0][0]
    assert snapshots == manager.get_block_ids("a")[0][1:]
    manager.check_integrity()


def test_requests_of_a_model_without_a_cache_need_no_blocks() -> None:
    config = KVCacheConfig()
    manager = KVCacheManager(config, enable_prefix_caching=True, max_num_batched_tokens=16)
    request = make_request("a", list(range(30)))
    assert start(manager, request).num_tokens == 0
    assert manager.get_block_ids("a") == ()
    assert manager.get_computed_blocks(make_request("b", list(range(30)))).num_tokens == 0
    assert manager.has_room_for(make_request("b", list(range(30))), PrefixHit(0, ()))
