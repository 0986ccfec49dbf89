"""Server with and without an open live view, in turns on the same server.

    python -m benchmarks.live_view [--model FOLDER] [--rounds 7] [--threads 2] [--output FOLDER]

Each turn generates 128 tokens of each of 32 prompts at once. The view polls `/live` twice a second, as the page does,
so that the core records its steps. The exit code is 1 if the median of the rounds' ratios is below 0.99. The model is
a random-weight Llama of 60 million parameters.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.machine import described, machine, save
from benchmarks.peers.checkpoints import make
from benchmarks.peers.shapes import SHAPES
from benchmarks.server_process import ServerProcess, quiet_environment, serve_command
from benchmarks.serving import CONCURRENCY, Client, Requests, tokens_per_s

_PROMPT, _OUTPUT = 32, 128
_POLL_S = 0.5
# A core goes on recording for three seconds after the last poll.
_FORGOTTEN_S = 3.3
_TARGET = 0.99


@contextlib.contextmanager
def open_view(url: str) -> Iterator[list[int]]:
    """Poll `/live` meanwhile. Gives the number of steps of each answer."""
    has_ended, numbers, last = threading.Event(), list[int](), [0.0]

    def poll() -> None:
        with urllib.request.urlopen(f"{url}/live?after={last[0]!r}", timeout=30) as response:
            steps = json.load(response)["steps"]
        numbers.append(len(steps))
        last[0] = steps[-1]["ended_at"] if steps else last[0]

    def run() -> None:
        while not has_ended.wait(_POLL_S):
            poll()

    poll()
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield numbers
    finally:
        has_ended.set()
        thread.join()


class Turn(NamedTuple):
    """Figures of one turn. processor_s: of all processes of the server."""

    tokens_per_s: float
    processor_s: float


def measure(server: ServerProcess, client: Client, requests: Requests, num_rounds: int) -> list[tuple[Turn, Turn]]:
    """Turns without and with a view, by round; the order changes from round to round."""

    def plain() -> Turn:
        prompts = requests.equal(CONCURRENCY, _PROMPT, _OUTPUT)
        before = server.usage().processor_s
        speed = tokens_per_s(client.run(prompts, streams=True, concurrency=CONCURRENCY))
        return Turn(speed, server.usage().processor_s - before)

    def with_view() -> Turn:
        with open_view(server.url) as numbers:
            found = plain()
        if not any(numbers):
            raise SystemExit("The core has recorded no steps.")
        time.sleep(_FORGOTTEN_S)
        return found

    plain()
    rounds = []
    for number in range(num_rounds):
        if number % 2:
            rounds.append((plain(), with_view()))
        else:
            viewed = with_view()
            rounds.append((plain(), viewed))
    return rounds


def speed_ratio(rounds: list[tuple[Turn, Turn]]) -> float:
    """Median over the rounds of the throughput with a view, as a multiple of that without."""
    return statistics.median(viewed.tokens_per_s / plain.tokens_per_s for plain, viewed in rounds)


def report(rounds: list[tuple[Turn, Turn]], threads: int) -> str:
    columns = {"no view": [plain for plain, _ in rounds], "an open view": [viewed for _, viewed in rounds]}
    ratios = [[viewed[part] / plain[part] for plain, viewed in rounds] for part in range(2)]
    lines = [
        "# Cost of an open live view",
        "",
        described(machine(threads)),
        "",
        f"{CONCURRENCY} requests at once, {_PROMPT} tokens in, {_OUTPUT} out, Llama of 60M; {len(rounds)} rounds.",
        "",
        "| median (range) | output tokens per second | processor seconds of the server in a turn |",
        "| --- | --- | --- |",
    ]
    for name, turns in columns.items():
        speeds, seconds = zip(*turns, strict=True)
        lines.append(f"| {name} | {_summary(speeds, ',.0f')} | {_summary(seconds, '.2f')} |")
    lines.append(f"| ratio within a round | {_summary(ratios[0], '.3f')} | {_summary(ratios[1], '.3f')} |")
    return "\n".join(lines) + "\n"


def _summary(values: Sequence[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder; a random-weight Llama is made by default")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    quiet_environment()
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or make(Path(folder), SHAPES["llama-60m"], "float32")
        options = ("--max-num-seqs", str(CONCURRENCY), "--kv-cache-memory-bytes", "512MiB")
        command = serve_command(str(model), *options, "--threads", str(given.threads), "--served-model-name", "model")
        with ServerProcess(command, Path(folder) / "log") as server:
            vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
            rounds = measure(server, Client(server.url, "model"), Requests(vocab_size), given.rounds)
    text = report(rounds, given.threads)
    print(text)
    if given.output is not None:
        save(given.output, "server-live-view", page=text)
    return int(speed_ratio(rounds) < _TARGET)


if __name__ == "__main__":
    raise SystemExit(main())
