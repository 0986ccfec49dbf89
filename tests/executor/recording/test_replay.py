"""Recordings of an engine give the same tokens in new workers, whatever was recorded and wherever it begins."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.replayed_load import DRAFTS, KINDS
from msgspec.structs import replace

from penstock.config import EngineConfig
from penstock.contract import KVCacheConfig, RpcCall, SamplingParams, SchedulerOutput, feature, part_of, parts
from penstock.contract.feature import Feature, register_feature
from penstock.contract.recorded_call import RecordedCall
from penstock.contract.structured_outputs import StructuredOutputsParams
from penstock.engine.replay import ReplayReport, replay
from penstock.errors import ConfigError, InvalidRecording
from penstock.executor.recording.entries import Called, Entry, Executed, RecordingFile, read_recording
from penstock.executor.recording.recorder import Recorder
from penstock.features.lora.recording import RecordedAdapter
from penstock.features.lora.request import LoRARequest
from penstock.kernels.native import describe_kernels
from penstock.runner.build.frames import Frames
from penstock.step.frame import Frame
from support.adapted_models import OPTIONS, adapted
from support.adapted_models import run as run_adapted
from support.adapters import VARIANTS
from support.checkpoints import save_checkpoint, tiny_checkpoint, tiny_model
from support.engines import Result, add, bytes_of_blocks, finish, make_core, run
from support.sleepers import call, put_to_sleep, until_done

VOCAB_SIZE = 99
PREFIX = list(range(1, 41))
PARAMS = [
    SamplingParams(temperature=0.0, seed=4, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, max_tokens=20, ignore_eos=True, repetition_penalty=1.2),
    SamplingParams(temperature=0.7, top_k=9, seed=6, max_tokens=9, ignore_eos=True, logprobs=2),
]


def recorded(tmp_path: Path, family: str = "llama", rounds: int = 3, **options: Any) -> Path:
    """File of a recorded engine with shared prefixes and preemptions."""
    tiny_checkpoint(tmp_path / "model", family, vocab_size=VOCAB_SIZE)
    file = tmp_path / "steps.rec"
    options = {"record": str(file), "record_prompts": True, "block_size": 8, "max_model_len": 96, **options}
    core = make_core(tmp_path / "model", **options)
    results: dict[str, Result] = {}
    for round_ in range(rounds):
        for number in range(6):
            prompt = [*PREFIX[: 8 * (number % 4 + 1)], *range(50 + number, 57 + number), 60 + round_]
            add(core, f"{round_}-{number}", prompt, PARAMS[number % len(PARAMS)])
        if round_ == 1:
            core.abort_requests([f"{round_}-0"])
        finish(core, results)
    core.close()
    assert any(result.num_cached_tokens for result in results.values()) == options.get("enable_prefix_caching", True)
    assert any(result.num_preemptions for result in results.values()) == ("kv_cache_memory_bytes" in options)
    return file


def check(report: ReplayReport) -> None:
    assert report.is_equal, report.differences
    assert report.num_compared > 100
    assert report.num_steps > 30


def test_a_recording_gives_the_same_tokens(tmp_path: Path) -> None:
    # 13 blocks are too few for all, so that requests are preempted.
    file = recorded(tmp_path, kv_cache_memory_bytes=56 << 10)
    report = replay(file)
    check(report)
    assert report.num_filled_tokens > 0
    assert set(report.recorded_s) == set(report.replayed_s) == {"execute", "sample", "wait"}
    assert not report.end


@pytest.mark.one_path(reason="repeated steps belong to the fast paths")
def test_steps_repeat_each_other_as_in_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[bool] = []
    begin = Frames.begin

    def note(self: Frames, output: SchedulerOutput, buffer_set: int | None, *, may_repeat: bool) -> Frame:
        frame = begin(self, output, buffer_set, may_repeat=may_repeat)
        frames.append(frame.is_repeated)
        return frame

    monkeypatch.setattr(Frames, "begin", note)
    file = recorded(tmp_path, rounds=1, enable_prefix_caching=False)
    of_recording = frames.copy()
    frames.clear()
    replay(file)
    assert frames == of_recording
    assert frames.count(True) > 3


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("gemma3", {}),
        ("llama", {"async_scheduling": True}),
        ("llama", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
        ("llama", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "async_scheduling": True}),
        ("llama", {"fast_paths": "off"}),
        ("llama", {"enable_prefix_caching": False}),
    ],
    ids=str,
)
@pytest.mark.one_case_quick
def test_a_window_that_begins_while_requests_run_gives_the_same_tokens(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    file = recorded(tmp_path, family, 8, record_window_s=0.02, **options)
    previous = file.with_name("steps.rec.previous")
    files = [read_recording(file), read_recording(previous)]
    assert any(one.start.requests for one in files)
    for one in (previous, file):
        report = replay(one)
        assert report.is_equal, report.differences
        assert report.num_steps


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_other_ranks_give_the_same_tokens(tmp_path: Path, options: dict[str, Any]) -> None:
    check(replay(recorded(tmp_path), **options))
    (tmp_path / "of ranks").mkdir()
    check(replay(recorded(tmp_path / "of ranks", **options)))


@pytest.mark.processor
def test_constrained_requests_are_replayed_with_their_masks(tmp_path: Path) -> None:
    from penstock import LLM

    file = tmp_path / "steps.rec"
    schema = {"type": "object", "properties": {"name": {"enum": ["a", "b"]}}, "required": ["name"]}
    params = [
        SamplingParams(temperature=0.8, seed=3, max_tokens=30, structured_outputs=StructuredOutputsParams(json=schema)),
        SamplingParams(temperature=0.8, seed=4, max_tokens=30),
    ]
    with LLM("demo", num_threads=1, kv_cache_memory_bytes="8MiB", record=file, record_prompts=True) as llm:
        outputs = llm.generate(["A name: ", "ROMEO:"], params, use_tqdm=False)
    json.loads(outputs[0].outputs[0].text)
    report = replay(file)
    assert report.is_equal, report.differences
    assert report.num_compared == sum(len(output.outputs[0].token_ids) for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cpu_arithmetic", "method"), [("float32", "ngram"), ("float32", "eagle3"), ("bfloat16", "eagle3")]
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_mixed_load_gives_the_same_tokens_in_one_worker_and_in_two(
    tmp_path: Path, method: str, cpu_arithmetic: str, num_ranks: int
) -> None:
    """In bfloat16 arithmetic as many ranks give them, and other ranks most of them."""
    from penstock import LLM

    file = tmp_path / "steps.rec"
    params = [SamplingParams(**KINDS[number % 4], seed=number, max_tokens=60 + number) for number in range(24)]
    options = {
        "num_threads": 1,
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
        "cpu_arithmetic": cpu_arithmetic,
        "tensor_parallel_size": num_ranks,
        "speculative_config": {"method": method, **DRAFTS[method]},
    }
    # Too few blocks for all.
    options["kv_cache_memory_bytes"] = bytes_of_blocks("demo", 30, **options)
    with LLM("demo", record=file, record_prompts=True, **options) as llm:
        prompts = [f"ROMEO: {'my love, ' * (number % 7)}" for number in range(24)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    assert counts["penstock:num_preemptions"] > 0
    assert 0 < counts["penstock:spec_decode_num_accepted_tokens"] < counts["penstock:spec_decode_num_draft_tokens"]
    for ranks in (1, 2):
        report = replay(file, tensor_parallel_size=ranks)
        if ranks == num_ranks or cpu_arithmetic == "float32":
            assert report.is_equal, report.differences
        assert report.num_different < 0.1 * report.num_compared
        assert bool(report.unlike) == (ranks != num_ranks)
        # Workers also accept drafts beyond the end of a request.
        assert report.num_compared >= sum(len(output.outputs[0].token_ids) for output in outputs)


def test_without_prompts_steps_are_shown_and_not_replayed(tmp_path: Path) -> None:
    from penstock.cli.replay import described

    file = recorded(tmp_path, record_prompts=False, rounds=1)
    recording = read_recording(file)
    steps = [entry.step for entry in recording.entries if isinstance(entry, Executed)]
    tokens = {token for step in steps for new in step.scheduled_new_reqs for token in new.prefill_token_ids}
    assert tokens == {0}
    assert any("execute SchedulerOutput(step_id=1" in line for line in described(recording))
    with pytest.raises(InvalidRecording, match="holds no tokens, so it cannot be replayed. Record with record_prompts"):
        replay(file)


def test_a_difference_is_reported_with_its_step_and_request(tmp_path: Path) -> None:
    file = recorded(tmp_path, rounds=1)
    other = tmp_path / "other"
    tiny_checkpoint(other, "llama", vocab_size=VOCAB_SIZE, seed=1)
    report = replay(file, str(other))
    assert not report.is_equal
    assert report.differences[0].req_id.startswith("0-")
    assert report.differences[0].recorded != report.differences[0].replayed


def test_workers_that_round_otherwise_are_named_at_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = recorded(tmp_path, rounds=1, speculative_config={"method": "ngram"}, num_threads=1)
    with caplog.at_level("WARNING", logger="penstock"):
        assert replay(file, num_threads=2, fast_paths="off").unlike == []
        assert not caplog.records
        (found,) = replay(file, attention_backend="reference").unlike
    assert found == "attention_backend is reference, and was the default"
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == (
        f"These workers round otherwise than the recorded ones; tokens nearly as likely may differ: {found}"
    )


@pytest.mark.processor
def test_other_kernels_and_another_arithmetic_are_named(tmp_path: Path) -> None:
    """Those of a recording of another processor."""
    save_checkpoint(tiny_model("llama", head_dim=16), tmp_path / "model", dtype=torch.bfloat16)
    options = {"record": str(tmp_path / "steps.rec"), "record_prompts": True}
    core = make_core(tmp_path / "model", cpu_arithmetic="float32", **options)
    run(core, [[1, 2, 3]], PARAMS[0])
    core.close()
    (found,) = replay(tmp_path / "steps.rec", cpu_arithmetic="bfloat16").unlike
    assert found.startswith("arithmetic is ")
    assert "products in bfloat16 arithmetic" in found.partition(", and was ")[0]
    assert "products widen them" in found.partition(", and was ")[2]
    start = read_recording(tmp_path / "steps.rec").start
    assert start.arithmetic.startswith(describe_kernels())


def test_a_recording_across_sleeps_and_pauses_gives_the_same_tokens(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model", vocab_size=VOCAB_SIZE)
    file = tmp_path / "steps.rec"
    core = make_core(tmp_path / "model", record=str(file), record_prompts=True, block_size=8, max_model_len=96)
    results: dict[str, Result] = {}
    for round_, asked in enumerate((("keep",), ("wait",), ("keep", ["kv_cache"]))):
        for number, params in enumerate(PARAMS):
            add(core, f"{round_}-{number}", [*PREFIX[: 8 * number], 60 + number], params)
        for _ in range(5):
            core.step()
        until_done(core, "pause", "keep", False, results=results)
        put_to_sleep(core, 1, *asked, results=results)
        call(core, "wake_up")
        call(core, "resume")
        finish(core, results)
    core.close()
    report = replay(file)
    assert report.is_equal, report
    assert report.num_compared >= sum(len(result.tokens) for result in results.values())


def test_a_call_that_gives_other_weights_cannot_be_replayed(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model", "llama", vocab_size=VOCAB_SIZE)
    file = tmp_path / "steps.rec"
    core = make_core(tmp_path / "model", record=str(file), record_prompts=True)
    core.collective_rpc(RpcCall("reload_weights"))
    core.close()
    with pytest.raises(InvalidRecording, match="holds a call of reload_weights, whose weights are not recorded"):
        replay(file)


def test_files_that_are_no_recordings_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with pytest.raises(InvalidRecording, match="cannot be read: No such file"):
        read_recording(file)
    file.write_bytes(b"nothing of the kind")
    with pytest.raises(InvalidRecording, match="is no recording"):
        read_recording(file)
    file.write_bytes(b'{"kind": "penstock recording", "format": 0, "contract": 1, "penstock": "0.0.9"}\n')
    with pytest.raises(InvalidRecording, match=r"has format 0.1, but .* Replay it with Penstock 0.0.9, which wrote it"):
        read_recording(file)


def test_damaged_recordings_are_refused_and_cut_ones_read_to_their_last_entry(tmp_path: Path) -> None:
    file = recorded(tmp_path, rounds=1)
    data, whole = file.read_bytes(), read_recording(file)
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    file.write_bytes(flipped)
    with pytest.raises(InvalidRecording, match="is damaged at byte"):
        read_recording(file)
    file.write_bytes(data[:-1])
    cut = read_recording(file)
    assert cut.is_cut
    assert len(cut.entries) == len(whole.entries) - 1
    file.write_bytes(data[:200])
    with pytest.raises(InvalidRecording, match="has no beginning"):
        read_recording(file)


def test_a_model_with_another_vocabulary_and_lower_limits_are_refused(tmp_path: Path) -> None:
    file = recorded(tmp_path, rounds=1)
    tiny_checkpoint(tmp_path / "other", "llama", vocab_size=VOCAB_SIZE - 1)
    with pytest.raises(InvalidRecording, match="has 99 tokens in its vocabulary, but .*other has 98"):
        replay(file, str(tmp_path / "other"))
    for name, value in (("max_model_len", 32), ("max_num_batched_tokens", 2), ("max_num_seqs", 1)):
        with pytest.raises(InvalidRecording, match=f"{name}={value} is too small for the recorded steps"):
            replay(file, **{name: value})


@pytest.mark.parametrize("num_writes", [0, 20])
def test_an_engine_goes_on_without_a_recording_when_the_disk_is_full(
    num_writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, written = RecordingFile.write, []

    def write_or_fail(file: RecordingFile, entry: Entry) -> None:
        if len(written) >= num_writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(entry)
        write(file, entry)

    monkeypatch.setattr(RecordingFile, "write", write_or_fail)
    file = recorded(tmp_path, rounds=1, record_window_s=0.01)
    (message,) = [record.message for record in caplog.records if "cannot be written" in record.message]
    assert message.endswith("No space left on device")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file() and num_writes == 0) == []
    assert num_writes == 0 or read_recording(file).start


def test_a_file_that_another_engine_records_to_is_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model", vocab_size=VOCAB_SIZE)
    file = tmp_path / "steps.rec"
    first = make_core(tmp_path / "model", record=str(file))
    with pytest.raises(ConfigError, match=r"record='.*steps\.rec' is not valid: another engine records to it"):
        make_core(tmp_path / "model", record=str(file))
    first.close()
    make_core(tmp_path / "model", record=str(file)).close()
    assert read_recording(file).start


def test_a_process_that_is_killed_leaves_its_steps(tmp_path: Path) -> None:
    file = tmp_path / "steps.rec"
    source = f"""
        from penstock import LLM, SamplingParams
        llm = LLM("demo", num_threads=1, kv_cache_memory_bytes="8MiB", record={str(file)!r}, record_prompts=True)
        params = SamplingParams(temperature=0.0, max_tokens=10**4, ignore_eos=True)
        print("ready", flush=True)
        llm.generate(["ROMEO:"] * 2, [params] * 2, use_tqdm=False)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source)], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert process.stdout is not None
    process.stdout.readline()
    while not file.exists() or file.stat().st_size < 20_000:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    report = replay(file)
    assert report.is_equal, report.differences
    assert report.num_compared > 20


def test_options_come_back_from_a_configuration() -> None:
    given = {"max_num_seqs": 7, "speculative_config": {"method": "ngram"}, "dtype": "float32", "block_size": 32}
    config = EngineConfig.create("demo", **given)
    assert EngineConfig.create("demo", **config.options()) == config
    assert config.options()["max_num_seqs"] == 7


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"record": 3}, "record=3 is not valid. Allowed: the name of a file"),
        ({"record": "/nowhere/file"}, "/nowhere is not a folder"),
        ({"record": "/dev/null"}, "record='/dev/null' is not valid: it is a folder, or a device"),
        ({"record": "/tmp"}, "record='/tmp' is not valid: it is a folder"),
        ({"record_prompts": True}, "record_prompts=True has no meaning without record"),
        ({"record": "f", "record_window_s": 0}, "record_window_s=0 is not valid"),
        (
            {"record": "f", "speculative_config": {"method": "ngram", "rejection_sample_method": "standard"}},
            "is not valid with rejection_sample_method='standard'",
        ),
    ],
    ids=str,
)
def test_options_that_cannot_be_recorded_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineConfig.create("demo", **options)


def test_the_command_shows_phases_and_differences(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from typer.testing import CliRunner

    from penstock.cli.app import app

    file = recorded(tmp_path, rounds=1)
    done = CliRunner().invoke(app, ["replay", str(file)])
    assert done.exit_code == 0, done.output
    assert "All tokens are equal." in done.output
    assert [line.split()[0] for line in done.output.splitlines()[2:6]] == ["phase", "execute", "sample", "wait"]
    tiny_checkpoint(tmp_path / "other", "llama", vocab_size=VOCAB_SIZE, seed=1)
    done = CliRunner().invoke(app, ["replay", str(file), "--model", str(tmp_path / "other"), "--json"])
    assert done.exit_code == 1
    assert json.loads(done.output)["differences"]
    done = CliRunner().invoke(app, ["replay", str(file), "--show"])
    assert "execute SchedulerOutput(step_id=1" in done.output


def recorded_adapters(tmp_path: Path, **options: Any) -> Path:
    """File of a recorded engine with more adapters than it has slots and room on the host, one of which is removed."""
    with adapted(tmp_path / "adapted", variants=VARIANTS[:3]) as model:
        file, adapters = tmp_path / "steps.rec", [1, 2, 3, 0, 1]
        limits = {"max_loras": 1, "max_cpu_loras": 2}
        core = make_core(model.folder, **{**OPTIONS, **limits}, record=str(file), **options)
        results = run_adapted(core, model, [PREFIX[: 9 + number] for number in range(len(adapters))], adapters)
        core.collective_rpc(RpcCall("remove_lora", (1,)))
        results += run_adapted(core, model, [PREFIX[:9]], [1])
        core.close()
    assert [result.error for result in results] == [None] * len(results)
    for path in (tmp_path / "adapted").rglob("adapter_*"):
        # As in a copy of the folders.
        os.utime(path, (1, 1))
    return file


def test_recordings_with_adapters_are_replayed_with_copies_of_their_folders(tmp_path: Path) -> None:
    report = replay(recorded_adapters(tmp_path, record_prompts=True))
    assert (report.num_compared, report.differences) == (60, [])


def test_windows_begin_with_the_adapters_of_their_requests(tmp_path: Path) -> None:
    file = recorded_adapters(tmp_path, record_prompts=True, record_window_s=0.01)
    files = [file.with_name("steps.rec.previous"), file]
    assert any(read_recording(one).start.calls for one in files)
    for one in files:
        assert replay(one).differences == []


def test_weights_replace_those_of_an_adapter_at_the_recorded_step(tmp_path: Path) -> None:
    file = tmp_path / "steps.rec"
    with adapted(tmp_path / "adapted", variants=VARIANTS[:2]) as model:
        _, first, second = model.requests
        assert first is not None
        assert second is not None
        other = LoRARequest(first.lora_name, 1, second.lora_path, load_inplace=True)
        core = make_core(model.folder, **OPTIONS, record=str(file), record_prompts=True)
        core.collective_rpc(RpcCall("add_lora", (first,)))
        model = dataclasses.replace(model, requests=[None, first.reference])
        tokens = []
        for call in ("list_loras", "prefetch_lora", "add_lora"):
            core.collective_rpc(RpcCall(call, () if call == "list_loras" else (other,)))
            tokens.append(run_adapted(core, model, [PREFIX[:9]], [1])[0].tokens)
        core.close()
        assert tokens[0] == tokens[1] != tokens[2]
        assert replay(file).differences == []


class DialCall(RecordedCall, frozen=True, kw_only=True):
    """Call that turns a dial of the worker, to 0 to let it go."""

    feature = "dial_call"
    methods = ("turn",)
    dial: str
    value: int

    @classmethod
    def of(cls, call: RpcCall) -> DialCall:
        return cls(method=call.name, dial=call.args[0], value=call.args[1])

    @property
    def place(self) -> str:
        return self.dial

    @property
    def empties_place(self) -> bool:
        return self.value == 0

    @property
    def is_whole(self) -> bool:
        return self.value < 100

    def redacted(self) -> DialCall:
        return replace(self, dial="?")

    def repetition(self) -> RpcCall:
        return RpcCall(self.method, (self.dial, self.value))


@pytest.mark.parametrize("record_prompts", [True, False])
def test_calls_of_a_feature_are_recorded_and_the_last_ones_begin_the_next_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_prompts: bool
) -> None:
    monkeypatch.setattr(feature, "_registered", dict(feature._registered))
    monkeypatch.setattr(parts, "_types", dict(parts._types))
    register_feature(Feature(name="dials", recorded_call=DialCall))
    file = tmp_path / "steps.rec"
    options = {"record": str(file), "record_prompts": record_prompts, "record_window_s": 1e-9}
    recorder = Recorder(EngineConfig.create("demo", **options), KVCacheConfig(pools=(), groups=()), 64)
    for turn in (("a", 1), ("b", 2), ("c", 3), ("d", 100), ("a", 4), ("b", 0)):
        recorder.called(RpcCall("turn", turn))
    recorder.called(RpcCall("check_health"))
    entries = [entry.call for entry in read_recording(file).entries if isinstance(entry, Called)]
    assert [entry is None for entry in entries] == [False, False, False, True, False, False]
    recorder.executed(SchedulerOutput(step_id=1))
    recorder.close()
    begun = [part_of(call, DialCall) for call in read_recording(file).start.calls]
    name = "{}" if record_prompts else "?"
    expected = [(name.format("c"), 3), (name.format("a"), 4)]
    assert [(call.dial, call.value) for call in begun if call is not None] == expected


def test_recordings_without_prompts_do_not_name_adapters(tmp_path: Path) -> None:
    file = recorded_adapters(tmp_path)
    calls = [one.call for one in read_recording(file).entries if isinstance(one, Called) and one.call is not None]
    adapters = [call.adapter for call in (part_of(one, RecordedAdapter) for one in calls) if call is not None]
    assert all(adapter is None or adapter.identity for adapter in adapters)
    assert any(adapters)
    data = file.read_bytes()
    assert b"adapter1" not in data
    assert str(tmp_path / "adapted" / "adapter").encode() not in data
