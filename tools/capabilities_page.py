"""Write docs/capabilities.md from the refusals that are raised at start.

python tools/capabilities_page.py
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from penstock.cli.capabilities import COLUMNS, rows
from penstock.device.capability import CHOICES, GpuChoices

PAGE = Path(__file__).parents[1] / "docs/capabilities.md"

_HEAD = """\
# What works with what

<!-- Written by tools/capabilities_page.py. -->

Every feature works with every other, with each arrangement of workers ([parallel.md](parallel.md)) and on each device,
except the combinations below. An engine that is asked for one of them ends at start with an error that says why, and
what to do instead. Tests start each of them, and run the allowed ones on CPUs: with the tokens of one worker in float32
arithmetic, and in any arithmetic without TP; in bfloat16 arithmetic, and with int8 and int4 weights, TP gives log-
probabilities near those of one worker ([parallel.md](parallel.md#which-tokens-are-equal)). The code for CUDA was run on
one H200 with every family of models but Granite, gpt-oss, Ernie 4.5, HunYuan, Phi-3.5-MoE and dots.llm1, through
Transformers too, and with every feature below that is not refused, quantised weights and an FP8 KV cache included
([gpu.md](internals/gpu.md)). It was never run on several GPUs.

```sh
penstock env --capabilities
penstock env --capabilities --json
```

TP is `tensor_parallel_size`, PP `pipeline_parallel_size`, DCP `decode_context_parallel_size`, SP `enable_sp`; torchrun
is `distributed_executor_backend='external_launcher'`; a core process is `enable_multiprocessing` or several engines
(`data_parallel_size`).

"""
_GPUS = """\

## What depends on the GPU

A GPU of another compute capability takes the row before its own. Only H200s were run.

| compute capability | GPUs | bfloat16 | FP8 KV cache | weights of FP8 checkpoints |
| --- | --- | --- | --- | --- |
"""
_TAIL = """\

Products of experts are one Triton launch on all of them, for weights of any format; with `moe_backend="torch"` they run
expert by expert in cuBLAS, and steps with experts are no CUDA graphs. Prefill attention has as many stages as the
shared memory of the GPU allows. None of this paragraph was run on a GPU.

## What depends on sizes and contents

Refused by name as well, where a model's sizes or a checkpoint's contents are known:

- numbers of heads, features or layers that cannot be divided among so many workers; the error lists possible sizes;
- `decode_context_parallel_size` where no two workers have the same KV heads;
- GPTQ and compressed-tensors checkpoints with activation order (`desc_act`, `actorder`), with TP;
- an int8 KV cache with an attention backend that cannot read it;
- several workers without the C++ kernels.
"""


def page() -> str:
    """Return the text of the page."""
    lines = [_row(COLUMNS), _row(["---"] * len(COLUMNS)), *(_row(row.values()) for row in rows())]
    gpus = [_row(_gpu_cells(capability, choices)) for capability, choices in CHOICES.items()]
    return _HEAD + "\n".join(lines) + "\n" + _GPUS + "\n".join(gpus) + "\n" + _TAIL


def _gpu_cells(capability: tuple[int, int], choices: GpuChoices) -> list[str]:
    products = "dequantised while loading"
    if choices.has_float8:
        scaled = "that scales rows" if choices.scales_rows else "with row scales afterwards"
        products = f"kept: cuBLASLt {scaled}; Triton for blocks"
    return [
        ".".join(map(str, capability)),
        choices.gpus,
        "yes" if choices.has_bfloat16 else "no",
        "yes" if choices.has_float8 else "no",
        products,
    ]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
