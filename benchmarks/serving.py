"""Server beside the offline engine, on the same requests and in turns.

    python -m benchmarks.serving [--model FOLDER] [--rounds 5] [--threads 2] [--streams 1000] [--output FOLDER]

Throughput: the workload "throughput", some draws of it, in a closed loop of 32; streamed and whole. Time to first
token: one request at a time. Memory: of all processes of the server, before, during and after many streams at once. The
exit code is 1 if a target is missed. The model is a random-weight Llama of 60 million parameters.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import described, machine, save
from benchmarks.peers.checkpoints import make
from benchmarks.peers.shapes import SHAPES
from benchmarks.server_process import ServerProcess, Usage, quiet_environment, serve_command
from benchmarks.workloads import make_workloads
from penstock.bench.serving.api import BACKENDS, RequestBodies
from penstock.bench.serving.datasets import SampleRequest
from penstock.bench.serving.http import HttpClient, raise_descriptor_limit
from penstock.bench.serving.load import PreparedRequest, run_load
from penstock.bench.serving.outcome import Outcome, Status
from penstock.bench.serving.results import failures
from penstock.bench.serving.settings import LoadSettings

CONCURRENCY = 32
_DRAWS_PER_RUN = 4
_TTFT_PROMPT, _TTFT_OUTPUT, _TTFT_REQUESTS = 32, 4, 20
_STREAM_PROMPT, _STREAM_OUTPUT = 32, 32
_SAMPLE_S = 0.25
_ENGINE: dict[str, Any] = {"max_num_seqs": CONCURRENCY, "kv_cache_memory_bytes": "512MiB"}


@dataclass(frozen=True)
class Figure:
    """A figure of the table. target: in words; is_met: None without a target."""

    name: str
    value: str
    target: str = ""
    is_met: bool | None = None


class OfflineEngine:
    """Offline engine in a process of its own, which waits between runs."""

    def __init__(self, model: str, threads: int) -> None:
        command = [sys.executable, "-m", "benchmarks.serving", "--offline", "--model", model, "--threads", str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def run(self, requests: Sequence[SampleRequest]) -> dict[str, Any]:
        """Seconds for all requests at once, tokens that were generated, and seconds to each first token."""
        assert self._process.stdin is not None
        lines = [[request.prompt, request.output_len] for request in requests]
        self._process.stdin.write(json.dumps(lines) + "\n")
        self._process.stdin.flush()
        result: dict[str, Any] = self._read()
        return result

    def close(self) -> None:
        self._process.communicate()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("The offline engine has ended; its messages are above.")
        return json.loads(line)


def run_offline(model: str, threads: int) -> None:
    """Offline engine: print a line when it is ready, then one of JSON for each line of requests."""
    from penstock import LLM, SamplingParams

    with LLM(model, num_threads=threads, **_ENGINE) as llm:
        print("{}", flush=True)
        for line in sys.stdin:
            requests = json.loads(line)
            params = [
                SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True) for _, output_len in requests
            ]
            begin = time.perf_counter()
            outputs = llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
            seconds = time.perf_counter() - begin
            ttfts = [output.metrics.time_to_first_token_s for output in outputs]
            num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            print(json.dumps({"seconds": seconds, "num_tokens": num_tokens, "ttfts": ttfts}), flush=True)


class Client:
    """Client of a server of completions, for one model."""

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = model

    def run(
        self,
        requests: Sequence[SampleRequest],
        *,
        streams: bool,
        concurrency: int,
        meanwhile: Callable[[], object] = int,
    ) -> list[Outcome]:
        """Outcomes of requests in a closed loop. meanwhile: called every quarter of a second."""
        return asyncio.run(self._run(requests, streams, concurrency, meanwhile))

    async def _run(
        self, requests: Sequence[SampleRequest], streams: bool, concurrency: int, meanwhile: Callable[[], object]
    ) -> list[Outcome]:
        extra: dict[str, Any] = {"ignore_eos": True, "stream": streams}
        bodies = RequestBodies(BACKENDS["openai"], self._model, extra, _no_tokenizer, seed=0)
        client = HttpClient(self._url, {}, time.perf_counter)
        prepared = [
            PreparedRequest(client.message("POST", "/v1/completions", bodies.make(request)[0]), request.prompt_len)
            for request in requests
        ]
        settings = LoadSettings(max_concurrency=concurrency)
        watch = asyncio.create_task(_repeat(meanwhile))
        try:
            arrivals = settings.arrivals(len(prepared))
            return await run_load(client, prepared, arrivals, settings, time.perf_counter, lambda: None)
        finally:
            watch.cancel()
            client.close()


async def _repeat(call: Callable[[], object]) -> None:
    while True:
        await asyncio.sleep(_SAMPLE_S)
        call()


def _no_tokenizer() -> Any:
    raise AssertionError("prompts of this benchmark are token ids")


class Requests:
    """Requests of each run, with tokens that no cache of prefixes has seen."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_draws = 0

    def throughput(self) -> list[SampleRequest]:
        """Requests of some draws of the workload "throughput"."""
        return [
            SampleRequest(prompt, len(prompt), output_len)
            for _ in range(_DRAWS_PER_RUN)
            for prompt, output_len in zip(*self._draw("throughput"), strict=True)
        ]

    def equal(self, count: int, prompt_len: int, output_len: int) -> list[SampleRequest]:
        """Requests of equal lengths."""
        prompts: list[list[int]] = []
        while len(prompts) < count:
            prompts += [prompt[:prompt_len] for prompt in self._draw("prefill")[0]]
        return [SampleRequest(prompt, prompt_len, output_len) for prompt in prompts[:count]]

    def _draw(self, name: str) -> tuple[list[list[int]], list[int]]:
        self._num_draws += 1
        workloads = make_workloads(vocab_size=self._vocab_size, draw=self._num_draws)
        (workload,) = (workload for workload in workloads if workload.name == name)
        return workload.prompts, workload.num_outputs


def tokens_per_s(outcomes: Sequence[Outcome]) -> float:
    """Output tokens per second. Raises SystemExit if a request failed."""
    check_all_completed(outcomes)
    seconds = max(outcome.end for outcome in outcomes) - min(outcome.start for outcome in outcomes)
    return sum(outcome.output_len for outcome in outcomes) / seconds


def check_all_completed(outcomes: Sequence[Outcome]) -> None:
    """Raises SystemExit with the causes if a request failed."""
    if any(outcome.status is not Status.COMPLETED for outcome in outcomes):
        raise SystemExit(f"Requests of the benchmark failed: {failures(outcomes)}")


def measure_throughput(client: Client, offline: OfflineEngine, requests: Requests, num_rounds: int) -> list[Figure]:
    """Compare throughputs in turns; a first turn warms up."""
    ratios: dict[bool, list[float]] = {True: [], False: []}
    speeds: list[float] = []
    for number in range(num_rounds + 1):
        done = offline.run(requests.throughput())
        speed = done["num_tokens"] / done["seconds"]
        found = {
            streams: tokens_per_s(client.run(requests.throughput(), streams=streams, concurrency=CONCURRENCY))
            for streams in ((True, False) if number % 2 else (False, True))
        }
        if number:
            speeds.append(speed)
            for streams, theirs in found.items():
                ratios[streams].append(theirs / speed)
    return [
        Figure("offline engine", f"{statistics.median(speeds):.0f} tok/s"),
        _ratio("server, streamed", ratios[True], 0.85),
        _ratio("server, whole responses", ratios[False], 0.95),
    ]


def _ratio(name: str, ratios: Sequence[float], target: float) -> Figure:
    median = statistics.median(ratios)
    value = f"{median:.3f} of the offline engine ({min(ratios):.3f} to {max(ratios):.3f})"
    return Figure(name, value, f"at least {target}", median >= target)


def measure_first_token(client: Client, offline: OfflineEngine, requests: Requests, num_rounds: int) -> list[Figure]:
    """Compare the time to first token of single requests, in turns."""
    here: list[float] = []
    there: list[float] = []
    for number in range(num_rounds + 1):
        theirs = [
            offline.run([request])["ttfts"][0] for request in requests.equal(_TTFT_REQUESTS, _TTFT_PROMPT, _TTFT_OUTPUT)
        ]
        single = requests.equal(_TTFT_REQUESTS, _TTFT_PROMPT, _TTFT_OUTPUT)
        outcomes = client.run(single, streams=True, concurrency=1)
        check_all_completed(outcomes)
        if number:
            here += theirs
            there += [outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None]
    more_ms = 1e3 * (statistics.median(there) - statistics.median(here))
    return [
        Figure("idle time to first token, offline engine", f"{1e3 * statistics.median(here):.2f} ms"),
        Figure("idle time to first token, server", f"{more_ms:+.2f} ms", "at most +3 ms", more_ms <= 3.0),
    ]


def measure_streams(client: Client, server: ServerProcess, requests: Requests, num_streams: int) -> list[Figure]:
    """Memory of a server with many streams at once, and how many of them fail."""
    streams = requests.equal(num_streams, _STREAM_PROMPT, _STREAM_OUTPUT)
    before = server.usage()
    during: list[Usage] = [before]
    outcomes = client.run(
        streams, streams=True, concurrency=num_streams, meanwhile=lambda: during.append(server.usage())
    )
    time.sleep(1.0)
    after = server.usage()
    most = max(usage.memory_bytes for usage in [*during, after])
    num_failed = sum(outcome.status is not Status.COMPLETED for outcome in outcomes)
    return [
        Figure(
            f"{num_streams:,} streams at once",
            f"{num_failed} failed {failures(outcomes) or ''}".strip(),
            "none",
            not num_failed,
        ),
        Figure("memory before", _mib(before.memory_bytes)),
        Figure(
            "memory at most", f"{_mib(most)} ({(most - before.memory_bytes) / num_streams / 1024:.1f} KiB per stream)"
        ),
        Figure("memory after", f"{_mib(after.memory_bytes)} ({after.memory_bytes / before.memory_bytes - 1:+.1%})"),
        Figure("descriptors before, after", f"{before.num_descriptors}, {after.num_descriptors}"),
        Figure("threads before, after", f"{before.num_threads}, {after.num_threads}"),
    ]


def _mib(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"


def as_markdown(figures: Sequence[Figure], facts: dict[str, Any]) -> str:
    """Page with a table of the figures."""
    lines = [
        "# Server beside the offline engine, CPU",
        "",
        described(facts),
        "",
        "| | | target | |",
        "| --- | --- | --- | --- |",
    ]
    outcomes = {None: "", True: "met", False: "missed"}
    lines += [f"| {one.name} | {one.value} | {one.target} | {outcomes[one.is_met]} |" for one in figures]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; a random-weight Llama is made by default")
    parser.add_argument("--vocab-size", type=int, default=SHAPES["llama-60m"].vocab_size, help="of the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--option", nargs="*", default=[], help="more flags of the server, without their dashes")
    parser.add_argument("--output", type=Path, help="a folder for the table")
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    quiet_environment()
    if arguments.offline:
        run_offline(arguments.model, arguments.threads)
        return
    raise_descriptor_limit()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or str(make(Path(folder), SHAPES["llama-60m"], "float32"))
        figures = _measure(model, arguments, Path(folder) / "server.log")
    page = as_markdown(figures, machine(arguments.threads))
    print(page)
    if arguments.output is not None:
        save(arguments.output, "serving", page=page)
    if any(figure.is_met is False for figure in figures):
        sys.exit(1)


def _measure(model: str, arguments: argparse.Namespace, log: Path) -> list[Figure]:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in _ENGINE.items()]
    more = [f"--{option}" for option in arguments.option]
    command = serve_command(model, f"--threads={arguments.threads}", "--served-model-name=measured", *options, *more)
    requests = Requests(arguments.vocab_size)
    with ServerProcess(command, log) as server:
        client = Client(server.url, "measured")
        offline = OfflineEngine(model, arguments.threads)
        figures = measure_throughput(client, offline, requests, arguments.rounds)
        figures += measure_first_token(client, offline, requests, arguments.rounds)
        offline.close()
        return figures + measure_streams(client, server, requests, arguments.streams)


if __name__ == "__main__":
    main()
