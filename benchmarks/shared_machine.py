"""Speed beside busy processes: the engine's own choice of threads against fixed numbers of threads.

    python -m benchmarks.shared_machine [--model demo] [--busy 0 1 2] [--rounds 5] [--output FOLDER]
    python -m benchmarks.shared_machine --model llama-60m --peers llama.cpp-bf16 vllm-bfloat16 --work-dir FOLDER

One request and 32, with endless loops beside them as `--busy` says. All engines take turns. "1 thread" has nothing to
choose; "chosen" has one thread per core and takes as many as pay. The ratio is that of the chosen number to the better
one of the fixed ones, within a round; `--without` names a checkout whose engines always use all threads.

`--peers` are engines of `benchmarks.peers`, with a thread per core, on the same model: one of its shapes, made in its
work folder, where `benchmarks.peers setup` has made their environments. They are stopped between their turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import described, machine, save
from benchmarks.peers.catalogue import ENGINES
from benchmarks.peers.checkpoints import make
from benchmarks.peers.environments import failure_of
from benchmarks.peers.process import EngineProcess
from benchmarks.peers.shapes import SHAPES

_PROMPT, _REQUESTS = 32, 32


def serve_rates(model: str, threads: int) -> None:
    """Engine: print a line when it is ready, then the tokens per second of each line [requests, tokens]."""
    from penstock import LLM, SamplingParams

    options: dict[str, Any] = {
        "kv_cache_memory_bytes": "256MiB",
        "max_num_seqs": _REQUESTS,
        "enable_prefix_caching": False,
    }
    with LLM(model, num_threads=threads, **options) as llm:
        print(flush=True)
        for line in sys.stdin:
            count, length = json.loads(line)
            prompts: Any = [[(7 * i + 3 * j) % 200 + 5 for j in range(_PROMPT)] for i in range(count)]
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            begin = time.perf_counter()
            llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            print(count * length / (time.perf_counter() - begin), flush=True)


class Engine:
    """Engine in a process of its own, which waits between its turns."""

    def __init__(self, model: str, threads: int, source: Path | None = None) -> None:
        command = [sys.executable, "-m", "benchmarks.shared_machine", "--model", model, "--engine", str(threads)]
        paths = [str(source / "src")] if source else []
        path = os.pathsep.join([*paths, *filter(None, sys.path)])
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        self._read()

    def rate(self, count: int, length: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([count, length]) + "\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("An engine has ended; its messages are above.")
        return line


class Peer:
    """Another engine, which is stopped between its turns. length: most tokens of a request."""

    def __init__(self, name: str, shape: str, work_dir: Path, threads: int, length: int) -> None:
        spec = ENGINES[name]
        if spec.environment is not None and (failure := failure_of(work_dir, spec.environment)) is not None:
            raise SystemExit(f"--peers {name} cannot run: {failure}")
        model = make(work_dir, SHAPES[shape], spec.model_format)
        num_tokens = _REQUESTS * (_PROMPT + length)
        self._process = EngineProcess(
            spec, model, work_dir, threads=threads, num_kv_tokens=num_tokens, num_kv_bytes=1 << 30
        )
        self._turns = 0
        for count in (1, _REQUESTS):
            self._run(count, 4)
        self._process.pause()

    def rate(self, count: int, length: int) -> float:
        self._process.resume_at_rest()
        rate = count * length / self._run(count, length)
        self._process.pause()
        return rate

    def close(self) -> None:
        self._process.close()

    def _run(self, count: int, length: int) -> float:
        # Other prompts each time: a prefix cache has none of them.
        self._turns += 1
        prompts = [[(7 * i + 3 * j + 11 * self._turns) % 200 + 5 for j in range(_PROMPT)] for i in range(count)]
        return float(self._process.run(prompts, [length] * count)["seconds"])


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run endless loops in processes of their own."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--lengths", type=int, nargs=2, default=(400, 60), help="tokens of one request, of each of 32")
    parser.add_argument("--seconds", type=float, default=2.0, help="shortest turn of an engine")
    parser.add_argument("--busy", type=int, nargs="*", default=(0, 1, 2))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without", type=Path, help="a checkout, for all threads always")
    parser.add_argument("--peers", nargs="+", default=[], choices=list(ENGINES), metavar="NAME", help="other engines")
    parser.add_argument("--work-dir", type=Path, help="of benchmarks.peers, for --peers")
    parser.add_argument("--output", type=Path, help="a folder for the table")
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        serve_rates(arguments.model, arguments.engine)
        return
    if arguments.peers and (arguments.model not in SHAPES or arguments.work_dir is None):
        parser.error(f"--peers needs --work-dir, and --model as one of {', '.join(SHAPES)}")
    # As Ctrl-C does: engines that are stopped while others run would else be left behind.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
    threads, model = len(os.sched_getaffinity(0)), arguments.model
    if arguments.peers:
        model = str(make(arguments.work_dir.resolve(), SHAPES[model], "bfloat16"))
    with contextlib.ExitStack() as stack:
        engines: dict[str, Engine | Peer] = {}
        for name in arguments.peers:
            peer = Peer(name, arguments.model, arguments.work_dir.resolve(), threads, max(arguments.lengths))
            engines[ENGINES[name].title] = stack.enter_context(contextlib.closing(peer))
        own = {"chosen": (threads, None), "1 thread": (1, None)}
        if arguments.without:
            own[f"{threads} threads"] = (threads, arguments.without)
        for name, (number, source) in own.items():
            engines[name] = stack.enter_context(contextlib.closing(Engine(model, number, source)))
        page = measure(engines, list(own), arguments)
    print(page)
    if arguments.output is not None:
        save(arguments.output, "shared-machine", page=page)


def measure(engines: dict[str, Engine | Peer], own: list[str], arguments: argparse.Namespace) -> str:
    """The table, in Markdown. own: names of Penstock's engines, the chosen number of threads first."""
    rows = [
        "# Speed on a shared machine, CPU",
        "",
        f"{described(machine(len(os.sched_getaffinity(0))))}, model {Path(arguments.model).name}",
        "",
        "| busy processes | requests | " + " | ".join(engines) + " | chosen to best fixed |",
        "| ---: | ---: |" + " ---: |" * (len(engines) + 1),
    ]
    for busy in arguments.busy:
        with busy_loops(busy):
            for count, length in zip((1, _REQUESTS), arguments.lengths, strict=True):
                turn = Turn(count, length, arguments.seconds)
                rows.append(f"| {busy} | {count} | " + _columns(engines, own, turn, arguments.rounds))
                print(rows[-1], flush=True)
    return "\n".join(rows) + "\n"


@dataclass(frozen=True)
class Turn:
    """An engine's turn: runs of `count` requests of `length` tokens, until they took `seconds` together."""

    count: int
    length: int
    seconds: float

    def rate(self, engine: Engine | Peer) -> float:
        """Tokens per second."""
        num_tokens, spent = 0, 0.0
        while spent < self.seconds:
            num_tokens += self.count * self.length
            spent += self.count * self.length / engine.rate(self.count, self.length)
        return num_tokens / spent


def _columns(engines: dict[str, Engine | Peer], own: list[str], turn: Turn, num_rounds: int) -> str:
    rounds = [{name: turn.rate(engine) for name, engine in engines.items()} for _ in range(num_rounds)]
    medians = [statistics.median(one[name] for one in rounds) for name in engines]
    ratios = [one[own[0]] / max(one[name] for name in own[1:]) for one in rounds]
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return " | ".join(f"{median:.0f}" for median in medians) + f" | {ratio} |"


if __name__ == "__main__":
    main()
