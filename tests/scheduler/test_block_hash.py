"""Block hashes: chained over tokens, salts and keys of parts, and equal in every process."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys
from typing import ClassVar

import pytest
from scheduler_driver import make_request

from penstock.contract import Part, Parts
from penstock.scheduler.block_hash import ROOT_HASH, BlockHasher, ExtraKeys
from penstock.scheduler.request import Request


def hashes_of(prompt: list[int], salt: str | None = None) -> list[bytes]:
    request = make_request("r", prompt, cache_salt=salt)
    BlockHasher(4).extend(request)
    return request.block_hashes


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(hashes_of([1] * length)) for length in (3, 4, 7, 8)] == [0, 1, 1, 2]


def test_a_hash_is_the_sha256_of_its_parent_and_its_tokens() -> None:
    first, second = hashes_of([1, 2, 3, 4, 5, 6, 7, 8])

    assert first == hashlib.sha256(bytes(32) + struct.pack("<4q", 1, 2, 3, 4)).digest()
    assert second == hashlib.sha256(first + struct.pack("<4q", 5, 6, 7, 8)).digest()


@pytest.mark.parametrize("changed", range(8))
def test_a_hash_depends_on_every_token_up_to_its_block(changed: int) -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    before = hashes_of(prompt)
    prompt[changed] += 1
    after = hashes_of(prompt)

    assert (before[0] == after[0]) is (changed >= 4)
    assert before[1] != after[1]


def test_a_salt_changes_all_hashes_and_equal_salts_agree() -> None:
    plain, salted, other = (hashes_of([1] * 12, salt) for salt in (None, "a", "b"))

    assert not set(plain) & set(salted)
    assert not set(salted) & set(other)
    assert hashes_of([1] * 12, "a") == salted
    assert hashes_of([1] * 12, "") != plain


class _Adapter(Part, frozen=True, kw_only=True):
    feature: ClassVar[str] = "adapter"
    name: str
    scale: float = 1.0

    def block_keys(self) -> tuple[str, ...]:
        return (self.name,)


def test_the_keys_of_a_part_change_all_hashes_and_the_rest_of_it_changes_none() -> None:
    def hashes(*parts: Part, salt: str | None = None) -> list[bytes]:
        request = make_request("r", [1] * 12, cache_salt=salt, parts=Parts.of(parts) if parts else None)
        BlockHasher(4).extend(request)
        return request.block_hashes

    adapted = hashes(_Adapter(name="a"))
    assert hashes(_Adapter(name="a", scale=2.0)) == adapted
    for other in (hashes(), hashes(_Adapter(name="b")), hashes(salt="a"), hashes(_Adapter(name="a"), salt="a")):
        assert not set(other) & set(adapted)


class _Image(Part, frozen=True, kw_only=True):
    feature: ClassVar[str] = "image"
    name: str
    position: int

    def keys_of_block(self, start: int, stop: int) -> tuple[str, ...]:
        return (self.name,) if start <= self.position < stop else ()


def test_keys_of_a_block_change_its_hash_and_those_after_it() -> None:
    def hashes(name: str, position: int) -> list[bytes]:
        request = make_request("r", [1] * 12, parts=Parts.of([_Image(name=name, position=position)]))
        BlockHasher(4).extend(request)
        return request.block_hashes

    plain, first, other = hashes_of([1] * 12, None), hashes("a", 5), hashes("b", 5)
    assert plain[0] == first[0] == other[0]
    assert not {*plain[1:]} & {*first[1:]}
    assert not {*first[1:]} & {*other[1:]}
    assert hashes("a", 6) == first
    assert hashes("a", 9)[:2] == plain[:2]


def test_a_salt_enters_with_the_first_block_only() -> None:
    hasher = BlockHasher(4)
    first, second = hashes_of([1] * 8, "a")

    assert first == hasher.hash_block(ROOT_HASH, [1] * 4, (("cache_salt", "a"),))
    assert second == hasher.hash_block(first, [1] * 4)


def test_hashes_grow_with_the_tokens_and_are_never_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    request = make_request("r", [1, 2, 3, 4, 5, 6])
    hasher = BlockHasher(4)
    hasher.extend(request)
    calls: list[list[int]] = []

    def hash_block(parent_hash: bytes, token_ids: list[int], extra: ExtraKeys) -> bytes:
        calls.append(token_ids)
        return BlockHasher(4).hash_block(parent_hash, token_ids, extra)

    monkeypatch.setattr(hasher, "hash_block", hash_block)

    for token_id in (7, 8, 9):
        request.all_token_ids.append(token_id)
        hasher.extend(request)

    assert calls == [[5, 6, 7, 8]]
    assert request.block_hashes == hashes_of([1, 2, 3, 4, 5, 6, 7, 8])


def test_hashes_are_the_same_in_another_process() -> None:
    code = (
        "from penstock.scheduler.block_hash import BlockHasher, ROOT_HASH;"
        "print(BlockHasher(3).hash_block(ROOT_HASH, [1, 2, 3], (('cache_salt', 'x'),)).hex())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    assert other == BlockHasher(3).hash_block(ROOT_HASH, [1, 2, 3], (("cache_salt", "x"),)).hex()


def test_large_token_ids_are_hashed_exactly() -> None:
    hasher = BlockHasher(1)

    assert hasher.hash_block(ROOT_HASH, [2**40]) != hasher.hash_block(ROOT_HASH, [0])


def test_requests_are_equal_only_to_themselves() -> None:
    first, second = make_request("r", [1]), make_request("r", [1])

    assert first != second
    assert len({first, second, first}) == 2
    assert not hasattr(first, "__dict__")
    assert isinstance(first, Request)
