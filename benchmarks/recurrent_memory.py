"""Memory of recurrent layers' states over long contexts, beside attention in all layers.

    python -m benchmarks.recurrent_memory [--context 131072] [--requests 64] [--tokens 32768] [--threads 2]

Small random models of one family, Granite 4's, whose layers are all of Mamba 2, one in four of attention, or all of
attention. The first reads one prompt of the whole context, part by part. The others run many requests with long
prompts at once, in a KV cache of the size that they need; the run fails if one is preempted. Each runs in a process of
its own. Printed is by how much its resident memory has grown since before the engine was made.
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
from penstock.engine.statistics.metrics import Counter

_MIB = 1 << 20
_PREEMPTIONS = "penstock:num_preemptions"
_STATES, _ATTENTION = "mamba", "attention"
_KINDS = {
    "states": [_STATES] * 4,
    "hybrid": [_STATES] * 3 + [_ATTENTION],
    "attention": [_ATTENTION] * 4,
}
_VOCABULARY = 256
# Channels of a token's keys; heads of a state, their values and keys.
_KEYS, _HEADS, _HEAD_SIZE, _STATE_SIZE = 32, 8, 32, 64
_CONFIG = {
    **GRANITE_350M.config,
    "vocab_size": _VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": _KEYS,
    "shared_intermediate_size": 256,
    "mamba_n_heads": _HEADS,
    "mamba_d_head": _HEAD_SIZE,
    "mamba_d_state": _STATE_SIZE,
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
        prompts = [[generator.randrange(_VOCABULARY) for _ in range(num_tokens)] for _ in range(num_requests)]
        before = psutil.Process().memory_info().rss
        with LLM(
            folder,
            tokenizer="demo",
            load_format="dummy",
            kv_cache_dtype="bfloat16",
            kv_cache_memory_bytes=_needed_bytes(layers, num_requests, num_tokens),
            max_num_seqs=num_requests,
            enable_prefix_caching=num_requests == 1,
            num_threads=num_threads,
        ) as llm:
            parts = range(num_tokens // 8, num_tokens + 1, num_tokens // 8) if num_requests == 1 else [num_tokens]
            for end in parts:
                llm.generate([prompt[:end] for prompt in prompts], SamplingParams(max_tokens=2, seed=0), use_tqdm=False)
                grown = psutil.Process().memory_info().rss - before
                print(f"  {end:,} tokens each: {grown / _MIB:,.0f} MiB", flush=True)
            counters = {one.name: one.value for one in llm.get_metrics() if isinstance(one, Counter)}
            if preemptions := counters[_PREEMPTIONS]:
                sys.exit(f"{preemptions} preemptions: the KV cache was too small for all requests at once.")


def _needed_bytes(layers: list[str], num_requests: int, num_tokens: int) -> int:
    """Bytes of keys, values and states, with a part more for blocks that are not full."""
    token = 2 * 2 * _KEYS * layers.count(_ATTENTION)  # bfloat16
    channels = _HEADS * _HEAD_SIZE
    state = 4 * (channels * _STATE_SIZE + 3 * (channels + 2 * _STATE_SIZE)) * layers.count(_STATES)
    return 16 * _MIB + int(1.02 * num_requests * (num_tokens * token + state))


if __name__ == "__main__":
    main()
