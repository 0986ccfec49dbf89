"""Block pool: order of reuse, reference counts, and cached content."""

from __future__ import annotations

from penstock.scheduler.block_pool import BlockPool, KVCacheBlock, StepIds


def key(number: int) -> tuple[int, bytes]:
    return 0, number.to_bytes(4, "little")


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def test_the_null_block_is_never_given_out() -> None:
    pool = BlockPool(4, StepIds())

    assert ids(pool.get_new_blocks(3)) == [1, 2, 3]
    assert (pool.num_free_blocks, pool.num_used_blocks) == (0, 3)


def test_cached_blocks_are_reused_least_recently_freed_first() -> None:
    pool = BlockPool(5, StepIds())
    blocks = pool.get_new_blocks(4)
    pool.cache_full_blocks(blocks, [key(number) for number in range(4)])

    pool.free_blocks([blocks[2]])
    pool.free_blocks([blocks[0]])
    pool.free_blocks([blocks[3], blocks[1]])

    assert pool.free_block_ids() == [3, 1, 4, 2]


def test_blocks_without_content_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4, StepIds())
    cached, plain, _ = pool.get_new_blocks(3)
    pool.cache_full_blocks([cached], [key(1)])

    pool.free_blocks([cached])
    pool.free_blocks([plain])

    assert pool.get_new_blocks(1) == [plain]
    assert pool.find(key(1)) is cached


def test_a_touched_block_leaves_the_middle_of_the_free_queue() -> None:
    pool = BlockPool(5, StepIds())
    blocks = pool.get_new_blocks(4)
    pool.cache_full_blocks(blocks, [key(number) for number in range(4)])
    pool.free_blocks(blocks)

    pool.touch([blocks[1], pool.null_block])

    assert pool.free_block_ids() == [1, 3, 4]
    assert blocks[1].ref_count == 1
    assert pool.null_block.ref_count == 0


def test_a_block_stays_held_until_its_last_holder_lets_go() -> None:
    pool = BlockPool(3, StepIds())
    [block] = pool.get_new_blocks(1)
    pool.touch([block])

    pool.free_blocks([block])
    assert pool.num_used_blocks == 1
    pool.free_blocks([block])
    assert pool.num_used_blocks == 0


def test_reuse_makes_a_block_forget_its_content() -> None:
    pool = BlockPool(2, StepIds())
    [block] = pool.get_new_blocks(1)
    pool.cache_full_blocks([block], [key(1)])
    pool.free_blocks([block])
    assert pool.find(key(1)) is block

    pool.get_new_blocks(1)

    assert pool.find(key(1)) is None
    assert block.key is None


def test_equal_content_in_two_blocks_is_found_as_long_as_one_is_left() -> None:
    pool = BlockPool(3, StepIds())
    first, second = pool.get_new_blocks(2)
    pool.cache_full_blocks([first, second], [key(1), key(1)])
    pool.free_blocks([first])

    assert pool.get_new_blocks(1) == [first]
    assert pool.find(key(1)) is second
    pool.free_blocks([second, first])
    pool.get_new_blocks(2)
    assert pool.find(key(1)) is None


def test_a_cached_block_keeps_its_key_and_null_blocks_get_none() -> None:
    pool = BlockPool(3, StepIds())
    [block] = pool.get_new_blocks(1)
    pool.cache_full_blocks([block], [key(1)])

    pool.cache_full_blocks([pool.null_block, block], [key(2), key(3)])

    assert pool.find(key(1)) is block
    assert pool.find(key(2)) is None
    assert pool.find(key(3)) is None


def test_the_prefix_cache_is_reset_only_when_no_block_is_held() -> None:
    pool = BlockPool(3, StepIds())
    [block] = pool.get_new_blocks(1)
    pool.cache_full_blocks([block], [key(1)])

    assert pool.reset_prefix_cache() is False
    assert pool.find(key(1)) is block
    pool.free_blocks([block])
    assert pool.reset_prefix_cache() is True
    assert pool.find(key(1)) is None
    assert block.key is None
