"""Replay: runs the steps of a recording in new workers, without scheduler and requests, and compares the results."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from penstock.config import EngineConfig
from penstock.contract import KVCacheConfig, KVCachePool, ModelRunnerOutput, Parts, SamplingInput, SchedulerOutput
from penstock.contract.param_checks import shown
from penstock.contract.recorded_call import RecordedCall
from penstock.contract.runner_output import SampledOutput
from penstock.contract.step_checks import StepChecks
from penstock.engine.planning.kv_cache_size import specs_of_all, whole_kv_cache_bytes
from penstock.errors import InvalidMessage, InvalidRecording, OutOfMemory
from penstock.executor import Executor, create_executor
from penstock.executor.recording.entries import (
    Called,
    Executed,
    Failed,
    Read,
    Recording,
    Sampled,
    Start,
    now_s,
    read_recording,
)
from penstock.executor.recording.recorder import arithmetic_of
from penstock.executor.recording.replayed_steps import ReplayedSteps, num_scratch_blocks
from penstock.observability.units import format_bytes
from penstock.scheduler.kv_cache_plan import bytes_per_block, group_layers, make_kv_cache_config, num_pools

logger = logging.getLogger(__name__)

# Options of the recorded engine that a replay has no use for.
_NOT_REPLAYED = (
    "record",
    "record_window_s",
    "record_prompts",
    "live_view",
    "data_parallel_size",
    "data_parallel_size_local",
    "data_parallel_rank",
    "data_parallel_rank_local",
    "enable_multiprocessing",
    "kv_cache_memory_bytes",
    "memory_fraction",
    # Blocks that were loaded are computed.
    "kv_offloading_size",
    "kv_offload_dir",
    "kv_offload_dir_size",
    "kv_load_policy",
    "kv_listen",
    "kv_peers",
    "kv_peers_other_ranks",
    "kv_secret_file",
    "ec_transfer_config",
)
# Options whose other value adds sums in another order, or computes in another arithmetic.
_CHANGES_BITS = (
    "tensor_parallel_size",
    "decode_context_parallel_size",
    "enable_sp",
    "dtype",
    "quantization",
    "attention_backend",
)
# Options that name code, which is imported.
_IMPORTS = ("worker_cls", "worker_extension_cls", "logits_processors")
_MOST_DIFFERENCES = 10
PHASES = ("execute", "sample", "wait")


@dataclass(frozen=True, slots=True)
class Difference:
    """Request of a step whose result is another one. step_id: of the recording."""

    step_id: int
    req_id: str
    recorded: list[int] | str
    replayed: list[int] | str


@dataclass(slots=True)
class ReplayReport:
    """Result of a replay.

    num_compared: tokens, or pooled vectors, of the recording. num_different: results of a request in a step that
    differ; `differences` are the first ones. num_filled_tokens: positions that were computed before their steps, since
    the recording begins with them or they were cached prefixes; their time is not in `replayed_s`.
    recorded_s, replayed_s: seconds by phase: execute, sample, wait. end: how the recording ends.
    unlike: what these workers have that the recorded ones had not, such as ranks or kernels, so that sums are rounded
    otherwise, and tokens that are nearly as likely may change places.
    """

    num_steps: int = 0
    num_compared: int = 0
    num_different: int = 0
    num_filled_tokens: int = 0
    differences: list[Difference] = field(default_factory=list)
    recorded_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    replayed_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    end: str = ""
    unlike: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        return not self.num_different

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "is_equal": self.is_equal}


def replay(
    path: Path | str, model: str | None = None, *, trust_imports: bool = False, **overrides: Any
) -> ReplayReport:
    """Run a recording in new workers.

    model: name of the model here; None for that of the recording. trust_imports: import the classes that the recording
    names (worker_cls, worker_extension_cls, logits_processors). overrides: engine options that replace the recorded
    ones, such as tensor_parallel_size=2.

    Raises InvalidRecording for a file that cannot be replayed, OutOfMemory where its KV cache does not fit.
    """
    path = Path(path)
    recording = read_recording(path)
    check_replayable(recording, path)
    start = recording.start
    options = {name: value for name, value in start.options.items() if name not in _NOT_REPLAYED}
    if not trust_imports:
        _refuse_imports({name: value for name, value in options.items() if name not in overrides}, path)
    config = EngineConfig.create(model or start.model, **{"max_model_len": start.max_model_len, **options, **overrides})
    _check_fits(config, recording)
    executor = create_executor(config)
    try:
        start = _allocate(executor, config, start)
        recording = replace(recording, start=start)
        _check_steps(recording, config, path)
        unlike = _differences_of_workers(start, config, arithmetic_of(executor))
        if unlike:
            logger.warning(
                "These workers round otherwise than the recorded ones; tokens nearly as likely may differ: %s",
                "; ".join(unlike),
            )
        return _Replay(recording, executor, config, unlike).run()
    finally:
        executor.shutdown()


def _differences_of_workers(start: Start, config: EngineConfig, arithmetic: str) -> list[str]:
    """Arrangement and arithmetic that are not those of the recorded workers, in words."""
    recorded = {**start.options, "arithmetic": start.arithmetic or arithmetic}
    found = {**config.options(), "arithmetic": arithmetic}
    return [
        f"{name} is {found.get(name, 'the default')}, and was {recorded.get(name, 'the default')}"
        for name in (*_CHANGES_BITS, "arithmetic")
        if found.get(name) != recorded.get(name)
    ]


def _refuse_imports(options: Mapping[str, Any], path: Path) -> None:
    """Raise InvalidRecording for options that name code: a file decides what runs here only where it is trusted."""
    named = {name: options[name] for name in _IMPORTS if options.get(name)}
    if named:
        name = next(iter(named))
        raise InvalidRecording(
            f"{path} names Python code that its engine had: "
            f"{', '.join(f'{name}={shown(value)}' for name, value in named.items())}. Replay it with --trust-imports "
            f"(trust_imports=True) if you trust the file, or with another value: --option {name}=..."
        )


def _check_steps(recording: Recording, config: EngineConfig, path: Path) -> None:
    """Raise InvalidRecording for a step or a result that no engine would have recorded, before any of them runs."""
    start = recording.start
    checks = StepChecks(
        start.kv_cache_config,
        max_num_reqs=config.scheduler.max_num_seqs,
        max_num_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=start.max_model_len,
        vocab_size=start.vocab_size,
        max_drafts=config.speculative.num_speculative_tokens,
    )
    try:
        _raise_first(checks.hold(start.requests), "its beginning")
        for entry in recording.entries:
            if isinstance(entry, Executed):
                _raise_first(checks.check(entry.step).errors, f"step {entry.step.step_id}")
            elif isinstance(entry, Sampled):
                checks.check_sampling(entry.sampling)
            elif isinstance(entry, Read) and not _is_whole(entry.result):
                raise InvalidMessage(f"The result of step {entry.result.step_id} has lists of different lengths.")
    except InvalidMessage as error:
        raise InvalidRecording(f"{path} cannot be replayed: {error}") from error


def _raise_first(errors: Mapping[str, str], where: str) -> None:
    for req_id, error in errors.items():
        raise InvalidMessage(f"Request {shown(req_id)} in {where}: {error}.")


def _is_whole(result: ModelRunnerOutput) -> bool:
    per_request = result.sampled_token_ids if isinstance(result, SampledOutput) else result.pooled
    return len(per_request) == len(result.req_ids)


def _check_fits(config: EngineConfig, recording: Recording) -> None:
    """Raise InvalidRecording for a model or limits that the recorded steps do not fit into."""
    start = recording.start
    steps = [entry.step for entry in recording.entries if isinstance(entry, Executed)]
    if config.model.vocab_size != start.vocab_size:
        raise InvalidRecording(
            f"The recorded model has {start.vocab_size:,} tokens in its vocabulary, but {config.model.model} has "
            f"{config.model.vocab_size:,}. Replay with the recorded model."
        )
    most_tokens = max((step.total_num_scheduled_tokens for step in steps), default=0)
    most_requests = max((len(step.num_scheduled_tokens) for step in steps), default=0)
    for name, found, needed in (
        ("max_model_len", config.model.max_model_len, start.max_model_len),
        ("max_num_batched_tokens", config.scheduler.max_num_batched_tokens, most_tokens),
        ("max_num_seqs", config.scheduler.max_num_seqs, most_requests),
    ):
        if isinstance(found, int) and found < needed:
            raise InvalidRecording(
                f"{name}={found:,} is too small for the recorded steps, which need {needed:,}. Leave the option out."
            )


def check_replayable(recording: Recording, path: Path) -> None:
    """Raise InvalidRecording for a recording without tokens, or with calls that cannot be repeated."""
    if recording.start.is_redacted:
        raise InvalidRecording(
            f"{path} holds no tokens, so it cannot be replayed. Record with record_prompts=True; "
            "`penstock replay FILE --show` lists its steps."
        )
    for entry in recording.entries:
        if isinstance(entry, Called) and entry.call is None:
            raise InvalidRecording(
                f"{path} holds a call of {entry.method}, whose weights are not recorded, so it cannot be replayed. "
                "`penstock replay FILE --show` lists its steps."
            )


def _allocate(executor: Executor, config: EngineConfig, start: Start) -> Start:
    """Allocate the recorded blocks, and scratch ones behind them. Returns the start with the workers' own groups."""
    specs_by_rank = executor.get_kv_cache_specs()
    plans = executor.determine_available_memory()
    groups = group_layers(specs_of_all(specs_by_rank))
    recorded = start.kv_cache_config
    found = [(group.layer_names, group.spec.block_size) for group in groups]
    wanted = [(group.layer_names, group.spec.block_size) for group in recorded.groups]
    if found != wanted:
        raise InvalidRecording(
            f"The recorded engine had KV-cache groups {wanted}, but these workers have {found}. Replay with the model, "
            "block_size and kv_cache_dtype of the recording."
        )
    num_blocks = [pool.num_blocks for pool in recorded.pools]
    if len(num_blocks) != num_pools(groups) or min(num_blocks, default=1) < 1 or start.max_model_len < 1:
        raise InvalidRecording(
            f"The recorded engine has num_blocks={num_blocks} and max_model_len={start.max_model_len}. Allowed: 1 or "
            f"more of each, for {num_pools(groups)} pools."
        )
    recorded = KVCacheConfig(pools=tuple(KVCachePool(num_blocks=count) for count in num_blocks), groups=groups)
    if groups:
        factor = config.parallel.decode_context_parallel_size
        for pool, count in enumerate(num_scratch_blocks(recorded, factor, start.max_model_len)):
            num_blocks[pool] += count
        needed = sum(count * bytes_per_block(groups, pool) for pool, count in enumerate(num_blocks))
        available = whole_kv_cache_bytes(specs_by_rank, plans)
        if needed > available:
            raise OutOfMemory(
                f"The recorded KV cache needs {format_bytes(needed)}, but {format_bytes(available)} are free for it. "
                "Replay on a machine with more memory, or with more ranks."
            )
    executor.initialize_from_config(make_kv_cache_config(groups, num_blocks), start.max_model_len)
    return msgspec.structs.replace(start, kv_cache_config=recorded)


class _Replay:
    """Replay of one recording."""

    def __init__(self, recording: Recording, executor: Executor, config: EngineConfig, unlike: list[str]) -> None:
        self._recording = recording
        self._executor = executor
        self._timeout_s = config.parallel.step_timeout_s
        self._report = ReplayReport(unlike=unlike)
        self._recorded = {entry.result.step_id: entry for entry in recording.entries if isinstance(entry, Read)}
        self._steps = ReplayedSteps(
            recording.start,
            {step_id: entry.result for step_id, entry in self._recorded.items()},
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            positions_per_block=config.parallel.decode_context_parallel_size,
        )

    def run(self) -> ReplayReport:
        """Run all steps. Raises what the workers raise."""
        executed: tuple[Executed, SchedulerOutput] | None = None
        for call in self._recording.start.calls:
            self._call(call)
        for entry in self._recording.entries:
            if isinstance(entry, Executed):
                executed = (entry, self._execute(entry))
            elif isinstance(entry, Sampled) and executed is not None:
                self._sample(*executed, entry)
                executed = None
            elif isinstance(entry, Called) and entry.call is not None:
                self._call(entry.call)
            elif isinstance(entry, Failed):
                self._report.end = f"The recorded workers failed: {entry.reason}"
        if self._recording.is_cut and not self._report.end:
            self._report.end = "The recording was cut: its process ended while it wrote."
        elif executed is not None and not self._report.end:
            self._report.end = f"The recorded process ended in step {executed[0].step.step_id}."
        self._report.num_filled_tokens = self._steps.num_filled_tokens
        return self._report

    def _execute(self, entry: Executed) -> SchedulerOutput:
        for filling in self._steps.fillings(entry.step):
            self._executor.execute_model(filling)
            self._executor.sample_tokens(SamplingInput(step_id=filling.step_id)).get_output(self._timeout_s)
        step = self._steps.replayed(entry.step)
        begin_s = now_s()
        self._executor.execute_model(step)
        self._report.replayed_s["execute"] += now_s() - begin_s
        self._report.num_steps += 1
        return step

    def _sample(self, executed: Executed, step: SchedulerOutput, entry: Sampled) -> None:
        sampling = msgspec.structs.replace(entry.sampling, step_id=step.step_id)
        times = [now_s()]
        handle = self._executor.sample_tokens(sampling)
        times.append(now_s())
        result = handle.get_output(self._timeout_s)
        times.append(now_s())
        self._report.replayed_s["sample"] += times[1] - times[0]
        self._report.replayed_s["wait"] += times[2] - times[1]
        self._report.recorded_s["execute"] += entry.executed_s - executed.begin_s
        self._report.recorded_s["sample"] += entry.end_s - entry.begin_s
        expected = self._recorded.get(executed.step.step_id)
        if expected is not None:
            self._report.recorded_s["wait"] += expected.end_s - expected.begin_s
            self._compare(expected.result, result)

    def _compare(self, recorded: ModelRunnerOutput, replayed: ModelRunnerOutput) -> None:
        found, report = _by_request(replayed), self._report
        for req_id, expected in _by_request(recorded).items():
            report.num_compared += len(expected) if isinstance(expected, list) else 1
            if found.get(req_id) == expected:
                continue
            report.num_different += 1
            if len(report.differences) < _MOST_DIFFERENCES:
                report.differences.append(Difference(recorded.step_id, req_id, expected, found.get(req_id, "nothing")))

    def _call(self, call: Parts) -> None:
        for part in call.values():
            if isinstance(part, RecordedCall):
                self._executor.collective_rpc(part.repetition())


def _by_request(result: ModelRunnerOutput) -> Mapping[str, list[int] | str]:
    """Tokens by request, or pooled vectors as text; errors for requests that have one."""
    errors: dict[str, list[int] | str] = dict(result.errors)
    if isinstance(result, SampledOutput):
        return {**dict(zip(result.req_ids, result.sampled_token_ids, strict=True)), **errors}
    vectors = zip(result.req_ids, result.pooled, strict=True)
    return {**{req_id: str(vector and vector.data.hex()) for req_id, vector in vectors}, **errors}
