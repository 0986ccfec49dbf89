"""Routing of requests to the least loaded engine, or to one with a prefix-cache hit."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.processes.routing import Router

_tokens = st.lists(st.integers(0, 3), max_size=24)
_salts = st.sampled_from([None, "a", "b"])


def shared(first: list[int], second: list[int], block_size: int) -> int:
    """Number of common full blocks at the beginning of two prompts."""
    num = 0
    for start in range(0, min(len(first), len(second)) - block_size + 1, block_size):
        if first[: start + block_size] != second[: start + block_size]:
            break
        num += 1
    return num


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(_tokens, _salts, st.lists(st.integers(0, 20), min_size=3, max_size=3)), max_size=12),
    st.sampled_from([1, 4]),
)
def test_the_choice_is_that_of_the_rule(
    requests: list[tuple[list[int], str | None, list[int]]], block_size: int
) -> None:
    """Compare with a direct implementation of the rule over all prompts that an engine got."""
    router = Router(3, block_size)
    sent: list[list[tuple[list[int], str | None]]] = [[], [], []]
    for tokens, salt, loads in requests:

        def num_seen(engine: int, tokens: list[int] = tokens, salt: str | None = salt) -> int:
            return max((shared(tokens, old, block_size) for old, other in sent[engine] if other == salt), default=0)

        allowed = [engine for engine in range(3) if loads[engine] <= 1.5 * min(loads) + 4]
        most_seen = max(map(num_seen, allowed))
        best = [engine for engine in allowed if num_seen(engine) == most_seen]
        chosen = router.choose(dict(enumerate(loads)), tokens, salt)
        assert chosen in best
        assert loads[chosen] == min(loads[engine] for engine in best)
        sent[chosen].append((tokens, salt))


@settings(deadline=None, max_examples=100)
@given(st.lists(_tokens, max_size=20), st.integers(1, 8))
def test_what_is_remembered_is_bounded_and_beginnings_are_forgotten_last(prompts: list[list[int]], most: int) -> None:
    router = Router(2, 2, max_blocks=most)
    for tokens in prompts:
        chosen = router.choose({0: 0, 1: 0}, tokens)
        assert all(len(seen) <= most for seen in router._seen)
        # What it has just seen it has seen from its beginning on.
        hashes = router._hashes(tokens, None)
        assert router._num_seen(chosen, hashes) == min(most, len(set(hashes)))


def test_an_engine_that_is_not_there_is_not_chosen() -> None:
    router = Router(2, 2)
    assert router.choose({0: 0, 1: 0}, [1, 2, 3]) == 0
    assert router.choose({1: 7}, [1, 2, 3]) == 1


def test_a_cleared_cache_attracts_no_requests() -> None:
    router = Router(2, 2)
    assert router.choose({0: 0, 1: 0}, [1, 2, 3]) == 0
    router.forget(0)
    assert router.choose({0: 1, 1: 0}, [1, 2, 3]) == 1


def test_without_a_cache_only_numbers_count() -> None:
    router = Router(2, None)
    assert [router.choose({0: 1, 1: 0}, [1, 2, 3]), router.choose({0: 0, 1: 1}, [1, 2, 3])] == [1, 0]
