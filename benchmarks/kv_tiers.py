"""Blocks of the KV cache in a folder: time to the first token from there, and what saving costs.

    python -m benchmarks.kv_tiers [--parts first-token saving] [--shape qwen3-0.6b] [--tokens 4000] [--repeats 3]
        [--threads 2] [--work-dir FOLDER] [--peers FOLDER]

A model has random weights in bfloat16. A prompt's time to the first token is measured in turns: computed, found in
the folder by an engine that has not seen it, in the KV cache, and in host memory; every repeat has other tokens. The
folder's files may be in the system's page cache. Then 32 requests run with a folder and without, in turns, each turn
with other tokens; blocks that are not saved beside the steps are saved between the turns.

With --peers, the folder of `benchmarks.peers setup`: llama.cpp too, with its slot files.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.machine import described, machine
from benchmarks.peers.checkpoints import make
from benchmarks.peers.drivers.penstock import touch_kv_cache
from benchmarks.peers.environments import python_of, repository
from benchmarks.peers.shapes import SHAPES
from penstock import LLM, SamplingParams
from penstock.engine.statistics.metrics import Counter

_CACHE_BYTES = 2_000_000_000
_NUM_REQUESTS, _PROMPT, _OUTPUT = 32, 64, 64
_PARTS = ("first-token", "saving")
_SAVED = "kv_tier_saved_bytes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--tokens", type=int, default=4000, help="of the prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work-dir", type=Path, help="where checkpoint and blocks are kept; a temporary folder")
    parser.add_argument("--peers", type=Path, help="environments of benchmarks.peers, for llama.cpp's slot files")
    given = parser.parse_args()
    print(described(machine(given.threads)))
    with tempfile.TemporaryDirectory(dir=given.work_dir) as temporary:
        shape = SHAPES[given.shape]
        config = {**shape.config, "max_position_embeddings": 1 << 15}
        shape = replace(shape, name=f"{shape.name}-long", config=config)
        folder = make(given.work_dir or Path(temporary), shape, "bfloat16")

        def load(**options: Any) -> LLM:
            options |= {"num_threads": given.threads, "kv_cache_memory_bytes": _CACHE_BYTES}
            llm = LLM(str(folder), device="cpu", max_model_len=given.tokens + 64, **options)
            # As after hours of serving: a virtual machine clears pages slowly that nothing has used before.
            llm.collective_rpc(touch_kv_cache)
            return llm

        if "first-token" in given.parts:
            print(first_tokens(load, Path(temporary), shape.vocab_size, given.tokens, given.repeats))
        if given.peers is not None:
            model = make(given.peers, shape, "gguf-bf16") / "model.gguf"
            print(slot_files(given.peers, model, Path(temporary), given.tokens, given.repeats, given.threads))
        if "saving" in given.parts:
            print(cost_of_saving(load, Path(temporary), shape.vocab_size, given.repeats))


def first_tokens(load: Any, folder: Path, vocab_size: int, num_tokens: int, repeats: int) -> str:
    """Seconds to the first token of a prompt."""
    blocks = folder / "blocks"
    blocks.mkdir()
    writer, reader = load(kv_offload_dir=str(blocks)), load(kv_offload_dir=str(blocks), kv_offloading_size=4)
    seconds: dict[str, list[float]] = {"computed": [], "folder": [], "cache": [], "host": []}
    for draw in range(repeats):
        rng = random.Random(draw)
        prompt = [rng.randrange(10, vocab_size) for _ in range(num_tokens)]
        seconds["computed"].append(_seconds(writer, [prompt], 1))
        writer.save_prefix({"prompt_token_ids": prompt})
        seconds["folder"].append(_seconds(reader, [prompt], 1))
        seconds["cache"].append(_seconds(reader, [prompt], 1))
        # What came from the folder goes to host memory.
        reader.save_prefix({"prompt_token_ids": prompt})
        reader.reset_prefix_cache()
        seconds["host"].append(_seconds(reader, [prompt], 1))
    writer.close()
    reader.close()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return (
        f"first token of {num_tokens:,} tokens: computed {medians['computed']:.2f} s, from the folder "
        f"{medians['folder'] * 1e3:,.0f} ms, from host memory {medians['host'] * 1e3:,.0f} ms, "
        f"from the KV cache {medians['cache'] * 1e3:,.0f} ms: the folder is {_sooner(seconds, 'folder')}"
    )


def slot_files(work_dir: Path, model: Path, folder: Path, num_tokens: int, repeats: int, threads: int) -> str:
    """Seconds to the first token of a prompt in llama.cpp."""
    command = [python_of(work_dir, "llama-cpp"), "-m", "benchmarks.peers.drivers.llama_cpp_slots", model]
    numbers = [str(number) for number in (num_tokens, repeats, threads)]
    printed = subprocess.check_output([*command, *numbers, folder], cwd=repository(), stderr=subprocess.DEVNULL)
    seconds: dict[str, list[float]] = json.loads(printed.splitlines()[-1])
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return (
        f"llama.cpp, first token of {num_tokens:,} tokens: computed {medians['computed']:.2f} s, from its slot file "
        f"{medians['file'] * 1e3:,.0f} ms ({medians['bytes'] / 1e6:,.0f} MB, written in {medians['saving']:.1f} s): "
        f"{_sooner(seconds, 'file')}"
    )


def _sooner(seconds: Mapping[str, Sequence[float]], place: str) -> str:
    """How much sooner than by computing: median, least and most."""
    ratios = [computed / found for computed, found in zip(seconds["computed"], seconds[place], strict=True)]
    return f"{statistics.median(ratios):.1f} times sooner ({min(ratios):.1f} to {max(ratios):.1f})"


def cost_of_saving(load: Any, folder: Path, vocab_size: int, repeats: int) -> str:
    """Time of the same requests with a folder, which they fill, and without."""
    kept = folder / "saved"
    kept.mkdir()
    engines = {"with": load(kv_offload_dir=str(kept)), "without": load()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    shares, later_s = [], []
    for draw in range(repeats + 1):
        rng = random.Random(1000 + draw)
        prompts = [[rng.randrange(10, vocab_size) for _ in range(_PROMPT)] for _ in range(_NUM_REQUESTS)]
        # The first turn warms up.
        num_tokens = _OUTPUT if draw else 4
        for name, llm in engines.items():
            before = _saved_bytes(llm)
            seconds[name].append(_seconds(llm, prompts, num_tokens))
            if name == "with":
                beside = _saved_bytes(llm) - before
                begin = time.perf_counter()
                llm.save_prefix({"prompt_token_ids": prompts[0][:8]})
                later_s.append(time.perf_counter() - begin)
                shares.append(beside / (_saved_bytes(llm) - before))
            os.sync()
    for llm in engines.values():
        llm.close()
    ratios = [without / one for one, without in zip(*(values[1:] for values in seconds.values()), strict=True)]
    return (
        f"{_NUM_REQUESTS} requests of {_PROMPT} tokens with {_OUTPUT} of output, whose blocks are saved: "
        f"{statistics.median(ratios):.3f} of the throughput without ({min(ratios):.3f} to {max(ratios):.3f}), which is "
        f"{statistics.median(seconds['without'][1:]):.1f} s; {statistics.median(shares[1:]):.0%} of the bytes beside "
        f"the steps, the rest in {statistics.median(later_s[1:]):.1f} s afterwards"
    )


def _saved_bytes(llm: LLM) -> float:
    return sum(one.value for one in llm.get_metrics() if isinstance(one, Counter) and _SAVED in one.name)


def _seconds(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
