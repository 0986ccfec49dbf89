"""Images in prompts as a plugin: an encoder cache, chunks that end before items, and prefixes with keys per block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from core.plugins import CIRCUMSTANCES, assert_equal, images, install_plugin, write_checkpoint
from core.plugins.images import ImageFeatures, ImageScheduler, ImagesOptions, ImagesPart, Item
from penstock.contract import Parts, RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import ConfigError, InvalidRequest
from penstock.runner.execute.execution import LAYERS, MIXED, PIECES, UNIFORM
from support.checkpoints import VOCAB_SIZE
from support.disturbed_workers import FailingWorker
from support.engines import Result, add, finish, greedy, make_core, owner_of, random_prompts
from support.padded_attention import PaddedBackend, use_graphs

OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4}
# The token in the place of an image's.
PLACEHOLDER = 3


@dataclass
class Prompt:
    token_ids: list[int]
    items: list[Item]

    def __post_init__(self) -> None:
        for item in self.items:
            stop = min(item.stop, len(self.token_ids))
            self.token_ids[item.offset : stop] = [PLACEHOLDER] * (stop - item.offset)


def with_items(*items: tuple[int, int, int, bool]) -> list[Item]:
    """Items by offset, length, seed and whether they may be cut."""
    return [Item(offset=offset, length=length, seed=seed, may_cut=may_cut) for offset, length, seed, may_cut in items]


ITEMS = [
    [],
    with_items((2, 6, 1, True), (10, 5, 2, False), (20, 12, 3, True)),
    [],
    with_items((0, 7, 4, False), (33, 7, 5, False)),
    with_items((0, 13, 6, True)),
    with_items((3, 5, 2, False), (8, 5, 2, True), (21, 1, 7, False)),
]
TOKEN_IDS = random_prompts((5, 37, 1, 40, 13, 22), VOCAB_SIZE, seed=3)
PROMPTS = [Prompt(token_ids, items) for token_ids, items in zip(TOKEN_IDS, ITEMS, strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    images.register()
    return write_checkpoint(tmp_path_factory.mktemp("seeing"), images.ARCHITECTURE)


def add_prompt(core: EngineCore, req_id: str, prompt: Prompt, max_tokens: int = 20, num_logprobs: int = 2) -> None:
    parts = Parts.of([ImagesPart(items=prompt.items)]) if prompt.items else None
    params = greedy(max_tokens, logprobs=num_logprobs) if num_logprobs else greedy(max_tokens)
    add(core, req_id, prompt.token_ids, params, parts=parts)


def run(core: EngineCore, prompts: Sequence[Prompt], **fields: Any) -> list[Result]:
    for index, prompt in enumerate(prompts):
        add_prompt(core, f"r{index}", prompt, **fields)
    results: dict[str, Result] = {}
    finish(core, results)
    return [results[f"r{index}"] for index in range(len(prompts))]


def features_of(core: EngineCore) -> ImageFeatures:
    return owner_of(core, ImageFeatures)


def scheduler_of(core: EngineCore) -> ImageScheduler:
    return next(found for found in core.scheduler.features if isinstance(found, ImageScheduler))


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Result]:
    """Each request by itself, layer by layer."""
    core = make_core(folder, **OPTIONS, fast_paths="off", enable_prefix_caching=False)
    try:
        return [run(core, [prompt])[0] for prompt in PROMPTS]
    finally:
        core.close()


@pytest.mark.parametrize("options", CIRCUMSTANCES, ids=str)
def test_mixed_batches_have_the_bits_of_requests_alone(
    folder: Path, alone: list[Result], options: dict[str, Any]
) -> None:
    core = make_core(folder, **OPTIONS, **options)
    results = run(core, PROMPTS)
    assert_equal(results, alone)
    if "kv_cache_memory_bytes" in options:
        assert core.scheduler.num_preemptions > 0
    features = features_of(core)
    assert features.num_rows == scheduler_of(core).num_rows == 0
    assert 12 <= features.most_rows <= ImagesOptions().cache_rows
    for index, (prompt, result) in enumerate(zip(PROMPTS, results, strict=True)):
        for number in range(len(prompt.items)):
            assert 1 <= features.num_encoded[f"r{index}", number] <= 1 + result.num_preemptions
    core.close()


def test_a_picture_changes_what_is_generated(folder: Path, alone: list[Result]) -> None:
    others = [[Item(offset=one.offset, length=one.length, seed=9) for one in prompt.items] for prompt in PROMPTS]
    core = make_core(folder, **OPTIONS)
    for changed in (others, [[] for _ in PROMPTS]):
        prompts = [Prompt(prompt.token_ids, items) for prompt, items in zip(PROMPTS, changed, strict=True)]
        for prompt, result, expected in zip(PROMPTS, run(core, prompts), alone, strict=True):
            assert (result.logprobs == expected.logprobs) is not bool(prompt.items)
    core.close()


def test_items_that_must_not_be_cut_are_computed_in_one_step(folder: Path, alone: list[Result]) -> None:
    core = make_core(folder, **OPTIONS, max_num_batched_tokens=7)
    chunks: dict[str, list[tuple[int, int]]] = {}
    for index, prompt in enumerate(PROMPTS):
        add_prompt(core, f"r{index}", prompt)
    schedule = core.scheduler.schedule

    def noting() -> Any:
        message = schedule()
        for req_id, start in message.first_positions():
            chunks.setdefault(req_id, []).append((start, start + message.num_scheduled_tokens[req_id]))
        return message

    core.scheduler.schedule = noting  # type: ignore[method-assign]
    results: dict[str, Result] = {}
    finish(core, results)
    assert_equal([results[f"r{index}"] for index in range(len(PROMPTS))], alone)
    for index, prompt in enumerate(PROMPTS):
        for item in prompt.items:
            num_chunks = sum(item.overlaps(*chunk) for chunk in chunks[f"r{index}"])
            assert num_chunks == 1 if not item.may_cut else num_chunks >= 1
    assert sum(PROMPTS[1].items[2].overlaps(*chunk) for chunk in chunks["r1"]) > 1
    core.close()


def test_cached_prefixes_end_at_the_block_of_another_picture(folder: Path, alone: list[Result]) -> None:
    token_ids, items = PROMPTS[1].token_ids, PROMPTS[1].items
    another = [*items[:1], Item(offset=10, length=5, seed=9, may_cut=False), *items[2:]]
    shifted = [*items[:2], Item(offset=19, length=12, seed=3), *items[3:]]
    core = make_core(folder, **OPTIONS)
    run(core, [PROMPTS[1]])
    same = run(core, [PROMPTS[1]])[0]
    assert_equal([same], [alone[1]])
    found = [run(core, [Prompt([*token_ids], one)])[0].num_cached_tokens for one in (items, another, shifted, [])]
    assert (same.num_cached_tokens, found) == (36, [36, 8, 16, 0])
    # Each of the first three items is encoded for the first request, and what the others do not find.
    assert features_of(core).num_encoded == {("r0", 0): 1, ("r0", 1): 2, ("r0", 2): 3}
    core.close()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_features_of_an_aborted_request_are_freed(folder: Path, alone: list[Result], async_scheduling: bool) -> None:
    core = make_core(folder, **OPTIONS, max_num_batched_tokens=7, async_scheduling=async_scheduling)
    add_prompt(core, "gone", PROMPTS[4])
    core.step()
    assert scheduler_of(core).num_rows == 13
    core.abort_requests(["gone"])
    assert_equal(run(core, PROMPTS[3:5]), alone[3:5])
    assert features_of(core).num_rows == scheduler_of(core).num_rows == 0
    core.close()


def test_rows_of_replaced_workers_are_not_counted(folder: Path) -> None:
    core = make_core(folder, **OPTIONS, max_num_batched_tokens=7)
    add_prompt(core, "gone", PROMPTS[4])
    core.step()
    core.abort_requests(["gone"])
    # No message will name the request.
    core.scheduler.reset_for_recovery()
    assert scheduler_of(core).num_rows == 0
    core.close()


class FailingAmongItems(FailingWorker):
    """Fails while items are cached, once."""


@pytest.mark.parametrize("step", [2, 5])
def test_items_are_encoded_again_where_a_worker_fails(folder: Path, alone: list[Result], step: int) -> None:
    FailingAmongItems.fails_at = {("execute", step)}
    options = {"max_num_batched_tokens": 7, "worker_cls": f"{__name__}.FailingAmongItems"}
    core = make_core(folder, **OPTIONS, **options)
    assert_equal(run(core, PROMPTS), alone)
    assert not FailingAmongItems.fails_at
    assert features_of(core).num_rows == scheduler_of(core).num_rows == 0
    core.close()


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (with_items((0, 9, 1, False)), "An image has 9 tokens. Allowed: up to 8."),
        (with_items((0, 17, 1, True)), "An image has 17 tokens. Allowed: up to 16."),
        (with_items((0, 4, 1, True), (3, 2, 1, True)), "is not within the 40 tokens, after others"),
        (with_items((38, 4, 1, True)), "is not within the 40 tokens, after others"),
    ],
)
def test_items_that_no_step_can_compute_are_refused(folder: Path, items: list[Item], message: str) -> None:
    core = make_core(folder, **OPTIONS, max_num_batched_tokens=8)
    with pytest.raises(InvalidRequest, match=message):
        add_prompt(core, "a", Prompt([5] * 40, items))
    assert not core.has_unfinished_requests()
    core.close()


@pytest.mark.parametrize("given", [{"images": {"cache_rows": 13}}, '{"images": {"cache_rows": 13}}'], ids=type)
def test_the_encoder_cache_has_the_rows_that_an_option_gives(folder: Path, alone: list[Result], given: Any) -> None:
    core = make_core(folder, **OPTIONS, additional_config=given)
    assert_equal(run(core, PROMPTS), alone)
    assert features_of(core).most_rows == 13
    with pytest.raises(InvalidRequest, match="An image has 14 tokens. Allowed: up to 13."):
        add_prompt(core, "a", Prompt([5] * 40, with_items((0, 14, 1, True))))
    core.close()


@pytest.mark.one_path(reason="refused before a step")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"images": {"rows": 8}}, r"additional_config\['images'\] has 'rows', .* of this feature. Allowed: cache_rows"),
        ({"images": {"cache_rows": 0}}, "cache_rows=0 is not valid. Allowed: a number from 1 on"),
        ({"pictures": {}}, "options for 'pictures', which is no registered feature. Registered: .*images"),
        ({"pooling": {"rows": 8}}, "has 'rows', which is no option of this feature. Allowed: nothing"),
        (
            '{"images": 8}',
            "additional_config=.* is not valid. Allowed: a dictionary with a dictionary",
        ),
        ("{", "additional_config='{' is not JSON"),
    ],
    ids=str,
)
def test_options_that_a_feature_does_not_have_are_refused(folder: Path, given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_core(folder, **OPTIONS, additional_config=given)


@pytest.mark.one_path(reason="recorded programs belong to the fast paths")
def test_the_model_stays_one_program(folder: Path, alone: list[Result]) -> None:
    core = make_core(folder, **OPTIONS)
    assert_equal(run(core, PROMPTS), alone)

    def programs(worker: Any) -> dict[Any, int]:
        recorded = worker.runner.execution.programs._recorded
        return {key: 0 if found is None else found.num_segments for key, found in recorded.items()}

    # First, since programs are forgotten after a function that workers do not know.
    (text,) = core.collective_rpc(RpcCall("get_model_inspection"))
    assert "Layer by layer" not in text
    (found,) = core.collective_rpc(RpcCall(programs))
    assert set(found.values()) == {1}
    has_images = [any(shape.name == images.FEATURES for shape in what.shapes) for _, what in found]
    assert {True, False} == set(has_images)
    core.close()


@pytest.mark.one_path(reason="runs engines with and without fast paths itself")
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(("mode", "kinds"), [("full_and_piecewise", [PIECES, UNIFORM]), ("full", [MIXED, UNIFORM])])
def test_graphs_give_the_tokens_of_steps_without_graphs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str, kinds: list[str], async_scheduling: bool
) -> None:
    device = use_graphs(monkeypatch)
    options = {**OPTIONS, "max_num_batched_tokens": 16, "async_scheduling": async_scheduling}
    options |= {"attention_backend": PaddedBackend.name, "enable_prefix_caching": False, "cudagraph_mode": mode}
    tokens = []
    for fast_paths in ("auto", "off"):
        core = make_core(folder, **options, fast_paths=fast_paths)
        # The second time all graphs are there.
        results = [run(core, PROMPTS, num_logprobs=0) for _ in range(2)]
        tokens.append([one.tokens for each in results for one in each])
        if fast_paths == "auto":
            (counts,) = core.collective_rpc(RpcCall("get_graph_stats"))
            assert all(counts[kind] > 5 for kind in kinds), counts
            assert counts.get(LAYERS, 0) == 0, counts
        core.close()
    assert tokens[0] == tokens[1]
    assert device.refusals == []


@pytest.mark.slow
def test_ranks_of_a_tensor_parallel_group_see_the_same(
    folder: Path, alone: list[Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin(tmp_path, monkeypatch, "images")
    results = []
    for options in ({}, {"fast_paths": "off"}, {"max_num_batched_tokens": 7}):
        core = make_core(folder, **OPTIONS, **options, tensor_parallel_size=2)
        results.append(run(core, PROMPTS))
        core.close()
    assert_equal(results[0], results[1])
    assert_equal(results[2], results[1])
    for result, expected in zip(results[0], alone, strict=True):
        for row, other in zip(result.logprobs[:1], expected.logprobs[:1], strict=True):
            assert max(abs(row[token] - other[token]) for token in row.keys() & other.keys()) < 1e-3
