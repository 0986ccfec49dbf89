"""Servers beside each other: the same load of `penstock bench serve` on each, in turns.

    python -m benchmarks.servers --server penstock=http://127.0.0.1:8000 --server vllm=http://127.0.0.1:8001

Start the servers first, on the same model and number of threads. Loads: 32 requests at once, and one at a time. Medians
over the rounds, their spread, and ratios to the first server within each round. Only the server under load works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LOADS = {
    "32 at once": ["--num-prompts", "64", "--max-concurrency", "32", "--input-len", "128", "--output-len", "96"],
    "one at a time": ["--num-prompts", "12", "--max-concurrency", "1", "--input-len", "64", "--output-len", "48"],
}
# Names of the result file, whether more is better, and the unit.
METRICS = {
    "output_throughput": (True, "tokens/s"),
    "median_ttft_ms": (False, "ms to the first token"),
    "median_itl_ms": (False, "ms between tokens"),
    "p99_itl_ms": (False, "ms between tokens, 99th percentile"),
}


def measure(url: str, load: list[str], tokenizer: str, seed: int) -> dict[str, Any]:
    """Result of one run. Raises RuntimeError when a request fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "penstock", "bench", "serve", "--base-url", url, "--tokenizer", tokenizer]
        options = ["--ignore-eos", "--seed", str(seed), "--disable-tqdm", "--num-warmups", "2"]
        saved = ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
        done = subprocess.run([*command, *load, *options, *saved], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{url}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        result: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
    if result["completed"] != result["num_prompts"]:
        raise RuntimeError(f"{url} has completed {result['completed']} of {result['num_prompts']} requests")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", required=True, metavar="NAME=URL")
    parser.add_argument("--tokenizer", default="demo")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    servers = dict(server.split("=", 1) for server in arguments.server)
    print("| load | figure | " + " | ".join(servers) + " | ratio (spread) |")
    print("| --- | --- |" + " ---: |" * (len(servers) + 1))
    for name, load in LOADS.items():
        rounds = [
            {server: measure(url, load, arguments.tokenizer, seed) for server, url in servers.items()}
            for seed in range(arguments.rounds)
        ]
        for metric, (is_more_better, unit) in METRICS.items():
            medians = [statistics.median(one[server][metric] for one in rounds) for server in servers]
            first, *others = servers
            # Above 1, the first server is better.
            ratios = [
                one[first][metric] / one[other][metric] if is_more_better else one[other][metric] / one[first][metric]
                for one in rounds
                for other in others
            ]
            spread = f"{statistics.median(ratios):.2f} × ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
            print(f"| {name} | {unit} | " + " | ".join(f"{value:.1f}" for value in medians) + f" | {spread} |")


if __name__ == "__main__":
    main()
