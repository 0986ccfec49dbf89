"""llama.cpp's slot files: time to the first token of a prompt computed, and with its sequence read from a file.

Arguments: model, number of tokens, repeats, threads, folder of the files. Prints JSON.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

from benchmarks.peers.drivers.llama_cpp_batches import LlamaCpp


def main() -> None:
    model, num_tokens, repeats, threads = sys.argv[1], *map(int, sys.argv[2:5])
    writer, reader = (LlamaCpp(model, threads, num_tokens + 64, 0, max_sequences=1) for _ in range(2))
    found: dict[str, list[float]] = {"computed": [], "saving": [], "file": [], "bytes": []}
    for draw in range(repeats):
        rng = random.Random(draw)
        prompt = [rng.randrange(10, writer.num_vocab) for _ in range(num_tokens)]
        path = Path(sys.argv[5]) / f"{draw}.slot"
        begin = time.perf_counter()
        writer.compute(prompt, 0)
        found["computed"].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        writer.save(path, prompt)
        found["saving"].append(time.perf_counter() - begin)
        found["bytes"].append(path.stat().st_size)
        begin = time.perf_counter()
        reader.restore(path, num_tokens)
        reader.compute(prompt, num_tokens - 1)
        found["file"].append(time.perf_counter() - begin)
        path.unlink()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
