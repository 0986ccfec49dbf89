"""Many short texts embedded in one call, with tokenisation beside the steps and before them, in turns.

    python -m benchmarks.tokenising_ahead [--texts 2000] [--layers 6] [--hidden 384] [--repeats 5] [--threads N]

Prints the seconds of both, the wait for the first step, and the seconds of tokenisation alone.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path

import torch

from benchmarks.embedding_model import VOCAB_SIZE, make_model
from benchmarks.machine import described, machine
from penstock import LLM, PoolingParams
from penstock.engine.inputs.input_processor import PooledPrompt

BEFORE, BESIDE = "tokenised before", "tokenised beside"


def measure(model: Path, texts: list[str], repeats: int, threads: int) -> None:
    seconds: dict[str, list[float]] = {BEFORE: [], BESIDE: [], "tokenising": []}
    waits: dict[str, list[float]] = {BEFORE: [], BESIDE: []}
    items = [PooledPrompt(text, PoolingParams(task="embed")) for text in texts]
    with LLM(model, num_threads=threads, dtype="float32") as llm:
        session, step = llm._session, llm._session._dispatcher.step
        first_step: list[float] = []

        def noted_step() -> None:
            first_step.append(time.perf_counter())
            step()

        session._dispatcher.step = noted_step  # type: ignore[method-assign]
        llm.embed(texts, use_tqdm=False)
        for repeat in range(repeats):
            # Neither always comes first.
            for name in (BEFORE, BESIDE) if repeat % 2 else (BESIDE, BEFORE):
                first_step.clear()
                start = time.perf_counter()
                if name == BESIDE:
                    with session.accept_pooled(items) as requests, closing(session.run(requests)) as steps:
                        _ = [progress.output().pooled for progress in steps if progress.finished]
                else:
                    accepted = session._input_processor.process_pooled(items)
                    seconds["tokenising"].append(time.perf_counter() - start)
                    with closing(session.run(accepted)) as steps:
                        _ = [progress.output().pooled for progress in steps if progress.finished]
                seconds[name].append(time.perf_counter() - start)
                waits[name].append(first_step[0] - start)
    for name, taken in seconds.items():
        wait = f"  first step after {1000 * statistics.median(waits[name]):.1f} ms" if name in waits else ""
        print(f"{name:18} {statistics.median(taken):7.3f} s ({min(taken):.3f} to {max(taken):.3f}){wait}")
    ratios = [one / other for one, other in zip(seconds[BEFORE], seconds[BESIDE], strict=True)]
    print(f"before / beside: {statistics.median(ratios):.3f} x ({min(ratios):.3f} to {max(ratios):.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("texts", 2000), ("layers", 6), ("hidden", 384), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    draw = random.Random(1)
    texts = [
        " ".join(f"w{draw.randrange(10, VOCAB_SIZE)}" for _ in range(draw.randrange(4, 12))) for _ in range(args.texts)
    ]
    print(described(machine(args.threads)))
    with tempfile.TemporaryDirectory() as folder:
        measure(make_model(Path(folder) / "model", args.layers, args.hidden), texts, args.repeats, args.threads)


if __name__ == "__main__":
    main()
