"""Native mixtures of experts beside the same model through Transformers: tokens per second, in turns.

    python -m benchmarks.mixtures [--layers 6] [--experts 32] [--rounds 3] [--threads 2] [--quantization int8]

A Qwen3-MoE of random weights in bfloat16: hidden 1,024, experts of 384 features, 8 per token.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import described, machine
from penstock import LLM, SamplingParams
from penstock.checkpoints.resolve import resolve_model_folder

LOADS = {"one request": (1, 16, 32), "32 requests": (32, 16, 16), "prefill": (4, 512, 1)}


def make_checkpoint(folder: Path, layers: int, experts: int) -> None:
    """Write the configuration; weights are random (`load_format="dummy"`)."""
    from transformers import Qwen3MoeConfig

    Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=8192,
        hidden_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        moe_intermediate_size=384,
        num_experts=experts,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        dtype="bfloat16",
    ).save_pretrained(folder)


def rate(llm: LLM, count: int, prompt: int, length: int, seed: int) -> float:
    """Tokens per second: of outputs, or of prompts where one token is generated."""
    prompts: Any = [
        {"prompt_token_ids": [(7919 * (seed + 1) * (i + 1) + 31 * j) % 8000 for j in range(prompt)]}
        for i in range(count)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return count * (length if length > 1 else prompt) / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quantization")
    arguments = parser.parse_args()
    options: dict[str, Any] = {
        "load_format": "dummy",
        "tokenizer": str(resolve_model_folder("demo")),
        "num_threads": arguments.threads,
        "kv_cache_memory_bytes": "512MiB",
        "max_num_seqs": 32,
        "max_model_len": 1024,
        "enable_prefix_caching": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), arguments.layers, arguments.experts)
        engines = {
            "native": LLM(folder, quantization=arguments.quantization, **options),
            "Transformers": LLM(folder, model_impl="transformers", **options),
        }
    print(described(machine(arguments.threads)))
    for name, load in LOADS.items():
        rounds = [
            {engine: rate(llm, *load, seed) for engine, llm in engines.items()} for seed in range(arguments.rounds + 1)
        ][1:]
        medians = {engine: statistics.median(one[engine] for one in rounds) for engine in engines}
        ratios = [one["native"] / one["Transformers"] for one in rounds]
        shown = ", ".join(f"{engine} {median:.0f} tok/s" for engine, median in medians.items())
        print(
            f"{name}: {shown}, {statistics.median(ratios):.2f} × ({min(ratios):.2f} to {max(ratios):.2f})", flush=True
        )
    for llm in engines.values():
        llm.shutdown()


if __name__ == "__main__":
    main()
