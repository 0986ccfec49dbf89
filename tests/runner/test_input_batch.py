"""Building a step's tensors, padded and not."""

from __future__ import annotations

import torch

from penstock.runner.batch_plan import BatchPlan
from support.runners import Driver, make_runner, new_request

PROMPT = list(range(1, 11))


def _driver() -> Driver:
    driver = Driver(make_runner())
    driver.step({"a": 5, "b": 1}, [new_request("a", PROMPT, first_block=1), new_request("b", [60], first_block=20)])
    return driver


def test_padding_belongs_to_the_padding_slot_and_writes_nowhere() -> None:
    runner = _driver().runner
    counts = {"a": 5, "b": 1}
    exact = runner.batcher.build(counts, BatchPlan(6, 2, 6, 2))
    for plan in (BatchPlan(6, 2, 8, 4), BatchPlan(6, 2, 8, 2), BatchPlan(6, 2, 6, 3)):
        padded = runner.batcher.build(counts, plan)
        assert padded.layout.req_ids == exact.layout.req_ids == ["b", "a"]
        assert torch.equal(padded.input_ids[:6], exact.input_ids)
        assert torch.equal(padded.positions[:6], exact.positions)
        assert torch.equal(padded.layout.logits_indices, exact.layout.logits_indices)
        assert (padded.layout.idx_mapping[2:] == runner.requests.padding_slot).all()
        geometry = padded.geometry[0]
        assert torch.equal(geometry.slot_mapping[:6], exact.geometry[0].slot_mapping)
        assert (geometry.slot_mapping[6:] == -1).all()
        assert padded.seq_lens[2:].sum() == 0
        starts = geometry.query_start_loc.tolist()
        assert starts == sorted(starts)
        assert starts[2:] == [6] * (len(starts) - 2)


def test_geometry_names_each_requests_blocks_and_lengths() -> None:
    runner = _driver().runner
    geometry = runner.batcher.build({"a": 5, "b": 1}, BatchPlan(6, 2, 6, 2)).geometry[0]
    assert geometry.query_start_loc.tolist() == [0, 1, 6]
    assert geometry.seq_lens.tolist() == [2, 10]
    assert geometry.block_table.tolist() == [[20, 21, 22], [1, 2, 3]]
    assert geometry.slot_mapping.tolist() == [81, 9, 10, 11, 12, 13]
    assert geometry.max_query_len == 5
    assert geometry.max_seq_len_upper_bound == 10


def test_the_hosts_mirror_is_never_below_the_devices_count() -> None:
    driver = _driver()
    requests = driver.runner.requests
    for step in range(4):
        driver.step({"a": 5 if step == 0 else 1, "b": 1})
        for slot in requests.slot_of.values():
            assert requests.num_computed_tokens_upper_bound[slot] >= requests.num_computed_tokens.tensor[slot, 0]


def test_a_layout_is_reused_only_while_requests_slots_counts_and_plan_stay_the_same() -> None:
    driver = _driver()
    builder, requests = driver.runner.batcher, driver.runner.requests
    plan = BatchPlan(2, 2, 2, 2)
    first = builder.build({"a": 1, "b": 1}, plan).layout
    assert builder.build({"a": 1, "b": 1}, plan).layout is first
    assert builder.build({"b": 1, "a": 1}, plan).layout.req_ids in (["a", "b"], ["b", "a"])
    assert builder.build({"a": 1, "b": 1}, BatchPlan(2, 2, 4, 4)).layout is not first
    assert builder.build({"a": 2, "b": 1}, BatchPlan(3, 2, 3, 2)).layout.counts_np.tolist() == [1, 2]
    requests.remove("b")
    requests.remove("a")
    requests.add(new_request("b", [60], first_block=20))
    requests.add(new_request("a", PROMPT, first_block=1))
    moved = builder.build({"a": 1, "b": 1}, plan).layout
    assert moved.slots_np.tolist() == [requests.slot_of[req_id] for req_id in moved.req_ids]
    assert moved.slots_np.tolist() != first.slots_np.tolist()
