"""The comparison with other engines: what it does with measurements, and that a run can be taken up again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.peers import measure
from benchmarks.peers.catalogue import ENGINES, REFERENCE
from benchmarks.peers.environments import ENVIRONMENTS
from benchmarks.peers.measure import STARTUP, Runner, find_workload
from benchmarks.peers.process import EngineFailure
from benchmarks.peers.results import FILE, Results, agreement, summarise
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.table import as_markdown, report
from benchmarks.workloads import make_workloads

CEILINGS = {"memory_gb_s": 40.0, "gflop_s": 200.0}
PEER = "llama.cpp-f32"


def measured(results: Results, engine: str, seconds: list[float], workload: str = "decode", **fields: Any) -> None:
    for repeat, value in enumerate(seconds):
        given = {"tokens": [[1, 2, 3, 4]], "ceilings": CEILINGS, "versions": {engine: "1"}, **fields}
        results.add("llama-60m", workload, engine, repeat, seconds=value, **given)


def row_of(data: dict[str, Any], engine: str, workload: str = "decode") -> dict[str, Any]:
    (row,) = [row for row in data["rows"] if (row["engine"], row["workload"]) == (engine, workload)]
    return row


def test_a_row_has_the_median_the_spread_and_the_ratio_to_ours(tmp_path: Path) -> None:
    results = Results(tmp_path)
    measured(results, REFERENCE, [0.9, 1.0, 1.1])
    measured(results, PEER, [2.0, 5.0, 2.5], tokens=[[1, 2, 9, 4]])
    row = row_of(report(results), PEER)
    assert row["figure"] == pytest.approx(128 / 2.5)
    assert row["spread"] == pytest.approx(3.0 / 2.5)
    assert row["reference_ratio"] == pytest.approx(2.5)
    assert (row["same_first_token"], row["same_beginning"]) == (1.0, 0.5)


def test_ratios_are_to_the_fastest_other_of_the_same_precision(tmp_path: Path) -> None:
    results = Results(tmp_path)
    measured(results, REFERENCE, [1.0])
    measured(results, "penstock-int8", [0.25])
    measured(results, PEER, [2.0])
    measured(results, "openvino-float32", [1.5])
    measured(results, "llama.cpp-q8_0", [0.5])
    lines = as_markdown(report(results)).splitlines()
    assert "| *Penstock float32 relative to the fastest other in float32* | 1.50 × |" in lines
    assert "| *Penstock int8 relative to the fastest other with int8 weights* | 2.00 × |" in lines
    assert "| *Penstock int8 relative to its float32* | 4.00 × |" in lines
    assert not any("bfloat16 relative" in line for line in lines)


def test_engines_are_compared_as_their_users_run_them(tmp_path: Path) -> None:
    results = Results(tmp_path)
    for engine, seconds in [("penstock-bfloat16", 1.0), ("vllm-bfloat16", 1.6), ("openvino-default", 1.2)]:
        measured(results, engine, [seconds])
    measured(results, "openvino-bfloat16", [0.5])  # a precision that its users ask for
    lines = as_markdown(report(results)).splitlines()
    assert "| *Penstock as its users run it relative to the fastest other as its users run it* | 1.20 × |" in lines
    assert {engine.driver for engine in ENGINES.values()} == {e.driver for e in ENGINES.values() if e.is_default}


def test_decoding_is_compared_with_reading_every_matrix_once_per_token(tmp_path: Path) -> None:
    results = Results(tmp_path)
    measured(results, REFERENCE, [1.0])
    measured(results, "llama.cpp-q8_0", [1.0])
    # Eight layers' matrices and the head; the embedding is only looked up.
    weights = 8 * (512 * 512 * 2 + 256 * 512 * 2 + 3 * 512 * 1536) + 32_000 * 512
    row = row_of(report(results), REFERENCE)
    assert row["share_of_ceiling"] == pytest.approx(128 * weights * 4 / 40e9)
    assert row_of(report(results), "llama.cpp-q8_0")["share_of_ceiling"] == pytest.approx(
        128 * weights * 8.5 / 8 / 40e9
    )


def test_prefill_is_compared_with_the_arithmetic(tmp_path: Path) -> None:
    results = Results(tmp_path)
    measured(results, REFERENCE, [2.0], "prefill")
    layers = 8 * (512 * 512 * 2 + 256 * 512 * 2 + 3 * 512 * 1536)
    flop = 2 * (4096 * layers + 8 * 32_000 * 512)
    assert row_of(report(results), REFERENCE, "prefill")["share_of_ceiling"] == pytest.approx(flop / 200e9 / 2.0)


def test_startup_is_in_seconds(tmp_path: Path) -> None:
    results = Results(tmp_path)
    measured(results, REFERENCE, [3.0], STARTUP)
    row = row_of(report(results), REFERENCE, STARTUP)
    assert (row["figure"], row["unit"], row["share_of_ceiling"]) == (3.0, "s", None)


def test_what_failed_or_is_not_installed_is_in_the_page(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.add_machine(2)
    measured(results, REFERENCE, [1.0])
    results.add("llama-60m", "decode", "generate", 0, error="RuntimeError: a | b")
    results.add_unavailable("vllm-float32", None, "not installed: no wheel")
    page = as_markdown(report(results))
    assert "Transformers generate | failed: RuntimeError: a \\| b |" in page
    assert "- vLLM CPU float32: not installed: no wheel" in page
    for line in page.splitlines():
        if line.startswith("| A decode"):
            assert line.replace("\\|", "").count("|") == 11


def test_what_was_installed_later_is_no_longer_missing(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.add_unavailable(PEER, None, "not installed: no compiler")
    results.add("llama-60m", "decode", PEER, 0, error="it ended")
    measured(results, PEER, [1.0])
    data = report(Results(tmp_path))
    assert data["unavailable"] == []
    assert row_of(data, PEER)["repeats"] == 1


def test_half_a_line_of_a_killed_run_is_forgotten(tmp_path: Path) -> None:
    measured(Results(tmp_path), PEER, [1.0, 2.0])
    path = tmp_path / FILE
    path.write_text(path.read_text()[:-30])
    again = Results(tmp_path)
    assert again.has("llama-60m", "decode", PEER, 0)
    assert not again.has("llama-60m", "decode", PEER, 1)
    measured(again, PEER, [1.0])
    assert [json.loads(line)["repeat"] for line in path.read_text().splitlines()] == [0, 0]


def test_repeats_without_a_counterpart_are_not_compared() -> None:
    assert agreement([{"repeat": 1, "tokens": [[1]]}], [{"repeat": 0, "tokens": [[1]]}]) is None
    assert summarise([{"repeat": 0, "error": "x"}]) is None


class FakeProcess:
    """An engine that answers at once, or fails."""

    calls: ClassVar[list[tuple[str, int]]] = []
    failing: ClassVar[set[str]] = set()

    def __init__(self, engine: Any, model: Path, work_dir: Path, **options: Any) -> None:
        self.engine = engine
        self.warm: set[str] = set()
        self.versions: dict[str, str] = {}
        self.is_awake = True

    def run(self, prompts: list[list[int]], num_outputs: list[int]) -> dict[str, Any]:
        assert self.is_awake
        if self.engine.name in self.failing:
            raise EngineFailure("it ended")
        FakeProcess.calls.append((self.engine.name, sum(num_outputs)))
        return {"seconds": 1.0, "since_start": 2.0, "tokens": [[7] for _ in prompts]}

    def pause(self) -> None:
        self.is_awake = False

    def resume(self) -> None:
        self.is_awake = True

    resume_at_rest = resume

    def close(self) -> None: ...


@pytest.fixture
def no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeProcess, "calls", [])
    monkeypatch.setattr(FakeProcess, "failing", set())
    monkeypatch.setattr(measure, "EngineProcess", FakeProcess)
    monkeypatch.setattr(measure, "failure_of", lambda work_dir, name: "no wheel" if name == "vllm" else None)
    monkeypatch.setattr(measure, "make", lambda work_dir, shape, model_format: work_dir / "model" / model_format)
    monkeypatch.setattr(
        measure, "Ceilings", lambda work_dir, threads: type("C", (), {"measure": lambda self: CEILINGS})()
    )


def runner(folder: Path, repeats: int = 2, budget_s: float = 1e9) -> Runner:
    return Runner(folder, Results(folder), threads=1, repeats=repeats, budget_s=budget_s)


SHAPE = SHAPES["llama-60m"]


@pytest.mark.usefixtures("no_engines")
def test_engines_take_turns_and_a_second_run_measures_only_what_is_missing(tmp_path: Path) -> None:
    engines = [ENGINES[name] for name in (REFERENCE, PEER, "vllm-float32")]
    assert runner(tmp_path, repeats=1).run([SHAPE], ["decode", STARTUP], engines)
    # A warm-up of 4 tokens before 128, then one token from a fresh process.
    once = [(REFERENCE, 4), (REFERENCE, 128), (PEER, 4), (PEER, 128), (REFERENCE, 1), (PEER, 1)]
    assert FakeProcess.calls == once
    assert runner(tmp_path, repeats=2).run([SHAPE], ["decode", STARTUP], engines)
    assert FakeProcess.calls == once + once
    results = Results(tmp_path)
    assert [record["repeat"] for record in results.of("llama-60m", "decode", PEER)] == [0, 1]
    assert "- vLLM CPU float32: not installed: no wheel" in as_markdown(report(results))


@pytest.mark.usefixtures("no_engines")
def test_an_engine_that_fails_is_left_out_of_this_run_and_tried_again_by_the_next(tmp_path: Path) -> None:
    FakeProcess.failing = {PEER}
    runner(tmp_path, repeats=3).run([SHAPE], ["decode"], [ENGINES[REFERENCE], ENGINES[PEER]])
    assert len(Results(tmp_path).of("llama-60m", "decode", PEER)) == 1
    FakeProcess.failing = set()
    runner(tmp_path, repeats=3).run([SHAPE], ["decode"], [ENGINES[REFERENCE], ENGINES[PEER]])
    assert row_of(report(Results(tmp_path)), PEER)["repeats"] == 3


@pytest.mark.usefixtures("no_engines")
def test_nothing_begins_after_the_budget(tmp_path: Path) -> None:
    assert not runner(tmp_path, budget_s=-1.0).run([SHAPE], ["decode"], [ENGINES[REFERENCE]])
    assert FakeProcess.calls == []


class Looks:
    """A machine that allows `most` at first, and then what is listed; in the end what it allowed last."""

    is_available = True

    def __init__(self, most: float, later: list[float]) -> None:
        self._gflop_s = [most] * measure._FIRST_LOOKS + later

    def measure(self) -> dict[str, float]:
        gflop_s = self._gflop_s.pop(0) if len(self._gflop_s) > 1 else self._gflop_s[0]
        return {**CEILINGS, "gflop_s": gflop_s}


@pytest.mark.usefixtures("no_engines")
def test_only_what_was_measured_on_a_steady_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It is waited for twice; the first figure does not count, since the machine is slow after it.
    looks = Looks(100.0, [50.0, 60.0, 90.0, 70.0, 95.0, 99.0])
    monkeypatch.setattr(measure, "Ceilings", lambda work_dir, threads: looks)
    steady = Runner(tmp_path, Results(tmp_path), threads=1, repeats=1, budget_s=1e9, steady=0.85)
    assert steady.run([SHAPE], ["decode"], [ENGINES[REFERENCE]])
    assert FakeProcess.calls == [(REFERENCE, 4), (REFERENCE, 128), (REFERENCE, 128)]
    (record,) = Results(tmp_path).of("llama-60m", "decode", REFERENCE)
    assert record["ceilings"]["gflop_s"] == 95.0
    assert record["draw"] == 1 + measure._DRAWS_APART
    assert looks.measure()["gflop_s"] == 99.0


@pytest.mark.usefixtures("no_engines")
def test_a_machine_that_stays_slow_ends_with_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "Ceilings", lambda work_dir, threads: Looks(100.0, [50.0]))
    steady = Runner(tmp_path, Results(tmp_path), threads=1, repeats=1, budget_s=0.2, steady=0.85)
    assert not steady.run([SHAPE], ["decode"], [ENGINES[REFERENCE]])
    assert FakeProcess.calls == [(REFERENCE, 4)]


def test_repeats_of_other_prompts_are_not_compared() -> None:
    ours = [{"repeat": 0, "draw": 1, "tokens": [[1, 2]]}]
    assert agreement([{"repeat": 0, "draw": 1, "tokens": [[1, 3]]}], ours) == (1.0, 0.5)
    assert agreement([{"repeat": 0, "draw": 1001, "tokens": [[1, 3]]}], ours) is None


@pytest.mark.parametrize("name", [workload.name for workload in make_workloads()])
def test_draws_have_the_same_lengths_and_other_tokens(name: str) -> None:
    first, second = (find_workload(name, SHAPE, draw=draw) for draw in (1, 2))
    assert [len(prompt) for prompt in first.prompts] == [len(prompt) for prompt in second.prompts]
    assert first.num_outputs == second.num_outputs
    assert not {tuple(p[:8]) for p in first.prompts} & {tuple(p[:8]) for p in second.prompts}
    assert first == find_workload(name, SHAPE, draw=1)


def test_every_engine_has_a_driver_and_an_environment() -> None:
    folder = Path(measure.__file__).parent / "drivers"
    for engine in ENGINES.values():
        assert (folder / f"{engine.driver}.py").is_file()
        assert engine.environment is None or engine.environment in ENVIRONMENTS
