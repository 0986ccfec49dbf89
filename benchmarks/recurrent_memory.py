"""Memory of recurrent layers' states over long contexts, beside attention in all layers.

    python -m benchmarks.recurrent_memory [--context 131072] [--requests 64] [--tokens 32768] [--threads 2]

Small random models of one family, Granite 4's, whose layers are all of Mamba 2, one in four of attention, or all of
attention. The first reads one prompt of the whole context, part by part. The others run many requests with long
prompts at once. Each runs in a process of its own, whose resident memory is compared with what
it was before the first request. No snapshots are kept beside the running states of many requests.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from benchmarks.machine import described, machine
from benchmarks.peers.hybrids import GRANITE_350M
from penstock import LLM, SamplingParams

_MIB = 1 << 20
_STATES, _ATTENTION = "mamba", "attention"
_KINDS = {
    "states": [_STATES] * 4,
    "hybrid": [_STATES] * 3 + [_ATTENTION],
    "attention": [_ATTENTION] * 4,
}
_VOCABULARY = 256
_CONFIG = {
    **GRANITE_350M.config,
    "vocab_size": _VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "shared_intermediate_size": 256,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=131_072, help="of the one request, in tokens")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32_768, help="of each of many requests")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kind", choices=list(_KINDS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.kind:
        _measure(given.kind, given.requests, given.tokens, given.threads)
        return
    print(described(machine(given.threads)))
    sizes = {"states": (1, given.context), "hybrid": (given.requests, given.tokens)}
    for kind, (num_requests, num_tokens) in (sizes | {"attention": sizes["hybrid"]}).items():
        options = {"kind": kind, "requests": num_requests, "tokens": num_tokens, "threads": given.threads}
        command = [sys.executable, "-m", __spec__.name, *(f"--{name}={value}" for name, value in options.items())]
        print(f"{kind}, {num_requests} x {num_tokens:,} tokens:")
        subprocess.run(command, check=True)


def _measure(kind: str, num_requests: int, num_tokens: int, num_threads: int) -> None:
    """Run requests of one model in this process, and print by how much its resident memory grows."""
    layers = _KINDS[kind]
    generator = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        config = {**_CONFIG, "layer_types": layers, "max_position_embeddings": num_tokens + 16}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        # Keys and values of a token: 32 channels of each in bfloat16, in every layer of attention.
        size = 128 * _MIB + num_requests * num_tokens * 2 * 32 * 2 * layers.count(_ATTENTION)
        with LLM(
            folder,
            tokenizer="demo",
            load_format="dummy",
            kv_cache_dtype="bfloat16",
            kv_cache_memory_bytes=size,
            max_num_seqs=num_requests,
            enable_prefix_caching=num_requests == 1,
            num_threads=num_threads,
        ) as llm:
            llm.generate([0] * 2048, SamplingParams(max_tokens=2, seed=0), use_tqdm=False)
            prompts = [[generator.randrange(_VOCABULARY) for _ in range(num_tokens)] for _ in range(num_requests)]
            before = psutil.Process().memory_info().rss
            parts = range(num_tokens // 8, num_tokens + 1, num_tokens // 8) if num_requests == 1 else [num_tokens]
            for end in parts:
                llm.generate([prompt[:end] for prompt in prompts], SamplingParams(max_tokens=2, seed=0), use_tqdm=False)
                print(
                    f"  {end:,} tokens each: {(psutil.Process().memory_info().rss - before) / _MIB:,.0f} MiB more",
                    flush=True,
                )


if __name__ == "__main__":
    main()
