"""Penstock beside Transformers, interleaved in one run: medians, spread and ratios.

python -m benchmarks.offline [--repeats 5] [--threads 2] [--workloads decode throughput] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.engines import ENGINES, InOwnProcess
from benchmarks.workloads import Workload, make_workloads, write_model

_STARTUP = "startup"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workloads", nargs="*")
    parser.add_argument("--engines", nargs="*", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "llama-60m")
        wanted = [w for w in make_workloads() if not arguments.workloads or w.name in arguments.workloads]
        seconds = measure(model, wanted, arguments.engines, arguments.repeats, arguments.threads)
        if not arguments.workloads or _STARTUP in arguments.workloads:
            seconds[_STARTUP] = measure_startup(model, arguments.repeats)
    report = summarise(wanted, seconds, arguments.threads)
    print(as_markdown(report))
    if arguments.output is not None:
        name = f"{datetime.date.today().isoformat()}-cpu-offline"
        (arguments.output / f"{name}.json").write_text(json.dumps(report, indent=1))
        (arguments.output / f"{name}.md").write_text(as_markdown(report))


def measure(
    model: Path, workloads: list[Workload], names: list[str], repeats: int, threads: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds by workload and engine; the engines take turns, so that a slow moment of the machine hits all."""
    engines = [InOwnProcess(name, model, threads) for name in names]
    seconds: dict[str, dict[str, list[float]]] = {}
    for workload in workloads:
        seconds[workload.name] = {engine.name: [] for engine in engines}
        tokens = {engine.name: engine.run(workload)[0] for engine in engines}
        check_agreement(workload, tokens)
        for repeat in range(repeats):
            for engine in engines:
                elapsed = engine.run(workload)[1]
                seconds[workload.name][engine.name].append(elapsed)
                print(f"{workload.name:14} {repeat + 1}/{repeats} {engine.name:34} {elapsed:8.3f} s", file=sys.stderr)
    for engine in engines:
        engine.close()
    return seconds


def check_agreement(workload: Workload, tokens: dict[str, list[list[int]]]) -> None:
    """Engines that compute the same model begin alike; random weights have near ties, so they may part later."""
    first = {name: [row[0] for row in rows] for name, rows in tokens.items()}
    reference = first.get("Penstock", next(iter(first.values())))
    for name, row in first.items():
        same = sum(a == b for a, b in zip(row, reference, strict=True))
        assert same >= 0.9 * len(reference), f"{workload.name}: {name} begins alike in only {same} of {len(reference)}"


def measure_startup(model: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds from the process's start to the first token, each in a fresh process."""
    load_transformers = (
        "import torch\nfrom transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(model)!r}, dtype=torch.float32)\n"
    )
    programs = {
        "Penstock": (
            "from penstock.config import EngineConfig\n"
            "from penstock.contract import SamplingParams\n"
            "from penstock.engine.core import EngineCore\n"
            "from penstock.engine.messages import EngineRequest\n"
            f"core = EngineCore(EngineConfig.create({str(model)!r}))\n"
            "core.add_request(EngineRequest(req_id='a', prompt_token_ids=[10, 11, 12],"
            " sampling_params=SamplingParams(temperature=0, seed=0, max_tokens=1)))\n"
            "while not core.step(): pass\n"
        ),
        "Transformers generate": (
            load_transformers
            + "model.generate(torch.tensor([[10, 11, 12]]), max_new_tokens=1, do_sample=False, pad_token_id=0)\n"
        ),
        "Transformers continuous batching": (
            load_transformers + "from transformers import GenerationConfig\n"
            "config = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0)\n"
            "outputs = model.generate_batch([[10, 11, 12]], generation_config=config, progress_bar=False)\n"
            "assert [len(output.generated_tokens) for output in outputs.values()] == [1]\n"
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def summarise(workloads: list[Workload], seconds: dict[str, dict[str, list[float]]], threads: int) -> dict[str, object]:
    """Medians and spreads as figures of each workload's unit, and Penstock's ratio to each engine."""
    by_name = {workload.name: workload for workload in workloads}
    rows = []
    for name, engines in seconds.items():
        workload = by_name.get(name)
        ours = statistics.median(engines["Penstock"]) if "Penstock" in engines else None
        for engine, values in engines.items():
            median = statistics.median(values)
            rows.append(
                {
                    "workload": name,
                    "title": workload.title if workload else "process start to first token",
                    "engine": engine,
                    "median": workload.num_units / median if workload else median,
                    "unit": workload.unit if workload else "s",
                    "spread": (max(values) - min(values)) / median,
                    "ratio": median / ours if ours is not None else None,
                }
            )
    return {"machine": machine(threads), "rows": rows}


def machine(threads: int) -> dict[str, object]:
    import transformers

    from penstock.kernels.native import describe_kernels  # which checkouts of long ago lack

    return {
        "date": datetime.date.today().isoformat(),
        "processor": _processor(),
        "kernels": describe_kernels().removesuffix(" kernels"),
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def as_markdown(report: dict[str, object]) -> str:
    lines = ["# Offline, CPU, float32, random-weight Llama of 60 million parameters", ""]
    facts = report["machine"]
    assert isinstance(facts, dict)
    lines += [", ".join(f"{name} {value}" for name, value in facts.items()), ""]
    lines += ["| workload | engine | median | spread | Penstock is |", "| --- | --- | ---: | ---: | ---: |"]
    rows = report["rows"]
    assert isinstance(rows, list)
    for row in rows:
        is_compared = row["ratio"] is not None and row["engine"] != "Penstock"
        ratio = f"{row['ratio']:.2f} × as fast" if is_compared else ""
        figure = f"{row['median']:.2f} {row['unit']}"
        lines.append(f"| {row['title']} | {row['engine']} | {figure} | {100 * row['spread']:.0f}% | {ratio} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
