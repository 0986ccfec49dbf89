"""The fast paths beside the plain one, in process and through messages as bytes: equal tokens, equal bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config import EngineConfig
from penstock.contract import RpcCall, SamplingParams, SchedulerOutput, decode, encode
from penstock.executor import UniProcExecutor
from penstock.runner.build.frames import Frames
from penstock.runner.execute.execution import EagerExecution
from penstock.step.frame import Frame
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.engines import greedy, make_core, random_prompts, run

pytestmark = pytest.mark.one_path(reason="runs engines with and without fast paths itself")
PROMPTS = random_prompts((5, 21, 1, 40, 13, 8), VOCAB_SIZE, seed=3)


def _mixed() -> list[SamplingParams]:
    """Not all end together, so that batches of several sizes repeat, some of them greedy alone."""
    drawn = {"temperature": 0.9, "ignore_eos": True}
    return [
        greedy(48),
        SamplingParams(**drawn, seed=1, max_tokens=20, logprobs=2),
        greedy(30, logprobs=0),
        SamplingParams(**drawn, seed=2, max_tokens=25, presence_penalty=0.5, top_k=9),
        greedy(40),
        greedy(9, prompt_logprobs=1),
    ]


class BytesExecutor(UniProcExecutor):
    """As if the worker were behind a pipe: nothing that it is handed is an object that the scheduler has."""

    def execute_model(self, output: SchedulerOutput) -> None:
        super().execute_model(decode(encode(output), SchedulerOutput))


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that ran with what was made of the one before."""
    steps: list[int] = []
    begin = Frames.begin

    def note(self: Frames, output: SchedulerOutput, buffer_set: int | None, *, may_repeat: bool) -> Frame:
        frame = begin(self, output, buffer_set, may_repeat=may_repeat)
        steps.extend([output.step_id] * frame.is_repeated)
        return frame

    monkeypatch.setattr(Frames, "begin", note)
    return steps


def _serve(folder: Path, **options: Any) -> list[Any]:
    core = make_core(folder, **options)
    try:
        return [(each.tokens, each.logprobs, each.prompt_logprobs) for each in run(core, PROMPTS, _mixed())]
    finally:
        core.close()


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"dtype": "float32"}),
        ("qwen3", {"dtype": "bfloat16"}),
        ("gemma2", {"dtype": "float32", "block_size": 4, "max_num_batched_tokens": 17}),
        ("llama", {"dtype": "float32", "quantization": "int8"}),
        ("llama", {"dtype": "float32", "attention_backend": "cpu_paged"}),
        ("llama", {"dtype": "float32", "attention_backend": "reference"}),
    ],
    ids=str,
)
@pytest.mark.one_case_quick
def test_tokens_and_bits_are_those_of_the_plain_path(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    repeated: list[int],
    family: str,
    options: dict[str, Any],
    async_scheduling: bool,
) -> None:
    tiny_checkpoint(tmp_path, family)
    options = {**options, "async_scheduling": async_scheduling}
    plain = _serve(tmp_path, fast_paths="off", **options)
    assert not repeated
    assert _serve(tmp_path, **options) == plain
    in_process = len(repeated)
    assert in_process > 10

    def behind_a_pipe(config: EngineConfig) -> BytesExecutor:
        return BytesExecutor(config)

    monkeypatch.setattr("penstock.engine.core.startup.create_executor", behind_a_pipe)
    assert _serve(tmp_path, **options) == plain
    assert len(repeated) == 2 * in_process
    assert _serve(tmp_path, fast_paths="off", **options) == plain


def test_without_fast_paths_nothing_is_recorded(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    core = make_core(tmp_path, dtype="float32", fast_paths="off")
    run(core, PROMPTS[:2], greedy(4))
    (execution,) = core.collective_rpc(RpcCall(lambda worker: worker.runner.execution))
    assert isinstance(execution, EagerExecution)
    core.close()
