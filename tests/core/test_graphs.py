"""Graphs of decode steps, on a device that records calls: the tokens of steps without graphs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import LLM
from penstock.attention import StepGeometry
from penstock.config import EngineConfig, GraphConfig
from penstock.contract import RpcCall, SamplingParams
from penstock.device.base import PendingCopy
from penstock.device.cpu import HostCopy
from penstock.errors import ConfigError, UnsupportedFeature
from penstock.observability.units import format_bytes
from penstock.runner.build.padding import GraphPadding
from penstock.runner.execute.execution import DRAFTER_PREFILL, DRAFTS, FIRST_OF_SIZE, LAYERS, MIXED, UNIFORM
from penstock.runner.execute.graphs import GraphExecution, rehearse_pieces
from support.adapted_models import adapted
from support.adapters import parts_of
from support.checkpoints import VOCAB_SIZE, save_checkpoint, tiny_checkpoint, tiny_model
from support.draft_heads import eagle3_weights, eagle_weights, write_head
from support.engines import Result, add, assert_greedy_continuation, finish, greedy, make_core, random_prompts, run
from support.padded_attention import PaddedBackend, use_graphs
from support.pooling_models import TINY_ENCODER, random_model, random_text, save
from support.recording_device import RecordingDevice

pytestmark = pytest.mark.one_path(reason="runs engines with and without fast paths itself")
PROMPTS = random_prompts((5, 21, 1, 40, 13, 8, 3), VOCAB_SIZE, seed=3)
DRAWN = {"temperature": 0.9, "ignore_eos": True}
PARAMS = [
    greedy(30),
    greedy(11),
    SamplingParams(**DRAWN, seed=1, max_tokens=20),
    greedy(25),
    greedy(40),
    SamplingParams(**DRAWN, seed=2, max_tokens=9, top_k=9, presence_penalty=0.5),
    greedy(18, logprobs=1),
]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingDevice]:
    device = use_graphs(monkeypatch)
    yield device
    assert device.refusals == []


def _serve(folder: Path, params: list[SamplingParams], **options: Any) -> list[Result]:
    core = make_core(folder, attention_backend=PaddedBackend.name, **options)
    try:
        return run(core, PROMPTS[: len(params)], params)
    finally:
        core.close()


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_greedy_tokens_are_those_of_transformers(
    tmp_path: Path, device: RecordingDevice, family: str, async_scheduling: bool
) -> None:
    oracle = tiny_model(family)
    folder = save_checkpoint(oracle, tmp_path).folder
    results = _serve(folder, PARAMS, async_scheduling=async_scheduling)
    assert device.num_replays > device.num_captures > 0
    for prompt, params, result in zip(PROMPTS, PARAMS, results, strict=True):
        if params.temperature == 0:
            assert_greedy_continuation(oracle, prompt, result)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("max_num_batched_tokens", [5, 64])
def test_tokens_are_those_without_graphs(
    tmp_path: Path, device: RecordingDevice, async_scheduling: bool, max_num_batched_tokens: int
) -> None:
    folder = tiny_checkpoint(tmp_path).folder
    options = {"async_scheduling": async_scheduling, "max_num_batched_tokens": max_num_batched_tokens}
    results = _serve(folder, PARAMS, **options)
    captured = device.num_captures
    assert results == _serve(folder, PARAMS, **options, fast_paths="off")
    assert device.num_captures == captured, "fast_paths='off' captures nothing"


@pytest.mark.parametrize(("mode", "async_scheduling"), [("piecewise", False), ("full_and_piecewise", True)])
def test_steps_that_mix_prefills_and_decodes_run_in_pieces(
    tmp_path: Path, device: RecordingDevice, async_scheduling: bool, mode: str
) -> None:
    """A small budget makes most steps mixed. Attention runs between the pieces of each layer."""
    folder = tiny_checkpoint(tmp_path, num_hidden_layers=2).folder
    options = {"async_scheduling": async_scheduling, "max_num_batched_tokens": 16}
    results = _serve(folder, PARAMS, **options, cudagraph_mode=mode)
    assert device.num_cuts == 2
    assert device.num_replays > device.num_captures > 0
    expected = _serve(folder, PARAMS, **options, fast_paths="off")
    assert [result.tokens for result in results] == [result.tokens for result in expected]
    for found, logprobs in zip(results[-1].logprobs, expected[-1].logprobs, strict=True):
        assert found == pytest.approx(logprobs, abs=1e-5)  # the padded attention of this test rounds by its sizes


def test_encoders_attend_between_pieces_with_the_lengths_of_each_step(tmp_path: Path, device: RecordingDevice) -> None:
    """Pairs of texts with as many tokens in all, which are replays of one graph."""
    folder = save(random_model("BertModel", "BertConfig", **TINY_ENCODER), tmp_path)
    pairs = [[random_text(count, seed=count) for count in counts] for counts in ((10, 20), (15, 15), (4, 26), (29, 1))]
    found = []
    for options in ({"cudagraph_mode": "piecewise"}, {"fast_paths": "off"}):
        with LLM(folder, kv_cache_memory_bytes="4MiB", **options) as llm:
            outputs = [output for pair in pairs for output in llm.embed(pair, use_tqdm=False)]
            found.append(torch.tensor([output.outputs.embedding for output in outputs]))
    assert device.num_replays > device.num_captures > 0
    assert device.num_cuts == TINY_ENCODER["num_hidden_layers"]
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_mixed_steps_run_as_whole_graphs(tmp_path: Path, device: RecordingDevice, async_scheduling: bool) -> None:
    folder = tiny_checkpoint(tmp_path, num_hidden_layers=2).folder
    options = {"async_scheduling": async_scheduling, "max_num_batched_tokens": 16}
    core = make_core(folder, attention_backend=PaddedBackend.name, **options, cudagraph_mode="full")
    results = run(core, PROMPTS, PARAMS)
    ((counts,), (inspected,)) = (
        core.collective_rpc(RpcCall(name)) for name in ("get_graph_stats", "get_model_inspection")
    )
    core.close()
    assert device.num_cuts == 0, "no pieces"
    assert counts[MIXED] > 5
    assert counts[UNIFORM] > 5
    assert counts[MIXED] + counts[UNIFORM] == device.num_replays
    assert counts.get(LAYERS, 0) == 0, "every step fits a graph"
    assert f"{counts[MIXED]} {MIXED}" in inspected
    expected = _serve(folder, PARAMS, **options, fast_paths="off")
    assert [result.tokens for result in results] == [result.tokens for result in expected]


def test_steps_beyond_the_sizes_are_counted(tmp_path: Path, device: RecordingDevice) -> None:
    core = make_core(tiny_checkpoint(tmp_path).folder, attention_backend=PaddedBackend.name)
    run(core, PROMPTS[:1], greedy(6))
    (counts,) = core.collective_rpc(RpcCall("get_graph_stats"))
    core.close()
    # The prefill fits no graph. The first decode compiles kernels, and the second one is captured and replayed.
    assert counts == {LAYERS: 1, FIRST_OF_SIZE: 1, UNIFORM: 4}


def test_full_graphs_need_attention_that_can_be_captured(tmp_path: Path, device: RecordingDevice) -> None:
    with pytest.raises(UnsupportedFeature, match="that of reference depends on lengths on the host"):
        make_core(tiny_checkpoint(tmp_path).folder, attention_backend="reference", cudagraph_mode="full")


def test_memory_of_graphs_and_of_the_buffers_between_pieces_is_planned(
    tmp_path: Path, device: RecordingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A GPU's way: steps are run, and their tensors measured.
    monkeypatch.setattr("penstock.worker.memory_planning._measure_without_memory", lambda *_: None)
    folder = tiny_checkpoint(tmp_path).folder
    planned = {}
    for mode in ("none", "full_decode_only", "full_and_piecewise"):
        options: dict[str, Any] = {"max_num_batched_tokens": 16, "cudagraph_mode": mode}
        core = make_core(folder, attention_backend=PaddedBackend.name, **options)
        planned[mode] = core.memory_plan["graphs"]
        assert ("- CUDA graphs" in core.memory_plan.table()) is (mode != "none")
        run(core, PROMPTS, PARAMS)
        ((inspected,), (runner,)) = (
            core.collective_rpc(RpcCall(name)) for name in ("get_model_inspection", lambda worker: worker.runner)
        )
        core.close()
    assert planned["none"] == 0 < 32 << 20 < planned["full_decode_only"]
    buffers = rehearse_pieces(runner.frames.dummy(16, 4), 16)
    assert planned["full_and_piecewise"] >= planned["full_decode_only"] + buffers > planned["full_decode_only"]
    assert f"{format_bytes(buffers)} with the buffers between their pieces" in inspected


def test_plans_of_whole_graphs_have_a_padding_row_and_fixed_sizes() -> None:
    sizes = {"max_num_tokens": 64, "token_sizes": [8, 16], "most_rows": 5}
    graphs = GraphPadding([1, 2, 4], is_capturable=True, **sizes)
    for counts, padded in (([1, 4], (8, 5, 8)), ([7], (8, 5, 8)), ([1, 1, 1, 6], (16, 5, 16)), ([17], (17, 1, None))):
        assert graphs.plan({str(number): count for number, count in enumerate(counts)})[2:] == padded


def test_plans_pad_mixed_steps_to_a_number_of_tokens() -> None:
    graphs = GraphPadding([1, 2, 4], is_capturable=True, max_query_len=3, max_num_tokens=64, token_sizes=[8, 16])
    padded = {
        "mixed": graphs.plan({"a": 1, "b": 4}),
        "uneven drafts": graphs.plan({"a": 1, "b": 2}),
        "too long": graphs.plan({"a": 1, "b": 16}),
        "uniform": graphs.plan({"a": 3, "b": 3}),
        "decodes": graphs.plan({"a": 1, "b": 1, "c": 1}),
        "too many decodes": graphs.plan({str(index): 1 for index in range(5)}),
    }
    assert {name: plan[2:4] for name, plan in padded.items()} == {
        "mixed": (8, 2),
        "uneven drafts": (8, 2),
        "too long": (17, 2),
        "uniform": (6, 2),
        "decodes": (4, 4),
        "too many decodes": (5, 5),
    }


class _OverlappingDevice(RecordingDevice):
    """Runs beside the host, for the engine. events: replays, and copies of sampled tokens, begun and read."""

    overlaps_with_host = True

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        replay = super().capture(work)

        def noted() -> None:
            self.events.append("replayed")
            replay()

        return noted

    def download(self, tensors: Sequence[Tensor]) -> PendingCopy:
        self.events.append("sampled")
        return _NotedCopy(tensors, self.events)


class _NotedCopy(HostCopy):
    def __init__(self, tensors: Sequence[Tensor], events: list[str]) -> None:
        super().__init__(tensors)
        self._events = events

    def is_done(self) -> bool:
        self._events.append("read")
        return True


@pytest.mark.parametrize("params", [greedy(30), SamplingParams(**DRAWN, seed=1, max_tokens=30)])
def test_a_graph_is_replayed_before_the_tokens_of_the_step_before_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, params: SamplingParams
) -> None:
    device = _OverlappingDevice()
    use_graphs(monkeypatch, device)
    # The native step has its tokens on the host at once, without a copy.
    monkeypatch.setattr("penstock.kernels.step_state.bind_native_step", lambda *_: None)
    _serve(tiny_checkpoint(tmp_path).folder, [params] * 3)
    first = device.events.index("replayed")
    assert device.num_replays > 20
    assert device.events[first:] == ["replayed", "read", "sampled"] * device.num_replays + ["read"]


_DRAFTED = {"num_speculative_tokens": 3, "adaptive": False}


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and drafters by the name of their method."""
    folder = tmp_path_factory.mktemp("drafters")
    tiny_checkpoint(folder / "target", num_hidden_layers=5)
    tiny_checkpoint(folder / "draft_model", "qwen3", seed=7, head_dim=32, num_key_value_heads=1)
    write_head(folder / "eagle", eagle_weights())
    write_head(folder / "eagle3", eagle3_weights(), draft_vocab_size=40)
    return folder


def _drafting(drafters: Path, method: str, **fields: Any) -> dict[str, Any]:
    config: dict[str, Any] = {"method": method, **_DRAFTED, **fields}
    if method == "ngram":
        config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    else:
        config["model"] = str(drafters / ("target" if method == "itself" else method))
        config["method"] = "draft_model" if method == "itself" else method
    return {"max_model_len": 68, "speculative_config": config}


@pytest.mark.one_case_quick
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("method", ["ngram", "draft_model", "itself", "eagle", "eagle3"])
def test_drafts_are_made_and_verified_in_graphs(
    drafters: Path, device: RecordingDevice, method: str, async_scheduling: bool
) -> None:
    options = {**_drafting(drafters, method), "async_scheduling": async_scheduling}
    results = _serve(drafters / "target", PARAMS, **options)
    assert device.num_replays > device.num_captures > 0
    assert results == _serve(drafters / "target", PARAMS, **options, fast_paths="off")
    assert [one.tokens for one in results] == [
        one.tokens for one in _serve(drafters / "target", PARAMS, max_model_len=68, fast_paths="off")
    ]


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_greedy_request_takes_two_graphs_per_step(drafters: Path, device: RecordingDevice, method: str) -> None:
    """One verifies drafts, and one makes all of the next ones but the first."""
    core = make_core(drafters / "target", attention_backend=PaddedBackend.name, **_drafting(drafters, method))
    add(core, "r0", PROMPTS[1], greedy(40))
    replays = []
    while core.has_unfinished_requests():
        before = device.num_replays
        core.step()
        replays.append(device.num_replays - before)
    core.close()
    assert replays.count(2) > len(replays) // 2
    assert device.num_captures <= 4


def test_drafts_of_other_acceptance_rules_run_in_graphs(drafters: Path, device: RecordingDevice) -> None:
    options = _drafting(drafters, "draft_model", rejection_sample_method="standard")
    results = _serve(drafters / "target", PARAMS, **options)
    assert device.num_replays > 20
    assert results == _serve(drafters / "target", PARAMS, **options, fast_paths="off")


def test_drafts_run_in_whole_graphs_of_mixed_steps_and_are_counted(drafters: Path, device: RecordingDevice) -> None:
    options = {**_drafting(drafters, "eagle3"), "max_num_batched_tokens": 24}
    core = make_core(drafters / "target", attention_backend=PaddedBackend.name, cudagraph_mode="full", **options)
    results = run(core, PROMPTS, PARAMS)
    (counts,) = core.collective_rpc(RpcCall("get_graph_stats"))
    core.close()
    assert min(counts[kind] for kind in (UNIFORM, MIXED, DRAFTS, DRAFTER_PREFILL)) > 1
    expected = _serve(drafters / "target", PARAMS, **options, fast_paths="off")
    assert [one.tokens for one in results] == [one.tokens for one in expected]


def test_a_replay_that_reads_a_temporary_tensor_is_refused() -> None:
    device = RecordingDevice()
    graphs = GraphExecution(device, GraphPadding([1], is_capturable=True))
    persistent, result = torch.ones(3), torch.zeros(3)

    def step(key: str, values: Tensor) -> None:
        graphs.compute(lambda: result.copy_(values * 2), UNIFORM, key)

    for _ in range(3):
        step("persistent", persistent)
    for _ in range(2):  # in the step of the capture the tensor is there
        step("temporary", torch.ones(3))
    with pytest.raises(AssertionError, match=r"aten.mul.Tensor reads a tensor of shape \[3\] whose memory is freed"):
        step("temporary", torch.ones(3))
    assert len(device.refusals) == 1


def test_attention_with_a_temporary_block_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(_: PaddedBackend, geometry: StepGeometry) -> StepGeometry:
        return replace(geometry, block_table=geometry.block_table.clone())

    device = use_graphs(monkeypatch)
    monkeypatch.setattr(PaddedBackend, "make_metadata", copied)
    # Three requests go on in the graph of four; the engine replaces the worker.
    _serve(tiny_checkpoint(tmp_path).folder, [greedy(6), greedy(6), greedy(6), greedy(4)])
    assert "reads a tensor of shape [4, 8] whose memory is freed" in device.refusals[0]


class _CompilingDevice(RecordingDevice):
    compiles_kernels = True


@pytest.mark.slow
def test_warm_up_by_requests_runs_drafts_and_sampling_and_changes_no_tokens(
    drafters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_graphs(monkeypatch, _CompilingDevice())
    options = {**_drafting(drafters, "eagle3"), "async_scheduling": True}
    core = make_core(drafters / "target", attention_backend=PaddedBackend.name, **options)
    (counts,) = core.collective_rpc(RpcCall("get_graph_stats"))
    results = run(core, PROMPTS, PARAMS)
    core.close()
    assert min(counts[kind] for kind in (FIRST_OF_SIZE, DRAFTER_PREFILL, DRAFTS)) > 0
    use_graphs(monkeypatch)
    assert results == _serve(drafters / "target", PARAMS, **options)


def test_no_graphs_are_captured_without_the_mode(tmp_path: Path, device: RecordingDevice) -> None:
    folder = tiny_checkpoint(tmp_path, "llama").folder
    results = _serve(folder, PARAMS, cudagraph_mode="none")
    assert device.num_captures == 0
    assert results == _serve(folder, PARAMS)
    assert device.num_captures > 0


def test_steps_larger_than_the_captured_sizes_run_without_graphs(tmp_path: Path, device: RecordingDevice) -> None:
    folder = tiny_checkpoint(tmp_path, "llama").folder
    _serve(folder, [greedy(20)] * 3, cudagraph_capture_sizes=[2, 1])
    assert device.num_captures == 0
    _serve(folder, [greedy(20)] * 3, cudagraph_capture_sizes=[3])
    assert device.num_captures == 1


def test_one_graph_serves_all_batches_of_a_padded_size(tmp_path: Path, device: RecordingDevice) -> None:
    """Seven requests to five run with the graph of eight rows; one graph has greedy tokens, one hidden states."""
    folder = tiny_checkpoint(tmp_path, "llama").folder
    _serve(folder, [greedy(20), greedy(24), greedy(28), *[greedy(30)] * 4])
    assert device.num_captures == 2, "the sizes 8 and 4"
    assert device.num_replays > 20


def test_a_device_that_cannot_capture_runs_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_checkpoint(tmp_path, "llama").folder
    device = use_graphs(monkeypatch, RecordingDevice(refuses="operation not permitted when stream is capturing"))
    results = _serve(folder, PARAMS)
    assert device.num_replays == 0
    assert sum("not permitted when stream is capturing" in line for line in caplog.messages) == 1
    assert results == _serve(folder, PARAMS, fast_paths="off")


class _RefusingOnce(RecordingDevice):
    """Refuses the first capture."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        if not self.refusals:
            self.refusals.append("the first one")
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().capture(work)


def test_a_refused_capture_ends_the_graphs_of_its_own_shape_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = use_graphs(monkeypatch, _RefusingOnce())
    core = make_core(tiny_checkpoint(tmp_path).folder, attention_backend=PaddedBackend.name)
    # One request decodes alone after two have decoded together, whose graph was refused.
    results = run(core, PROMPTS[:2], [greedy(8), greedy(16)])
    ((counts,), (inspected,)) = (
        core.collective_rpc(RpcCall(name)) for name in ("get_graph_stats", "get_model_inspection")
    )
    core.close()
    assert device.num_captures == 1
    assert counts[UNIFORM] > 5
    assert counts[LAYERS] > 5
    assert "Not captured (1 graphs): operation not permitted" in inspected
    expected = _serve(tmp_path, [greedy(8), greedy(16)], fast_paths="off")
    assert [one.tokens for one in results] == [one.tokens for one in expected]


def test_graphs_apply_the_adapters_of_the_language_model_head(tmp_path: Path, device: RecordingDevice) -> None:
    with adapted(tmp_path, variants=[{"r": 8, "target_modules": ["lm_head"]}]) as model:
        tokens = []
        for fast_paths in ("auto", "off"):
            core = make_core(
                model.folder, attention_backend=PaddedBackend.name, enable_lora=True, fast_paths=fast_paths
            )
            for index, number in enumerate((1, 0, 1)):
                add(core, f"r{index}", PROMPTS[index], greedy(12), parts=parts_of(model.requests[number]))
            results: dict[str, Result] = {}
            finish(core, results)
            core.close()
            tokens.append([results[f"r{index}"].tokens for index in range(3)])
        assert tokens[0] == tokens[1]
        assert tokens[0][0] != _serve(model.folder, [greedy(12)])[0].tokens
    assert device.num_replays > 5


def test_new_weights_drop_graphs(tmp_path: Path, device: RecordingDevice) -> None:
    first, second = (tiny_checkpoint(tmp_path / str(seed), seed=seed).folder for seed in (0, 1))
    core = make_core(first, attention_backend=PaddedBackend.name)
    run(core, PROMPTS[:2], greedy(20))
    core.collective_rpc(RpcCall("reload_weights", (str(second),)))
    core.reset_prefix_cache()
    results = run(core, PROMPTS[:2], greedy(20))
    core.close()
    assert [each.tokens for each in results] == [
        each.tokens for each in _serve(second, [greedy(20)] * 2, fast_paths="off")
    ]


def test_sizes_are_padded_to_the_next_captured_one() -> None:
    assert GraphConfig().sizes(20) == [1, 2, 4, 8, 16, 20]
    padding = GraphPadding([1, 2, 4, 8], is_capturable=True)
    for num_reqs, padded in ((1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 9)):
        plan = padding.plan(dict.fromkeys(map(str, range(num_reqs)), 1))
        assert (plan.num_tokens, plan.num_tokens_padded, plan.num_reqs_padded) == (num_reqs, padded, padded)
    mixed = padding.plan({"a": 1, "b": 7})
    assert mixed.num_tokens_padded == 8
    assert mixed.num_reqs_padded == 2


def test_steps_with_equally_many_drafts_are_padded() -> None:
    padding = GraphPadding([1, 2, 4, 8], is_capturable=True, max_query_len=4)
    for counts, padded in (
        ([4, 4, 4], (16, 4)),
        ([3], (3, 1)),
        ([2] * 5, (16, 8)),
        ([5, 5, 5], (15, 3)),
        ([1, 3], (4, 2)),
        ([2, 1], (3, 2)),
        ([4] * 9, (36, 9)),
    ):
        plan = padding.plan({str(index): count for index, count in enumerate(counts)})
        assert (plan.num_tokens_padded, plan.num_reqs_padded) == padded, counts
    narrow = GraphPadding([4], is_capturable=True, max_query_len=4, max_num_tokens=12)
    assert narrow.plan({"a": 4, "b": 4, "c": 4}).num_tokens_padded == 12, "16 tokens are more than a step has"


def test_sizes_are_those_of_the_options() -> None:
    assert GraphConfig(max_cudagraph_capture_size=10).sizes(300) == [1, 2, 4, 8, 10]
    assert GraphConfig(max_cudagraph_capture_size=10).sizes(6) == [1, 2, 4, 6]
    assert GraphConfig(cudagraph_capture_sizes=[8, 2, 2, 600]).sizes(300) == [2, 8]
    assert GraphConfig(cudagraph_mode="NONE").sizes(300) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cudagraph_mode": "all"}, "Allowed: full_decode_only, full_and_piecewise, full, piecewise, none"),
        ({"cudagraph_capture_sizes": []}, "a list of integers of at least 1"),
        ({"cudagraph_capture_sizes": [0, 1]}, "a list of integers of at least 1"),
        ({"max_cudagraph_capture_size": 0}, "an integer of at least 1"),
        ({"max_cudagraph_capture_size": 8, "cudagraph_capture_sizes": [4]}, "whose largest is 4"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        EngineConfig.create("demo", **options)
