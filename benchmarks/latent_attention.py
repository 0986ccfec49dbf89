"""Decoding of a DeepSeek-V2-Lite cut in layers, over a long context: beside the memory bound, and beside Transformers.

    python -m benchmarks.latent_attention [--layers 3] [--context 8192] [--threads 2] [--repeats 5] [--dense]
        [--transformers]

One request, random weights in bfloat16, a KV cache of random numbers. A step must read the weights of the layers, of
the active experts and of the LM head, and the latents; the bound is that at the speed of plain reading, in turns.
The first layer has an MLP, the others experts; with --dense all have an MLP, which reads about as much.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.ceilings import Ceilings
from benchmarks.long_context import Turns, decodes, fill
from benchmarks.machine import described, machine
from penstock.attention import NO_CONTEXT
from penstock.config import EngineConfig
from penstock.contract import RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.layers.experts import Experts
from penstock.layers.linear import weights_size_bytes
from penstock.models.interface import ModelInputs

_BLOCK_SIZE = 16
_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "dtype": "bfloat16",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--kv-cache-dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dense", action="store_true", help="no experts")
    parser.add_argument("--transformers", action="store_true", help="measure the model in Transformers too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(described(machine(arguments.threads)))
    from transformers import DeepseekV2Config

    config = DeepseekV2Config(
        **_CONFIG,
        num_hidden_layers=arguments.layers,
        max_position_embeddings=arguments.context,
        first_k_dense_replace=arguments.layers if arguments.dense else 1,
    )
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        config.save_pretrained(folder)
        clock = Turns(Ceilings(Path(folder), arguments.threads), arguments.repeats)
        step_s = measure_step(clock, folder, arguments)
        if arguments.transformers:
            theirs_s = measure_transformers(config, arguments.context)
            print(f"Transformers: {theirs_s * 1e3:.1f} ms, {theirs_s / step_s:.1f} times as long")


def measure_step(clock: Turns, folder: str, arguments: argparse.Namespace) -> float:
    """Time decode steps of one request, and print them beside the bound; returns the median seconds."""
    num_blocks = -(-arguments.context // _BLOCK_SIZE) + 1
    options: dict[str, Any] = {"load_format": "dummy", "kv_cache_dtype": arguments.kv_cache_dtype, "device": "cpu"}
    options |= {"block_size": _BLOCK_SIZE, "num_threads": arguments.threads, "kv_cache_memory_bytes": "256MiB"}
    core = EngineCore(EngineConfig.create(folder, **options))
    (runner,) = core.collective_rpc(RpcCall(lambda worker: worker.runner))
    cache, model = runner.kv_cache, runner.model
    for name in cache.config.groups[0].layer_names:
        fill(cache.layer_memory(name)[:, :num_blocks])
    geometry = decodes(1, arguments.context)
    inputs = ModelInputs(torch.zeros(1, dtype=torch.int32), torch.full((1,), arguments.context - 1))

    def run() -> None:
        context = cache.make_context(SimpleNamespace(sequences=geometry, geometry=[geometry]))
        model.compute_logits(runner.execution.programs.run(model, inputs, context), NO_CONTEXT)

    seconds, speed = clock.time(run)
    latents = arguments.context * cache.config.size_bytes // cache.config.pools[0].num_blocks // _BLOCK_SIZE
    num_bytes = active_bytes(model) + latents
    core.close()
    bound = num_bytes / speed
    print(
        f"decode at {arguments.context:,}: {seconds * 1e3:.2f} ms, bound {bound * 1e3:.2f} ms ({bound / seconds:.0%}): "
        f"{num_bytes / 1e6:.0f} MB at {speed / 1e9:.1f} GB/s, of which latents {latents / 1e6:.1f} MB"
    )
    return seconds


def active_bytes(model: torch.nn.Module) -> int:
    """Bytes of the weights that a step of one token reads."""
    unread = weights_size_bytes(model.get_submodule("model.embed_tokens"))
    for module in model.modules():
        if isinstance(module, Experts):
            unread += weights_size_bytes(module) * (len(module) - _CONFIG["num_experts_per_tok"]) // len(module)
    return weights_size_bytes(model) - unread


def measure_transformers(config: Any, context: int) -> float:
    """Median seconds of a decode step over a cache of random latents."""
    from transformers import DeepseekV2ForCausalLM, DynamicCache

    with torch.device("meta"):
        model = DeepseekV2ForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu").eval()
    for parameter in model.parameters():
        parameter.fill_(0.01)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    times = []
    for _ in range(5):
        cache = DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            sizes = config.kv_lora_rank, config.qk_rope_head_dim
            cache.update(*(torch.randn(1, 1, context - 1, size).bfloat16() for size in sizes), layer)
        begin = time.perf_counter()
        model(torch.zeros(1, 1, dtype=torch.int64), past_key_values=cache, use_cache=True)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
