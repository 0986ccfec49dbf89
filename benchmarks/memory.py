"""Memory of running engines against `penstock plan`, with random weights of real models' sizes.

python -m benchmarks.memory [--models NAME ...] [--repeats 3] [--output FOLDER]

The engine runs in a process of its own: its KV cache is filled, and full steps of every kind are run
(`benchmarks/full_steps.py`). The process's resident memory must equal the plan. Linux only: reads /proc.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import described, machine, save
from benchmarks.peers.shapes import SHAPES

NUM_THREADS = 2
MIB = 1 << 20
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "max_model_len": 4096,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 1024 * MIB,
    "num_threads": NUM_THREADS,
}
# As a module: the folder of a script would be searched first, and Transformers asks for a package named kernels.
_FULL_STEPS = ("-m", "benchmarks.full_steps")
_ROOT = Path(__file__).parents[1]
# Of the plan and of the engine's arithmetic alike.
_TERMS = ("process", "weights", "activations", "sampling", "runner_state")
_HEADER = """
Random weights, 64 requests at most, contexts of 4,096, steps of 2,048 tokens, 1 GiB of KV cache. In MiB; where two
figures differ, the second is what the running engine counts. Steps: the most by which full ones raised the resident
size. In all: what the plan says, and the process's largest resident size, of all runs.

| model | plan, s | weights | activations | logits and sampling | steps | in all: plan | engine | plan is off |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |""".splitlines()


@dataclass(frozen=True)
class Model:
    """Measured model. config: fields of `config.json` besides defaults. options: engine options besides OPTIONS."""

    title: str
    config: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


def _as_peers(name: str) -> dict[str, Any]:
    """Model of the comparison with other engines, with the context length of OPTIONS."""
    return {**SHAPES[name].config, "max_position_embeddings": 8192}


MODELS = {
    "smollm2-135m": Model("Llama, as SmolLM2 135M", _as_peers("smollm2-135m")),
    "qwen3-0.6b": Model("Qwen3, as 0.6B", _as_peers("qwen3-0.6b")),
    "qwen3-0.6b-bfloat16": Model("Qwen3, as 0.6B, bfloat16", _as_peers("qwen3-0.6b"), {"dtype": "bfloat16"}),
    "qwen3-0.6b-int8": Model(
        "Qwen3, as 0.6B, int8 weights and KV cache",
        _as_peers("qwen3-0.6b"),
        {"quantization": "int8", "kv_cache_dtype": "int8"},
    ),
    "gemma3-270m": Model(
        "Gemma 3, as 270M",
        {
            "model_type": "gemma3_text",
            "vocab_size": 262_144,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
        },
    ),
    "gpt2": Model("GPT-2", {"model_type": "gpt2", "n_positions": 4096}),
    "pythia-410m": Model(
        "GPT-NeoX, as Pythia 410M",
        {
            "model_type": "gpt_neox",
            "vocab_size": 50_304,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "max_position_embeddings": 4096,
        },
    ),
    "granite-350m": Model(
        "Granite, with 28 layers of 1,024",
        {
            "model_type": "granite",
            "vocab_size": 49_152,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
}


@dataclass(frozen=True)
class Row:
    """Row of the table, in bytes; seconds: time of the plan.

    plan, engine: terms. total: of the plan. resident: largest resident size of the engine's process in each run.
    taken: most memory of full steps, by kind.
    """

    title: str
    seconds: float
    plan: dict[str, int]
    engine: dict[str, int]
    total: int
    resident: list[int]
    taken: dict[str, int]

    @property
    def deviation(self) -> float:
        """Relative deviation of the plan's total from the engine's memory, in the run where it is largest."""
        return max((self.total / resident - 1 for resident in self.resident), key=abs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models:
        rows.append(measure(MODELS[name], arguments.repeats))
        print(_line(rows[-1]), flush=True)
    facts = machine(NUM_THREADS)
    print(as_markdown(rows, facts))
    if arguments.output is not None:
        report = {"machine": facts, "options": OPTIONS, "rows": [asdict(row) for row in rows]}
        save(arguments.output, "memory", report=report, page=as_markdown(rows, facts))


def measure(model: Model, repeats: int) -> Row:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LM

    options = {**OPTIONS, **model.options}
    with tempfile.TemporaryDirectory() as folder:
        architectures = [CAUSAL_LM[model.config["model_type"]]]
        AutoConfig.for_model(**{**model.config, "architectures": architectures}).save_pretrained(folder)
        named = [f"--option={name}={value}" for name, value in options.items()]
        plans, seconds = [], []
        for _ in range(repeats):
            begin = time.perf_counter()
            plans.append(_json_of("-m", "penstock.cli", "plan", folder, "--json", "--device", "cpu", *named))
            seconds.append(time.perf_counter() - begin)
        runs = [_json_of(*_FULL_STEPS, folder, json.dumps(options)) for _ in range(repeats)]
    return Row(
        model.title,
        statistics.median(seconds),
        {term: plans[0]["memory"][term] for term in _TERMS},
        {term: runs[0][term] for term in _TERMS},
        # No request of the full steps asks for hidden states.
        plans[0]["engine_bytes"] - plans[0]["memory"]["hidden_states"],
        [run["resident"] for run in runs],
        {kind: max(run["measured"][kind] for run in runs) for kind in runs[0]["measured"]},
    )


def _json_of(*arguments: str) -> dict[str, Any]:
    """JSON output of a Python process."""
    result = subprocess.run([sys.executable, *arguments], cwd=_ROOT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"python {' '.join(arguments[:2])} failed: {result.stderr}")
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def as_markdown(rows: Sequence[Row], facts: dict[str, object]) -> str:
    head = ["# Memory: the plan and running engines", "", described(facts)]
    return "\n".join([*head, *_HEADER, *map(_line, rows)]) + "\n"


def _line(row: Row) -> str:
    terms = [_both(row.plan[term], row.engine[term]) for term in ("weights", "activations", "sampling")]
    sizes = dict.fromkeys(f"{size / MIB:,.0f}" for size in (min(row.resident), max(row.resident)))
    cells = [
        row.title,
        f"{row.seconds:.2f}",
        *terms,
        f"{max(row.taken.values()) / MIB:,.0f}",
        f"{row.total / MIB:,.0f}",
        " to ".join(sizes),
        f"{100 * row.deviation:+.1f}%",
    ]
    return f"| {' | '.join(cells)} |"


def _both(plan: int, engine: int) -> str:
    texts = [f"{size / MIB:,.1f}" for size in (plan, engine)]
    return texts[0] if texts[0] == texts[1] else ", ".join(texts)


if __name__ == "__main__":
    main()
