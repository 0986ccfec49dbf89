"""Comparison of Penstock with other engines on CPU, each in its own virtual environment.

python -m benchmarks.peers setup --work-dir FOLDER                  environments, from the package registry
python -m benchmarks.peers run --work-dir FOLDER --output FOLDER    measures; taken up again where it was stopped
python -m benchmarks.peers table --output FOLDER                    the table of what there is
python -m benchmarks.peers plot RESULTS.json --output FILE.svg      a picture of one model's
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from benchmarks.peers.catalogue import ENGINES
from benchmarks.peers.environments import ENVIRONMENTS, set_up
from benchmarks.peers.measure import Runner
from benchmarks.peers.mixtures import ALL_SHAPES
from benchmarks.peers.plot import as_svg
from benchmarks.peers.results import Results
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.table import LETTERS, as_markdown, report

_WORKLOADS = {letter: name for name, letter in LETTERS.items()} | {name: name for name in LETTERS}


def main() -> None:
    arguments = _parse()
    if arguments.command == "setup":
        _set_up(arguments)
        return
    if arguments.command == "plot":
        _plot(arguments)
        return
    results = Results(arguments.output)
    if arguments.command == "run":
        _run(arguments, results)
    data = report(results)
    (arguments.output / "peers.json").write_text(json.dumps(data, indent=1))
    (arguments.output / "peers.md").write_text(as_markdown(data))
    print(as_markdown(data))


def _set_up(arguments: argparse.Namespace) -> None:
    wanted = {ENGINES[name].environment for name in arguments.engines} - {None}
    if "openvino" in wanted:
        wanted.add("openvino-convert")
    for name in ENVIRONMENTS:
        if name in wanted:
            failure = set_up(arguments.work_dir, name, again=arguments.again)
            print(f"{name}: {failure or 'installed'}", file=sys.stderr)


def _run(arguments: argparse.Namespace, results: Results) -> None:
    # As Ctrl-C does: engines that are stopped while others run would else be left behind.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
    results.add_machine(arguments.threads, arguments.steady)
    runner = Runner(
        arguments.work_dir,
        results,
        arguments.threads,
        arguments.repeats,
        budget_s=60 * arguments.budget,
        steady=arguments.steady,
    )
    workloads = list(dict.fromkeys(_WORKLOADS[name] for name in arguments.workloads))
    is_done = runner.run(
        [ALL_SHAPES[name] for name in arguments.models], workloads, [ENGINES[name] for name in arguments.engines]
    )
    if not is_done:
        print("The budget is spent; the same command goes on from here.", file=sys.stderr)


def _plot(arguments: argparse.Namespace) -> None:
    data = json.loads(arguments.results.read_text())
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(as_svg(data, arguments.model))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    engines = {"nargs": "+", "choices": list(ENGINES), "default": list(ENGINES), "metavar": "NAME"}
    setup = commands.add_parser("setup", help="make the virtual environments")
    run = commands.add_parser("run", help="measure")
    table = commands.add_parser("table", help="write the table of what was measured")
    plot = commands.add_parser("plot", help="draw what a table has of one model")
    plot.add_argument("results", type=Path, help="JSON, as run and table write it")
    plot.add_argument("--model", choices=list(SHAPES), default="llama-60m")
    plot.add_argument("--output", type=Path, required=True, help="an SVG file")
    for command in (setup, run):
        command.add_argument("--work-dir", type=Path, required=True, help="environments, models, logs: tens of GB")
        command.add_argument("--engines", **engines, help=", ".join(ENGINES))
    setup.add_argument("--again", action="store_true", help="make them once more")
    run.add_argument("--models", nargs="+", choices=list(ALL_SHAPES), default=list(SHAPES), help="default: dense ones")
    run.add_argument("--workloads", nargs="+", choices=list(_WORKLOADS), default=list(LETTERS), metavar="A-E")
    run.add_argument("--repeats", type=int, default=5)
    run.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    run.add_argument("--budget", type=float, default=float("inf"), metavar="MINUTES", help="begin nothing after these")
    run.add_argument(
        "--steady",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="count only what is measured while the machine allows this share of the most arithmetic seen (0.85)",
    )
    for command in (run, table):
        command.add_argument("--output", type=Path, required=True, help="peers.jsonl, peers.json and peers.md")
    arguments = parser.parse_args()
    if "work_dir" in arguments:
        arguments.work_dir = arguments.work_dir.resolve()
    return arguments


if __name__ == "__main__":
    main()
