"""Embeddings per second, beside sentence-transformers, vLLM and OpenVINO on the same machine and weights.

    python -m benchmarks.peers setup --work-dir FOLDER --engines vllm-float32 openvino-float32    once
    python -m benchmarks.embeddings --work-dir FOLDER --output FOLDER [--budget 10] [--pieces 5] [--texts 300]
        [--shortest 16] [--longest 512] [--layers 12] [--hidden 768] [--dtype float32] [--engines NAME …] [--threads N]

A random encoder of BERT-base's shape embeds texts of lengths spread evenly between the shortest and the longest. They
are dealt into pieces with the same spread, and for each piece the engines take turns, each in a process of its own that
is stopped while another one runs; so a ratio is of neighbouring seconds. Engines that pad get a piece in batches of
texts of similar length, as in one call with all texts.

Each engine runs in float32, and as it does by default with a checkpoint of --dtype, which is left out where that is
float32 too. An engine that takes more than 4 times as long as the fastest gets no second piece. Results are appended to
embeddings.jsonl as they come: the same command goes on where the budget (minutes, loading included) has ended a run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.embedding_model import make_model, make_texts, num_tokens_of
from benchmarks.peers.catalogue import EngineSpec
from benchmarks.peers.checkpoints import convert
from benchmarks.peers.environments import failure_of
from benchmarks.peers.process import EngineFailure, EngineProcess
from benchmarks.peers.results import Results

FILE = "embeddings.jsonl"
# Texts of a padded batch: of one call with all texts, and of the least that a piece is cut into.
_BATCH_SIZE, _SMALLEST_BATCH = 32, 4
# Of the fastest engine's seconds, how much more an engine may take that gets a second piece.
_TOO_SLOW = 4.0
_FLOAT32 = "-float32"


def _spec(name: str, title: str, driver: str, environment: str | None = None, **options: Any) -> EngineSpec:
    model_format = "openvino" if environment == "openvino" else "checkpoint"
    return EngineSpec(name, title, f"{driver}_embedding", environment, model_format, 32, options)


ENGINES = {
    engine.name: engine
    for engine in (
        _spec("penstock-float32", "Penstock float32", "penstock", dtype="float32"),
        _spec(
            "sentence-transformers-float32", "sentence-transformers float32", "sentence_transformers", dtype="float32"
        ),
        _spec("vllm-float32", "vLLM CPU float32", "vllm", "vllm", dtype="float32"),
        _spec("openvino-float32", "OpenVINO GenAI float32", "openvino", "openvino", inference_precision="f32"),
        _spec("penstock", "Penstock, default", "penstock"),
        _spec("penstock-int8", "Penstock int8", "penstock", quantization="int8"),
        _spec("sentence-transformers", "sentence-transformers, default", "sentence_transformers"),
        _spec("vllm", "vLLM CPU, default", "vllm", "vllm", dtype="auto"),
        _spec("openvino", "OpenVINO GenAI, default", "openvino", "openvino"),
    )
}
REFERENCE = "penstock-float32"


class Run:
    """Run of the engines, which measures what the results do not have yet."""

    def __init__(self, args: argparse.Namespace, results: Results) -> None:
        self._args = args
        self._results = results
        self._end = time.monotonic() + 60 * args.budget
        self._name = f"bert-{args.layers}x{args.hidden}-{args.dtype}"
        self._folder = args.work_dir / "models" / self._name
        self._processes: dict[str, EngineProcess] = {}
        texts = make_texts(args.texts, args.shortest, args.longest)
        self._pieces = [texts[number :: args.pieces] for number in range(args.pieces)]
        self._workload = f"{args.texts} texts of {args.shortest} to {args.longest} tokens in {args.pieces} pieces"
        self._batch_size = max(_SMALLEST_BATCH, _BATCH_SIZE // args.pieces)

    def run(self, engines: list[EngineSpec]) -> bool:
        """Returns whether all is done, rather than the budget spent."""
        try:
            for engine in engines:
                self._start(engine)
            for number in range(len(self._pieces) if self._processes else 0):
                names = list(self._processes)
                # No engine always comes first.
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    if not self._is_wanted(name, number):
                        continue
                    if time.monotonic() > self._end:
                        return False
                    self._measure(name, number)
        finally:
            for process in self._processes.values():
                with suppress(OSError):
                    process.close()
        return True

    def rows(self) -> list[dict[str, Any]]:
        """A row per engine that was measured."""
        measured = {name: self._measured(name) for name in ENGINES}
        reference = measured[REFERENCE]
        rows = []
        for name, pieces in measured.items():
            if not pieces:
                continue
            tokens = [self._num_tokens(number) / record["seconds"] for number, record in sorted(pieces.items())]
            both = [number for number in pieces if number in reference]
            ratios = [reference[number]["seconds"] / pieces[number]["seconds"] for number in both]
            rows.append(
                {
                    "engine": name,
                    "title": ENGINES[name].title,
                    "precision": next(iter(pieces.values()))["precision"],
                    "texts": sum(len(self._pieces[number]) for number in pieces),
                    "seconds": sum(record["seconds"] for record in pieces.values()),
                    "tokens_per_s": statistics.median(tokens),
                    "tokens_per_s_from_to": [min(tokens), max(tokens)],
                    "ratio": statistics.median(ratios) if ratios else None,
                    "ratio_from_to": [min(ratios), max(ratios)] if ratios else None,
                    "cosine": self._cosine(pieces, reference),
                    "versions": next(iter(pieces.values()))["versions"],
                }
            )
        return rows

    def page(self) -> str:
        """The rows as a Markdown table, with what could not be measured."""
        machines = [record for record in self._results.records if record["kind"] == "machine"]
        facts = machines[-1]
        lines = [
            f"{facts['processor']} ({facts['instruction_sets']}), {facts['threads']} threads, {facts['date']}.",
            f"{self._name}, {self._workload}; medians of the pieces, smallest and largest in brackets.",
            "",
            "| engine | computes in | texts | tokens/s | against Penstock float32 | smallest cosine to it |",
            "| --- | --- | ---: | ---: | ---: | ---: |",
        ]
        for row in self.rows():
            speed = _spread(row["tokens_per_s"], row["tokens_per_s_from_to"], ",.0f")
            ratio = "" if row["ratio"] is None else _spread(row["ratio"], row["ratio_from_to"], ".2f")
            cosine = "" if row["cosine"] is None else f"{row['cosine']:.6f}"
            lines.append(f"| {row['title']} | {row['precision']} | {row['texts']} | {speed} | {ratio} | {cosine} |")
        reasons = {
            record["engine"]: record["reason"]
            for record in self._results.records
            if record["kind"] == "unavailable"
            and record["model"] == self._name
            and not self._measured(record["engine"])
        }
        lines += ["", *(f"- {ENGINES[name].title}: {reason}" for name, reason in reasons.items())]
        versions = {name: version for row in self.rows() for name, version in row["versions"].items()}
        lines += ["", ", ".join(f"{name} {version}" for name, version in versions.items())]
        return "\n".join(lines) + "\n"

    def _start(self, engine: EngineSpec) -> None:
        """Load an engine and warm it up, unless it has nothing to do."""
        if not any(self._is_wanted(engine.name, number) for number in range(len(self._pieces))):
            return
        begin = time.monotonic()
        try:
            failure = None if engine.environment is None else failure_of(self._args.work_dir, engine.environment)
            if failure is not None:
                raise EngineFailure(failure)
            process = EngineProcess(
                replace(engine, options={**engine.options, "batch_size": self._batch_size}),
                self._model(engine.model_format),
                self._args.work_dir,
                threads=self._args.threads,
                num_kv_tokens=0,
                num_kv_bytes=0,
                timeout_s=max(1.0, self._end - begin),
            )
            self._processes[engine.name] = process
            precision = process.call("precision")
            if precision == "float32" and engine.name + _FLOAT32 in ENGINES:
                raise EngineFailure("computes in float32 by default, see that row")
            # The shortest and the longest text among them.
            process.call("embed", self._pieces[0][:1] + self._pieces[-1][-1:])
            process.pause()
        except (EngineFailure, RuntimeError, OSError) as error:
            self._drop(engine.name, str(error))
            return
        print(f"{engine.title}: {precision}, loaded in {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)

    def _model(self, model_format: str) -> Path:
        checkpoint = self._folder / "checkpoint"
        self._folder.mkdir(parents=True, exist_ok=True)
        make_model(checkpoint, self._args.layers, self._args.hidden, self._args.dtype)
        if model_format == "checkpoint":
            return checkpoint
        target, unfinished = self._folder / model_format, self._folder / f"{model_format}.unfinished"
        if not target.exists():
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            convert(self._args.work_dir, "openvino-convert", "openvino_ir", checkpoint, unfinished, "embedding")
            unfinished.rename(target)
        return target

    def _measure(self, name: str, number: int) -> None:
        process = self._processes[name]
        try:
            process.resume_at_rest()
            reply = process.call("embed", self._pieces[number])
            precision = process.call("precision")
            process.pause()
        except EngineFailure as error:
            self._drop(name, str(error))
            return
        fields = {**reply, "precision": precision, "versions": process.versions}
        self._results.add(self._name, self._workload, name, number, **fields)
        speed = self._num_tokens(number) / reply["seconds"]
        taken = f"{reply['seconds']:7.2f} s {speed:8,.0f} tokens/s"
        print(f"piece {number + 1}/{len(self._pieces)} {ENGINES[name].title:32} {taken}", file=sys.stderr, flush=True)

    def _is_wanted(self, name: str, number: int) -> bool:
        if self._results.has(self._name, self._workload, name, number):
            return False
        fastest: dict[int, float] = {}
        for other in ENGINES:
            for piece, record in self._measured(other).items():
                fastest[piece] = min(record["seconds"], fastest.get(piece, record["seconds"]))
        return all(record["seconds"] < _TOO_SLOW * fastest[piece] for piece, record in self._measured(name).items())

    def _measured(self, name: str) -> dict[int, dict[str, Any]]:
        """An engine's measurements, by the piece's number."""
        return {record["repeat"]: record for record in self._results.of(self._name, self._workload, name)}

    def _drop(self, name: str, reason: str) -> None:
        self._results.add_unavailable(name, self._name, reason)
        print(f"{ENGINES[name].title}: {reason}", file=sys.stderr, flush=True)
        process = self._processes.pop(name, None)
        if process is not None:
            process.close()

    def _num_tokens(self, number: int) -> int:
        return sum(map(num_tokens_of, self._pieces[number]))

    @staticmethod
    def _cosine(pieces: dict[int, dict[str, Any]], reference: dict[int, dict[str, Any]]) -> float | None:
        """Smallest cosine between vectors of the same texts."""
        cosines = [
            float((np.array(record["vectors"]) * np.array(reference[number]["vectors"])).sum(1).min())
            for number, record in pieces.items()
            if number in reference
        ]
        return min(cosines, default=None)


def _spread(median: float, from_to: list[float], form: str) -> str:
    return f"{median:{form}} ({from_to[0]:{form}} to {from_to[1]:{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"texts": 300, "shortest": 16, "longest": 512, "layers": 12, "hidden": 768, "pieces": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--work-dir", type=Path, required=True, help="environments of `benchmarks.peers`, models, logs")
    parser.add_argument("--output", type=Path, required=True, help="embeddings.jsonl, embeddings.json, embeddings.md")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES), metavar="NAME")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--budget", type=float, default=10.0, metavar="MINUTES", help="begin nothing after these")
    args = parser.parse_args()
    args.work_dir = args.work_dir.resolve()
    # As Ctrl-C does: engines that are stopped while others run would else be left behind.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
    results = Results(args.output, FILE)
    results.add_machine(args.threads)
    run = Run(args, results)
    if not run.run([ENGINES[name] for name in args.engines]):
        print("The budget is spent; the same command goes on from here.", file=sys.stderr)
    (args.output / "embeddings.json").write_text(json.dumps(run.rows(), indent=1))
    (args.output / "embeddings.md").write_text(run.page())
    print(run.page())


if __name__ == "__main__":
    main()
