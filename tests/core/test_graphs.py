"""Graphs of decode steps, on a device that records calls: the tokens of steps without graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from penstock.attention.select import BACKENDS
from penstock.contract import SamplingParams
from penstock.device.base import PendingCopy
from penstock.device.cpu import HostCopy
from penstock.runner.graphs import GraphExecutable, default_capture_sizes
from support.checkpoints import VOCAB_SIZE, save_checkpoint, tiny_checkpoint, tiny_model
from support.engines import Result, assert_greedy_continuation, greedy, make_core, random_prompts, run
from support.padded_attention import PaddedBackend
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
def device(monkeypatch: pytest.MonkeyPatch) -> RecordingDevice:
    return _use(RecordingDevice(), monkeypatch)


def _use(device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> RecordingDevice:
    monkeypatch.setitem(BACKENDS, PaddedBackend.name, PaddedBackend)
    monkeypatch.setattr("penstock.worker.worker.create_device", lambda *_: device)
    return device


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
    _use(device, monkeypatch)
    # The native step has its tokens on the host at once, without a copy.
    monkeypatch.setattr("penstock.kernels.step_state.bind_native_step", lambda *_: None)
    _serve(tiny_checkpoint(tmp_path).folder, [params] * 3)
    first = device.events.index("replayed")
    assert device.num_replays > 20
    assert device.events[first:] == ["replayed", "read", "sampled"] * device.num_replays + ["read"]


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
    device = _use(RecordingDevice(refuses="operation not permitted when stream is capturing"), monkeypatch)
    results = _serve(folder, PARAMS)
    assert device.num_replays == 0
    assert sum("not permitted when stream is capturing" in line for line in caplog.messages) == 1
    assert results == _serve(folder, PARAMS, fast_paths="off")


def test_new_weights_drop_graphs(tmp_path: Path, device: RecordingDevice) -> None:
    first, second = (tiny_checkpoint(tmp_path / str(seed), seed=seed).folder for seed in (0, 1))
    core = make_core(first, attention_backend=PaddedBackend.name)
    run(core, PROMPTS[:2], greedy(20))
    core.collective_rpc("reload_weights", args=(str(second),))
    core.reset_prefix_cache()
    results = run(core, PROMPTS[:2], greedy(20))
    core.close()
    assert [each.tokens for each in results] == [
        each.tokens for each in _serve(second, [greedy(20)] * 2, fast_paths="off")
    ]


def test_sizes_are_padded_to_the_next_captured_one() -> None:
    assert default_capture_sizes(20) == [1, 2, 4, 8, 16, 20]
    executable = GraphExecutable(RecordingDevice(), [1, 2, 4, 8], is_capturable=True)
    for num_reqs, padded in ((1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 9)):
        plan = executable.plan(dict.fromkeys(map(str, range(num_reqs)), 1))
        assert (plan.num_tokens, plan.num_tokens_padded, plan.num_reqs_padded) == (num_reqs, padded, padded)
    prefill = executable.plan({"a": 1, "b": 7})
    assert prefill.num_tokens_padded == 8
    assert prefill.num_reqs_padded == 2
