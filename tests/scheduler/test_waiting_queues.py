"""Waiting queue and running list: order of service under both policies, and the version of the lists."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_driver import make_request
from scheduler_fakes import cache_config

from penstock.scheduler.kv_cache_manager import KVCacheManager
from penstock.scheduler.request import Request, RequestStatus
from penstock.scheduler.request_lists import RequestLists, WaitingQueue


def requests(*keys: tuple[int, float]) -> list[Request]:
    result = []
    for order, (priority, arrival_time) in enumerate(keys):
        request = make_request(f"r{order}", [1], priority=priority, arrival_time=arrival_time)
        request.order = order
        result.append(request)
    return result


def admit_all(queue: WaitingQueue) -> list[str]:
    order = []
    while (request := queue.peek()) is not None:
        order.append(request.req_id)
        queue.admit([])
    return order


def test_first_come_is_first_served_whatever_the_priority() -> None:
    queue = WaitingQueue("fcfs")
    for request in requests((5, 3.0), (0, 2.0), (1, 1.0)):
        queue.add(request)

    assert admit_all(queue) == ["r0", "r1", "r2"]


def test_preempted_requests_come_back_to_the_head_in_their_old_order() -> None:
    queue = WaitingQueue("fcfs")
    first, second, new = requests((0, 0.0), (0, 0.0), (0, 0.0))
    queue.add(new)

    # The last running request is preempted first.
    queue.add(second)
    queue.add(first)

    assert admit_all(queue) == ["r0", "r1", "r2"]


def test_lower_priority_numbers_then_earlier_arrivals_then_order_of_addition() -> None:
    queue = WaitingQueue("priority")
    for request in requests((1, 0.0), (0, 9.0), (0, 1.0), (1, 0.0), (-1, 99.0)):
        queue.add(request)

    assert admit_all(queue) == ["r4", "r2", "r1", "r0", "r3"]


def test_running_requests_are_kept_in_order_of_priority() -> None:
    queue = WaitingQueue("priority")
    running: list[Request] = []
    for request in requests((1, 0.0), (2, 0.0), (0, 5.0), (1, 1.0)):
        queue.add(request)
        queue.admit(running)

    assert [request.req_id for request in running] == ["r2", "r0", "r3", "r1"]


def test_running_requests_are_kept_in_order_of_admission() -> None:
    queue = WaitingQueue("fcfs")
    running: list[Request] = []
    for request in requests((1, 0.0), (2, 0.0), (0, 5.0)):
        queue.add(request)
        queue.admit(running)

    assert [request.req_id for request in running] == ["r0", "r1", "r2"]


def test_an_id_may_wait_again_after_it_was_removed() -> None:
    queue = WaitingQueue("priority")
    old, new = requests((0, 0.0), (1, 0.0))
    new.req_id = old.req_id
    queue.add(old)
    queue.remove(old)
    queue.add(new)

    assert queue.peek() is new
    assert len(queue) == 1


def test_a_version_never_comes_back_even_if_as_many_requests_run_as_before() -> None:
    kv_cache = KVCacheManager(cache_config(20), enable_prefix_caching=False, max_num_batched_tokens=16)
    lists = RequestLists("fcfs", kv_cache, lambda _: None, lambda _: None)
    versions = [lists.version]

    def admit() -> None:
        request = lists.waiting.peek()
        assert request is not None
        assert kv_cache.allocate_slots(request, 1, kv_cache.get_computed_blocks(request)) is not None
        lists.waiting.admit(lists.running)
        request.status = RequestStatus.RUNNING

    first, second, third = requests((0, 0.0), (0, 0.0), (0, 0.0))
    for change in (
        lambda: lists.add(first),
        admit,
        lambda: lists.preempt(first),
        admit,
        lambda: lists.add(second),
        lambda: lists.finish(first),
        admit,
        lambda: lists.break_off(second, ValueError("planted")),
        lambda: lists.add(third),
        lambda: lists.wait_for(third.req_id, "its grammar", is_there=False),
        lambda: lists.finish(third),
    ):
        change()
        versions.append(lists.version)

    assert len(set(versions)) == len(versions)


@settings(max_examples=100, deadline=None)
@given(
    policy=st.sampled_from(["fcfs", "priority"]),
    keys=st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.0, 1.0])), min_size=1, max_size=12),
    moves=st.lists(st.tuples(st.sampled_from(["add", "remove", "admit", "turn"]), st.integers(0, 11)), max_size=40),
)
def test_queues_behave_like_sorted_lists(
    policy: str, keys: list[tuple[int, float]], moves: list[tuple[str, int]]
) -> None:
    queue = WaitingQueue(policy)
    pool = requests(*keys)
    expected: list[Request] = []
    for move, number in moves:
        request = pool[number % len(pool)]
        if move == "admit" and (ready := [request for request in expected if not request.waits_for]):
            queue.admit([])
            expected.remove(ready[0])
        elif move == "turn":
            # It becomes ready, or is no longer, whether it waits or not.
            is_waiting = request in expected
            if is_waiting:
                queue.remove(request)
            request.waits_for ^= {"its grammar"}
            if is_waiting:
                queue.add(request)
        elif move == "remove" and request in expected:
            queue.remove(request)
            expected.remove(request)
        elif move == "add" and request not in expected:
            queue.add(request)
            expected.append(request)
        expected.sort(key=lambda request: (*by_policy(request, policy), request.order))
        assert len(queue) == len(expected)
        assert queue.peek() is next((request for request in expected if not request.waits_for), None)


def by_policy(request: Request, policy: str) -> tuple[float, ...]:
    return (request.priority, request.arrival_time) if policy == "priority" else ()
