"""Bias, mask and penalty kernels against plain Python, and fast versions against the specification."""

from __future__ import annotations

import random

import pytest
import torch

from penstock.kernels.logits_shaping import (
    IN_PROMPT,
    add_to_tokens,
    allow_by_bits,
    allow_by_bits_reference,
    allow_by_bytes,
    ends_with_prefix,
    forbid_tokens,
    keep_tokens,
    penalise,
    penalise_reference,
)

NUM_ROWS, VOCAB_SIZE, NUM_SLOTS = 7, 50, 9


def _logits(seed: int) -> torch.Tensor:
    logits = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    logits[1, 4] = float("-inf")
    return logits


@pytest.mark.parametrize("seed", range(4))
def test_the_fast_penalties_equal_the_specification_to_the_bit(seed: int) -> None:
    rng = random.Random(seed)
    table = torch.zeros(NUM_SLOTS, VOCAB_SIZE, dtype=torch.int32)
    for slot in range(NUM_SLOTS):
        for token in rng.sample(range(VOCAB_SIZE), 20):
            table[slot, token] = rng.choice([0, 1, 2, 700, IN_PROMPT, IN_PROMPT + 3])
    rows = torch.tensor(rng.sample(range(NUM_ROWS), rng.randint(1, NUM_ROWS)))
    slots = torch.tensor([rng.randrange(NUM_SLOTS) for _ in rows])
    penalties = [torch.rand(len(rows)) * 2 + low for low in (0.2, -1.0, -1.0)]
    fast, expected = _logits(seed), _logits(seed)
    # The penalties of each row are those of a slot of its own.
    penalise(fast, rows, table, slots, torch.arange(len(rows)), *penalties)
    penalise_reference(expected, rows, table, slots, *penalties)
    assert torch.equal(fast, expected)
    untouched = sorted(set(range(NUM_ROWS)) - set(rows.tolist()))
    assert torch.equal(fast[untouched], _logits(seed)[untouched])


def test_biases_add_up_and_forbidding_wins() -> None:
    logits = torch.zeros(2, 5)
    add_to_tokens(logits, torch.tensor([0, 0, 1]), torch.tensor([2, 2, 4]), torch.tensor([1.0, 0.5, -2.0]))
    assert logits.tolist() == [[0.0, 0.0, 1.5, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, -2.0]]
    rows, tokens = torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2, 4, 3])
    forbid_tokens(logits, rows, tokens, torch.tensor([True, False, False, False]))
    assert logits.tolist() == [[0.0, 0.0, float("-inf"), 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, -2.0]]


def test_what_is_kept_is_as_it_was_and_other_rows_too() -> None:
    logits, before = _logits(0), _logits(0)
    keep_tokens(logits, torch.tensor([0, 3]), torch.tensor([0, 0, 3, 0]), torch.tensor([5, 7, 0, 5]))
    kept = {0: [5, 7], 3: [0]}
    for row in range(NUM_ROWS):
        for token in range(VOCAB_SIZE):
            is_kept = row not in kept or token in kept[row]
            assert logits[row, token] == (before[row, token] if is_kept else float("-inf"))


@pytest.mark.parametrize("seed", range(20))
def test_prefixes_are_found_at_the_end_and_not_before_the_beginning(seed: int) -> None:
    rng = random.Random(seed)
    table = torch.tensor([rng.choices(range(3), k=12) for _ in range(4)], dtype=torch.int32)
    entries = []
    for _ in range(50):
        length = rng.randint(1, 12)
        prefix = rng.choices(range(3), k=rng.randint(0, 4))
        entries.append((rng.randrange(4), length, rng.randint(0, length), prefix))
    prefixes = torch.tensor([[-1] * (4 - len(prefix)) + prefix for *_, prefix in entries])
    slots, lengths, begins = (torch.tensor(column) for column in list(zip(*entries, strict=True))[:3])
    found = ends_with_prefix(table, slots, lengths, begins, prefixes).tolist()
    for is_found, (slot, length, begin, prefix) in zip(found, entries, strict=True):
        text = table[slot, begin:length].tolist()
        assert is_found == (text[len(text) - len(prefix) :] == prefix if len(text) >= len(prefix) else False)


def test_a_word_of_one_token_has_no_prefix_and_always_matches() -> None:
    none = torch.empty(2, 0, dtype=torch.int64)
    table = torch.zeros(1, 4, dtype=torch.int32)
    zeros = torch.zeros(2, dtype=torch.int64)
    assert ends_with_prefix(table, zeros, zeros + 1, zeros + 1, none).tolist() == [True, True]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 50, 96])
@pytest.mark.parametrize("rows", [None, [5, 0, 3], [6]])
def test_bits_allow_what_a_plain_loop_says_and_the_fast_way_equals_it(vocab_size: int, rows: list[int] | None) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(NUM_ROWS, vocab_size, generator=generator)
    chosen = list(range(NUM_ROWS)) if rows is None else rows
    words = torch.randint(-(2**31), 2**31, (len(chosen), -(-vocab_size // 32)), generator=generator).int()
    words[0] = 0
    expected = logits.clone()
    for number, row in enumerate(chosen):
        for token in range(vocab_size):
            if not int(words[number, token // 32]) >> token % 32 & 1:
                expected[row, token] = float("-inf")
    index = None if rows is None else torch.tensor(rows)
    assert torch.equal(allow_by_bits_reference(logits.clone(), index, words), expected)
    assert torch.equal(allow_by_bits(logits.clone(), index, words), expected)
    assert torch.equal(allow_by_bytes(logits.clone(), index, words), expected)
