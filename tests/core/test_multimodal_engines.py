"""Engines with images in prompts: whatever happens around a request, its answer has the bits that it has alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace as replaced

from core.plugins import CIRCUMSTANCES, assert_equal
from penstock import LLM, SamplingParams
from penstock.contract import Parts, RpcCall, SchedulerOutput, part_of
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import CheckpointError, InvalidRequest, UnsupportedParameter
from penstock.features.multimodal.inputs import request_media
from penstock.features.multimodal.messages import MediaPart, StepMediaPart
from penstock.features.multimodal.scheduling import MediaScheduling
from penstock.features.multimodal.worker import MediaFeatures
from penstock.layers.embedding import GIVEN_EMBEDDINGS
from penstock.media.processors.reading import read_processor
from penstock.runner.execute.execution import LAYERS, MIXED, PIECES, UNIFORM
from penstock.worker.worker import Worker
from support.adapters import make_adapter, request_of, with_adapter
from support.disturbed_workers import FailingWorker
from support.engines import Result, add, finish, greedy, make_core, owner_of
from support.features import scheduler_side
from support.multimodal_answers import NUM_TOKENS, assert_answered_as_by
from support.multimodal_models import (
    PLACEHOLDERS,
    MediaPrompt,
    expanded,
    picture,
    save_multimodal,
    tiny_multimodal_model,
    words,
)
from support.padded_attention import PaddedBackend, use_graphs

OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_model_len": 128}
# Positions in three axes, and plain ones.
NAMES = ("qwen2.5-vl", "smolvlm")


def texts(name: str) -> list[tuple[str, Any]]:
    """Eight texts, with images of several sizes or none, of which two have the same one."""
    image = PLACEHOLDERS.get(name, "<image>")
    return [
        (f"{words(5, 6)} {image} {words(7, 8, 9)}", [picture(40, 24, 1)]),
        (words(*range(10, 31)), []),
        (f"{image} {words(11)} {image} {words(12, 13)}", [picture(16, 48, 2), picture(33, 31, 3)]),
        (f"{words(*range(20, 30))} {image}", [picture(24, 24, 4)]),
        (words(3), []),
        (f"{words(5, 6)} {image} {words(9)}", [picture(40, 24, 1)]),
        (f"{words(5, 6)} {image} {words(7, 8, 9)}", [picture(40, 24, 5)]),
        (f"{words(*range(40, 45))} {image} {image} {words(2)}", [picture(20, 20, 6), picture(16, 48, 2)]),
    ]


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(name)
    save_multimodal(folder, name)
    return folder


@pytest.fixture(scope="module")
def prompts(name: str, folder: Path) -> list[MediaPrompt]:
    return expanded(folder, texts(name))


@pytest.fixture(scope="module")
def alone(folder: Path, prompts: list[MediaPrompt]) -> list[Result]:
    """Each request by itself, layer by layer."""
    core = make_core(folder, **OPTIONS, fast_paths="off", enable_prefix_caching=False)
    try:
        return [run(core, [prompt])[0] for prompt in prompts]
    finally:
        core.close()


def add_prompt(core: EngineCore, req_id: str, prompt: MediaPrompt, **fields: Any) -> None:
    add(core, req_id, prompt.token_ids, greedy(12, **{"logprobs": 2, **fields}), parts=prompt.parts)


def run(core: EngineCore, prompts: Sequence[MediaPrompt], **fields: Any) -> list[Result]:
    for index, prompt in enumerate(prompts):
        add_prompt(core, f"r{index}", prompt, **fields)
    results: dict[str, Result] = {}
    finish(core, results)
    return [results[f"r{index}"] for index in range(len(prompts))]


def features_of(core: EngineCore) -> MediaFeatures:
    return owner_of(core, MediaFeatures)


def num_encoded(core: EngineCore) -> int:
    (stats,) = core.collective_rpc(RpcCall("get_encoder_timing_stats"))
    return int(stats["num_items"])


def num_found(core: EngineCore) -> tuple[int, int]:
    """Items that were looked up in the encoder cache, and found."""
    stats = core.stats()
    return stats.num_encoder_queries, stats.num_encoder_hits


def assert_nothing_is_left(core: EngineCore) -> None:
    """No request uses a feature, and scheduler and worker agree about those that are cached."""
    core.step()
    media = scheduler_side(core, MediaScheduling)
    assert (media.cache.num_used_rows, media._running, media._planned) == (0, {}, {})
    features = features_of(core)
    # Without those that could not be encoded.
    cached = {key: len(rows) for key, rows in features._cache.items()}
    assert cached.items() <= media.cache._rows.items()
    assert features._inputs.keys() <= media.cache._rows.keys() - cached.keys()
    assert not features._items
    assert core.scheduler.kv_cache.num_used_blocks == 0


@pytest.mark.parametrize(
    "options",
    [
        *CIRCUMSTANCES,
        {"encoder_cache_size": 24, "max_num_batched_tokens": 16},
        {"max_num_encoder_input_tokens": 20},
        {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    ],
    ids=str,
)
@pytest.mark.each_value_quick
def test_mixed_batches_have_the_bits_of_requests_alone(
    folder: Path, prompts: list[MediaPrompt], alone: list[Result], options: dict[str, Any]
) -> None:
    core = make_core(folder, **{**OPTIONS, **options})
    results = run(core, prompts)
    assert_equal(results, alone)
    if "kv_cache_memory_bytes" in options:
        assert core.scheduler.num_preemptions > 0
    assert_nothing_is_left(core)
    core.close()


class FailingAmongItems(FailingWorker):
    """Fails while items are cached, once."""


@pytest.mark.parametrize("step", [1, 5])
@pytest.mark.each_value_quick
def test_items_are_encoded_again_where_a_worker_fails(
    folder: Path, prompts: list[MediaPrompt], alone: list[Result], step: int
) -> None:
    FailingAmongItems.fails_at = {("execute", step)}
    core = make_core(folder, **OPTIONS, max_num_batched_tokens=7, worker_cls=f"{__name__}.FailingAmongItems")
    assert_equal(run(core, prompts), alone)
    assert not FailingAmongItems.fails_at
    assert_nothing_is_left(core)
    core.close()


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.each_value_quick
def test_an_abort_within_an_item_leaves_nothing_behind(
    folder: Path, prompts: list[MediaPrompt], alone: list[Result], async_scheduling: bool
) -> None:
    core = make_core(folder, **OPTIONS, max_num_batched_tokens=7, async_scheduling=async_scheduling)
    add_prompt(core, "gone", prompts[0])
    core.step()
    assert scheduler_side(core, MediaScheduling).cache.num_used_rows > 0
    core.abort_requests(["gone"])
    assert_equal(run(core, prompts[:3]), alone[:3])
    # Its features were still there.
    assert num_encoded(core) == 3
    assert_nothing_is_left(core)
    core.close()


def test_prefixes_are_shared_up_to_the_block_of_another_image(
    folder: Path, prompts: list[MediaPrompt], alone: list[Result]
) -> None:
    first, text, *_, sixth, another, _ = prompts
    core = make_core(folder, **OPTIONS)
    assert_equal(run(core, [first]), alone[:1])
    again = run(core, [first])
    assert_equal(again, alone[:1])
    assert num_encoded(core) == 1
    # The image of the other prompt has as many tokens.
    assert [len(first.token_ids), *first.items[0].runs] == [len(another.token_ids), *another.items[0].runs]
    before = first.items[0].start // 4 * 4
    found = [run(core, [prompt])[0] for prompt in (another, sixth, text)]
    assert_equal(found, [alone[6], alone[5], alone[1]])
    pairs = zip(first.token_ids, sixth.token_ids, strict=False)
    common = next(number for number, (one, other) in enumerate(pairs) if one != other)
    assert common >= first.items[0].stop
    shared = [(len(first.token_ids) - 1) // 4 * 4, before, common // 4 * 4, 0]
    assert [one.num_cached_tokens for one in (*again, *found)] == shared
    assert num_encoded(core) == 2
    core.close()


def test_log_probabilities_of_prompts_are_those_of_requests_alone(folder: Path, prompts: list[MediaPrompt]) -> None:
    found = []
    for options in ({"enable_prefix_caching": False, "fast_paths": "off"}, {"max_num_batched_tokens": 7}):
        core = make_core(folder, **{**OPTIONS, **options})
        fields = {"prompt_logprobs": 2}
        each = [run(core, prompts, **fields)] if len(options) == 1 else [run(core, [one], **fields) for one in prompts]
        found.append([result for results in each for result in results])
        core.close()
    for prompt, one, other in zip(prompts, *found, strict=True):
        assert one.prompt_logprobs == other.prompt_logprobs
        assert len(one.prompt_logprobs or ()) == len(prompt.token_ids) - 1


def test_an_item_that_cannot_be_encoded_ends_its_own_request_only(
    folder: Path, prompts: list[MediaPrompt], alone: list[Result]
) -> None:
    core = make_core(folder, **OPTIONS, max_num_batched_tokens=16)
    (item,) = prompts[3].items
    nothing = replaced(item, key="nothing", inputs={})
    # As with one uuid for two images.
    misnamed = replaced(item, key=prompts[2].items[0].key)
    bad = [MediaPrompt(prompts[3].token_ids, Parts.of([MediaPart(items=[one])])) for one in (nothing, misnamed)]
    results = run(core, [prompts[2], *bad, prompts[3]])
    assert_equal([results[0], results[3]], [alone[2], alone[3]])
    assert "two items have one uuid" in str(results[2].error)
    assert results[1].error is not None
    assert_nothing_is_left(core)
    core.close()


def test_features_that_are_dropped_are_computed_again(
    folder: Path, prompts: list[MediaPrompt], alone: list[Result]
) -> None:
    core = make_core(folder, **OPTIONS, max_num_batched_tokens=7, enable_prefix_caching=False)
    add_prompt(core, "r", prompts[0])
    results: dict[str, Result] = {}
    for output in core.step():
        results.setdefault("r", Result()).take(output)
    core.collective_rpc(RpcCall("reset_encoder_cache"))
    assert features_of(core).num_rows == 0
    finish(core, results)
    assert_equal([results["r"]], alone[:1])
    assert num_encoded(core) == 2
    queries, hits = num_found(core)
    assert queries - hits == 2
    assert_equal(run(core, prompts[:1]), alone[:1])
    assert num_encoded(core) == 2
    assert num_found(core) == (queries + 1, hits + 1)
    stats = core.stats()
    assert stats.num_encoder_tokens > stats.num_cached_encoder_tokens == features_of(core).num_rows > 0
    assert stats.num_used_encoder_tokens == 0
    core.collective_rpc(RpcCall("reload_weights"))
    assert_equal(run(core, prompts[:1]), alone[:1])
    assert_nothing_is_left(core)
    core.close()


@pytest.mark.one_path(reason="recorded programs belong to the fast paths")
def test_the_language_model_stays_one_program(folder: Path, prompts: list[MediaPrompt], alone: list[Result]) -> None:
    core = make_core(folder, **OPTIONS)
    assert_equal(run(core, prompts), alone)

    def programs(worker: Any) -> dict[Any, int]:
        recorded = worker.runner.execution.programs._recorded
        return {key: 0 if found is None else found.num_segments for key, found in recorded.items()}

    # First, since programs are forgotten after a function that workers do not know.
    (text,) = core.collective_rpc(RpcCall("get_model_inspection"))
    assert "Layer by layer" not in text
    (found,) = core.collective_rpc(RpcCall(programs))
    assert set(found.values()) == {1}
    has_images = [any(shape.name == GIVEN_EMBEDDINGS for shape in what.shapes) for _, what in found]
    assert {True, False} == set(has_images)
    core.close()


@pytest.mark.one_path(reason="runs engines with and without fast paths itself")
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(("mode", "kinds"), [("full_and_piecewise", [PIECES, UNIFORM]), ("full", [MIXED, UNIFORM])])
@pytest.mark.each_value_quick
def test_graphs_give_the_tokens_of_steps_without_graphs(
    folder: Path,
    prompts: list[MediaPrompt],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    kinds: list[str],
    async_scheduling: bool,
) -> None:
    device = use_graphs(monkeypatch)
    options = {**OPTIONS, "max_num_batched_tokens": 16, "async_scheduling": async_scheduling}
    options |= {"attention_backend": PaddedBackend.name, "enable_prefix_caching": False, "cudagraph_mode": mode}
    tokens = []
    for fast_paths in ("auto", "off"):
        core = make_core(folder, **options, fast_paths=fast_paths)
        # The second time all graphs are there.
        results = [run(core, [prompts[4], *prompts[:4]], logprobs=None) for _ in range(2)]
        tokens.append([one.tokens for each in results for one in each])
        if fast_paths == "auto":
            (counts,) = core.collective_rpc(RpcCall("get_graph_stats"))
            assert all(counts[kind] > 5 for kind in kinds), counts
            assert counts.get(LAYERS, 0) == 0, counts
        core.close()
    assert tokens[0] == tokens[1]
    assert device.refusals == []


@pytest.mark.parametrize(
    "options", [{"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "bfloat16"}], ids=str
)
@pytest.mark.each_value_quick
def test_rounded_weights_give_the_bits_of_requests_alone(
    folder: Path, prompts: list[MediaPrompt], options: dict[str, Any]
) -> None:
    found = []
    for of_steps in ({"enable_prefix_caching": False}, {"max_num_batched_tokens": 7}):
        core = make_core(folder, **{**OPTIONS, **options, **of_steps})
        each = [run(core, prompts)] if "max_num_batched_tokens" in of_steps else [run(core, [one]) for one in prompts]
        found.append([result for results in each for result in results])
        core.close()
    assert_equal(found[1], found[0])


class NotingWorker(Worker):
    """Notes the bytes of pixels in each message that has any."""

    sent: ClassVar[list[int]] = []

    def execute_model(self, output: SchedulerOutput) -> None:
        parts = [part_of(new.parts, MediaPart) for new in output.scheduled_new_reqs]
        assert all(item.inputs == {} for part in parts if part is not None for item in part.items)
        step = part_of(output.parts, StepMediaPart)
        inputs = {} if step is None else step.inputs
        self.sent += [sum(len(array.data) for array in arrays.values()) for arrays in inputs.values()]
        super().execute_model(output)


def test_pixels_are_sent_to_workers_with_the_step_that_encodes_them(
    folder: Path, prompts: list[MediaPrompt], alone: list[Result]
) -> None:
    NotingWorker.sent.clear()
    options = {**OPTIONS, "enable_prefix_caching": False, "max_num_batched_tokens": 7}
    core = make_core(folder, **options, worker_cls=f"{__name__}.NotingWorker")
    # The third has the image of the first.
    asked = [prompts[0], prompts[1], prompts[5]]
    assert_equal(run(core, asked), [alone[0], alone[1], alone[5]])
    (item,) = prompts[0].items
    assert NotingWorker.sent == [sum(len(array.data) for array in item.inputs.values())]
    assert_equal(run(core, asked[:1]), alone[:1])
    assert len(NotingWorker.sent) == 1
    assert_nothing_is_left(core)
    core.close()


def test_media_that_become_too_large_are_refused(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, images = texts(name)[2]
    prompt: Any = {"prompt": text, "multi_modal_data": {"image": images}}
    params = SamplingParams(max_tokens=1)
    with LLM(str(folder), **OPTIONS) as llm:
        monkeypatch.setattr(request_media, "_MAX_BYTES", 4096)
        with pytest.raises(
            InvalidRequest, match=r"more than 4.00 KiB once .*, with item 1 of 2 \(image\)\. Give fewer"
        ):
            llm.generate([prompt], params, use_tqdm=False)
        monkeypatch.undo()
        assert llm.generate([prompt], params, use_tqdm=False)[0].finished


def test_caches_of_media_are_reset_by_name(name: str, folder: Path) -> None:
    text, images = texts(name)[0]
    with LLM(str(folder), **OPTIONS, enable_prefix_caching=False) as llm:
        processor = llm._session._input_processor.media_intake._media._processor  # type: ignore[union-attr]
        prompt: Any = {"prompt": text, "multi_modal_data": {"image": images}}

        def counts() -> tuple[int, float, float]:
            llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
            (stats,) = llm.collective_rpc("get_encoder_timing_stats")
            assert stats["seconds"] > 0
            return len(processor._cache), stats["num_items"], stats["num_rows"] / stats["num_items"]

        first = counts()
        assert first[:2] == (1, 1)
        assert counts() == first
        llm.reset_mm_cache()
        assert not processor._cache
        assert counts() == first
        llm.reset_encoder_cache()
        assert counts() == (1, 2, first[2])


def test_adapters_change_the_language_model_under_an_image(folder: Path, name: str, tmp_path: Path) -> None:
    model = tiny_multimodal_model(name)
    modules = r".*(language_model|text_model).*(q_proj|v_proj|down_proj)"
    make_adapter(model, tmp_path / "adapter", seed=1, r=4, target_modules=modules)
    make_adapter(model, tmp_path / "of encoder", seed=1, r=4, target_modules=r".*(visual|vision_model).*(qkv|q_proj)")
    processor = read_processor(folder, name.replace("-", "_").replace(".", "_"))
    (text, images), *_ = texts(name)
    adapted = with_adapter(model, tmp_path / "adapter")
    with LLM(str(folder), **OPTIONS, enable_lora=True) as llm:
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, logprobs=2, ignore_eos=True)
        for number, of_encoder in enumerate((False, True), 1):
            where = tmp_path / ("of encoder" if of_encoder else "adapter")
            prompt: Any = {"prompt": text, "multi_modal_data": {"image": images}}
            refused = pytest.raises(CheckpointError, match="modules that adapters of this model cannot change")
            with refused if of_encoder else nullcontext():
                (output,) = llm.generate(prompt, params, lora_request=request_of(number, where), use_tqdm=False)
                assert_answered_as_by(adapted, processor, text, {"image": images}, output)


@pytest.mark.one_path(reason="refused before a step")
def test_models_that_pool_take_text_alone(folder: Path, name: str) -> None:
    (text, images), *_ = texts(name)
    with LLM(str(folder), **OPTIONS, runner="pooling") as llm:
        assert len(llm.embed(words(3, 4), use_tqdm=False)[0].outputs.embedding) == 64
        with pytest.raises(UnsupportedParameter, match="multi_modal_data, which this model does not take"):
            llm.embed({"prompt": text, "multi_modal_data": {"image": images}}, use_tqdm=False)
