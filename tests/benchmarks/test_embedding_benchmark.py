"""The comparison of engines that embed: its table, and what a second run of the same command measures."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.embedding_model import make_texts, num_tokens_of
from benchmarks.embeddings import ENGINES, FILE, Run
from benchmarks.peers.results import Results


def make_run(folder: Path) -> tuple[Run, Results]:
    sizes = {"texts": 4, "shortest": 10, "longest": 10, "layers": 1, "hidden": 64, "pieces": 2}
    args = argparse.Namespace(**sizes, dtype="float32", work_dir=folder, output=folder, budget=1.0, threads=1)
    results = Results(folder, FILE)
    return Run(args, results), results


def measured(run: Run, results: Results, name: str, seconds: list[float]) -> None:
    for number, value in enumerate(seconds):
        fields = {"precision": "float32", "versions": {name: "1"}, "vectors": [[0.6, 0.8], [1.0, 0.0]]}
        results.add(run._name, run._workload, name, number, seconds=value, **fields)


def test_lengths_are_spread_evenly() -> None:
    assert [num_tokens_of(text) for text in make_texts(3, 16, 512)] == [16, 264, 512]


def test_a_row_has_medians_of_the_pieces_and_the_ratio_to_the_same_pieces_of_ours(tmp_path: Path) -> None:
    run, results = make_run(tmp_path)
    results.add_machine(1)
    measured(run, results, "penstock-float32", [1.0, 2.0])
    measured(run, results, "vllm", [2.0])
    ours, theirs = run.rows()
    assert (ours["tokens_per_s"], ours["ratio"], ours["texts"]) == (15.0, 1.0, 4)
    assert (theirs["tokens_per_s"], theirs["ratio"], theirs["texts"]) == (10.0, 0.5, 2)
    assert theirs["cosine"] == pytest.approx(1.0)
    results.add_unavailable("openvino", run._name, "it has no wheels")
    assert "OpenVINO GenAI, default: it has no wheels" in run.page()


def test_a_second_run_measures_what_is_missing_and_no_engine_that_is_far_too_slow(tmp_path: Path) -> None:
    run, results = make_run(tmp_path)
    measured(run, results, "penstock-float32", [1.0, 1.0])
    measured(run, results, "openvino", [2.0])
    measured(run, results, "vllm", [9.0])
    again, _ = make_run(tmp_path)
    wanted = {name: [number for number in (0, 1) if again._is_wanted(name, number)] for name in ENGINES}
    assert (wanted["penstock-float32"], wanted["openvino"], wanted["vllm"]) == ([], [1], [])
    assert wanted["sentence-transformers"] == [0, 1]


def test_an_engine_without_its_environment_says_so(tmp_path: Path) -> None:
    run, results = make_run(tmp_path)
    assert run.run([ENGINES["openvino"]])
    assert "environment was not made" in results.records[-1]["reason"]
