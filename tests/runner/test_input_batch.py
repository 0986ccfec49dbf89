"""Input batches, padded and not."""

from __future__ import annotations

import torch

from penstock.contract import SamplingInput
from penstock.step.batch import BatchPlan, InputBatch
from support.runners import Driver, batcher_of, make_runner, new_request

PROMPT = list(range(1, 11))


def _driver() -> Driver:
    driver = Driver(make_runner())
    driver.step({"a": 5, "b": 1}, [new_request("a", PROMPT, first_block=1), new_request("b", [60], first_block=20)])
    return driver


def _launch(driver: Driver, counts: dict[str, int]) -> InputBatch:
    """Inputs of a step that is executed and not yet sampled."""
    return driver.runner.steps._waiting[driver.launch(counts).step_id].batch


def test_padding_belongs_to_the_padding_slot_and_writes_nowhere() -> None:
    runner = _driver().runner
    counts = {"a": 5, "b": 1}
    exact = batcher_of(_driver().runner).build(counts, BatchPlan(6, 2, 6, 2))
    for plan in (BatchPlan(6, 2, 8, 4), BatchPlan(6, 2, 8, 2), BatchPlan(6, 2, 6, 3)):
        padded = batcher_of(runner).build(counts, plan)
        assert padded.layout.req_ids == exact.layout.req_ids == ["b", "a"]
        assert torch.equal(padded.input_ids[:6], exact.input_ids)
        assert torch.equal(padded.positions[:6], exact.positions)
        assert torch.equal(padded.layout.logits_indices, exact.layout.logits_indices)
        tensors = padded.layout.tensors
        assert (tensors.idx_mapping_R[2:] == runner.requests.padding_slot).all()
        assert (tensors.idx_mapping_R[tensors.token_to_req_T[6:]] == runner.requests.padding_slot).all()
        geometry = padded.geometry[0]
        assert torch.equal(geometry.slot_mapping[:6], exact.geometry[0].slot_mapping)
        assert (geometry.slot_mapping[6:] == -1).all()
        assert geometry.seq_lens[2:].sum() == 0
        starts = geometry.query_start_loc.tolist()
        assert starts == sorted(starts)
        assert starts[2:] == [6] * (len(starts) - 2)


def test_geometry_names_each_requests_blocks_and_lengths() -> None:
    geometry = _launch(_driver(), {"a": 5, "b": 1}).geometry[0]
    assert geometry.query_start_loc.tolist() == [0, 1, 6]
    assert geometry.seq_lens.tolist() == [2, 10]
    assert geometry.block_table.tolist() == [[20, 21, 22], [1, 2, 3]]
    assert geometry.slot_mapping.tolist() == [81, 9, 10, 11, 12, 13]
    assert geometry.max_query_len == 5
    assert 10 <= geometry.max_seq_len_upper_bound <= 12  # whole blocks


def test_the_hosts_bounds_are_never_below_the_devices_counts() -> None:
    driver = _driver()
    requests = driver.runner.requests
    for step in range(20):
        batch = _launch(driver, {"a": 5 if step == 0 else 1, "b": 1})
        slots = list(requests.slot_of.values())
        assert (
            requests.num_computed_tokens_upper_bound(slots) >= requests.num_computed_tokens.tensor[slots, 0].numpy()
        ).all()
        (geometry,) = batch.geometry
        assert geometry.max_seq_len_upper_bound >= geometry.seq_lens.max()
        assert geometry.block_table.shape[1] * geometry.block_size >= geometry.seq_lens.max()
        driver.runner.sample_tokens(SamplingInput(step_id=driver.step_id))


def test_one_token_of_each_request_is_laid_out_as_any_number_is() -> None:
    plans = [BatchPlan(2, 2, 2, 2), BatchPlan(2, 2, 3, 2)]  # the second with padding, which takes the way of any layout
    known, general = (batcher_of(_driver().runner).build({"b": 1, "a": 1}, plan).layout for plan in plans)
    assert (known.has_one_token_each, general.has_one_token_each) == (True, False)
    assert known.req_ids == general.req_ids == ["b", "a"]
    assert known.max_query_len == general.max_query_len == 1
    for of_known, of_general in [
        (known.query_start_loc, general.query_start_loc[:3]),
        (known.slots, general.slots),
        (known.logits_indices, general.logits_indices),
        (known.tensors.idx_mapping_R, general.tensors.idx_mapping_R[:2]),
        (known.tensors.num_scheduled_R, general.tensors.num_scheduled_R[:2]),
        (known.tensors.token_to_req_T, general.tensors.token_to_req_T[:2]),
        (known.tensors.token_offset_T, general.tensors.token_offset_T[:2]),
    ]:
        assert of_known.dtype is of_general.dtype
        assert torch.equal(of_known, of_general)
    assert known.query_start_loc_np.tolist() == general.query_start_loc_np.tolist()[:3] == [0, 1, 2]
    assert known.counts_np.tolist() == general.counts_np.tolist() == [1, 1]


def test_a_layout_follows_requests_to_other_slots() -> None:
    driver = _driver()
    builder, requests = batcher_of(driver.runner), driver.runner.requests
    plan = BatchPlan(2, 2, 2, 2)
    first = builder.build({"a": 1, "b": 1}, plan).layout
    assert builder.build({"b": 1, "a": 1}, plan).layout.req_ids == ["b", "a"]
    assert builder.build({"a": 2, "b": 1}, BatchPlan(3, 2, 3, 2)).layout.counts_np.tolist() == [1, 2]
    requests.free_slot("b")
    requests.free_slot("a")
    requests.add(requests.take_slot("b"), new_request("b", [60], first_block=20))
    requests.add(requests.take_slot("a"), new_request("a", PROMPT, first_block=1))
    moved = builder.build({"a": 1, "b": 1}, plan).layout
    assert moved.slots_np.tolist() == [requests.slot_of[req_id] for req_id in moved.req_ids]
    assert moved.slots_np.tolist() != first.slots_np.tolist()


def test_steps_find_their_inputs_where_the_step_before_had_them() -> None:
    driver = _driver()
    buffers = batcher_of(driver.runner)._buffers
    for counts in ({"a": 5, "b": 1}, {"a": 1, "b": 1}, {"b": 1}):
        batch = _launch(driver, counts)
        driver.runner.sample_tokens(SamplingInput(step_id=driver.step_id))
        (geometry,) = batch.geometry
        for tensor, buffer in [
            (batch.input_ids, buffers.input_ids_T),
            (batch.positions, buffers.positions_T),
            (geometry.seq_lens, buffers.seq_lens_R),
            (geometry.slot_mapping, buffers.slot_mappings_T[0]),
            (geometry.block_table, buffers.block_tables_RB[0]),
        ]:
            assert tensor.data_ptr() == buffer.data_ptr()
            assert tensor.stride() == buffer.stride()
