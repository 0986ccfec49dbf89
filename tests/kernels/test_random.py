"""The counter-based numbers against Philox in Python integers and its published values, and their statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.random import TOKENS_PER_GROUP, gumbel_noise, philox, token_bits

_MASK = (1 << 32) - 1
Words = tuple[int, int, int, int]


def _philox(words: Words, key: tuple[int, int]) -> Words:
    for _ in range(10):
        product_0, product_1 = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = (
            (product_1 >> 32) ^ words[1] ^ key[0],
            product_1 & _MASK,
            (product_0 >> 32) ^ words[3] ^ key[1],
            product_0 & _MASK,
        )
        key = (key[0] + 0x9E3779B9) & _MASK, (key[1] + 0xBB67AE85) & _MASK
    return words


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((_MASK,) * 4, (_MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_gives_the_values_that_the_authors_published(counter: Words, key: tuple[int, int], expected: Words) -> None:
    """Known answers of the library Random123, version 1.09, which came with the paper."""
    of_torch = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))  # type: ignore[arg-type]
    assert tuple(word.item() for word in of_torch) == _philox(counter, key) == expected


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**40),
    first_group=st.integers(0, 5000),
    num_tokens=st.integers(1, 200),
)
def test_bits_are_those_of_the_tokens_own_counter(seed: int, position: int, first_group: int, num_tokens: int) -> None:
    first = first_group * TOKENS_PER_GROUP
    bits = token_bits(torch.tensor([seed]), torch.tensor([position]), first, num_tokens)[0].tolist()
    key = seed & _MASK, (seed >> 32) & _MASK
    for index in {0, num_tokens // 2, num_tokens - 1}:
        group, place = divmod(first + index, 64)
        word, lane = divmod(place, 16)
        counter = group * 16 + lane, position & _MASK, position >> 32, 0
        assert bits[index] == _philox(counter, key)[word]
    assert len(bits) == num_tokens


def test_bits_of_neighbouring_seeds_positions_and_tokens_are_uniform_and_unrelated() -> None:
    seeds, positions = torch.meshgrid(torch.arange(60), torch.arange(60), indexing="ij")
    bits = token_bits(seeds.flatten(), positions.flatten(), 0, 64)
    drawn = bits.view(60, 60, 64).numpy() * 2.0**-32
    counts, _ = np.histogram(drawn, bins=64, range=(0, 1))
    expected = drawn.size / 64
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 63 + 5 * np.sqrt(2 * 63)
    centred = drawn - 0.5
    for axis in range(3):
        shifted = np.moveaxis(centred, axis, 0)
        products = shifted[1:] * shifted[:-1]
        assert abs(products.mean() * 12) < 5 / np.sqrt(products.size)


def test_noise_is_minus_the_logarithm_of_exponential_numbers_and_fine_where_they_are_small() -> None:
    bits = torch.tensor([0, 1, 2**31, 2**32 - 1])
    expected = [-math.log(-math.log1p(-(number + 0.5) / 2**32)) for number in bits.tolist()]
    assert gumbel_noise(bits).tolist() == pytest.approx(expected, rel=1e-14)
    assert expected[0] == pytest.approx(33 * math.log(2), rel=1e-9)
    assert expected[0] < 22.9
