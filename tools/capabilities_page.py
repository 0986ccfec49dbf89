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
what to do instead. Tests start each of them, and run what is allowed on CPUs: each feature of the table, LoRA adapters,
pooling, every drafter and every format of weights and KV cache that a CPU has, with each arrangement of workers. The
tokens are those of one worker in float32 arithmetic, and in any arithmetic without TP; in bfloat16 arithmetic, and with
quantised weights, TP gives log-probabilities near those of one worker
([parallel.md](parallel.md#which-tokens-are-equal)). The code for CUDA was run on
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

Refused by name as well, where a model's sizes or layers, a checkpoint's contents or the installation are known:

"""
# Refusals outside of the table, each with the test that sees it.
ELSEWHERE = {
    "numbers of heads, features or layers that so many workers cannot divide; the error lists possible sizes": (
        "tests/models/test_ranks.py::"
        "test_a_size_that_one_layer_refuses_is_refused_before_workers_start_with_sizes_that_all_layers_accept"
    ),
    "`decode_context_parallel_size` where no two workers have the same KV heads, or the model has no attention": (
        "tests/executor/test_context_parallel.py::"
        "test_what_does_not_fit_together_is_refused_by_name_before_workers_start"
    ),
    "GPTQ and compressed-tensors checkpoints with activation order (`desc_act`, `actorder`), with TP": (
        "tests/models/test_ranks.py::test_groups_that_ranks_cannot_share_are_refused"
    ),
    "quantised checkpoints of models that run through Transformers": (
        "tests/models/test_transformers_refusals.py::test_a_quantized_model_is_refused"
    ),
    "the drafter `mtp` for a model without MTP layers, and drafters of other sizes or tokens than the model's": (
        "tests/worker/test_drafter.py::test_what_cannot_draft_is_refused"
    ),
    "a draft model that runs through Transformers, with TP": (
        "tests/worker/test_drafter.py::test_a_draft_model_of_transformers_is_not_split_over_workers"
    ),
    "drafts for a model with recurrent states that cannot be rolled back": (
        "tests/core/test_speculation.py::test_a_state_that_cannot_be_rolled_back_is_no_place_for_drafts"
    ),
    "LoRA adapters of encoders that run through Transformers, a text at a time": (
        "tests/core/test_pooled_adapters.py::test_models_that_run_a_text_at_a_time_refuse_adapters"
    ),
    "`expert_stats` of a model without native experts": (
        "tests/core/test_expert_stats.py::test_a_model_without_native_experts_is_refused"
    ),
    "an attention backend given by name that cannot read the KV cache or compute the layers, such as ALiBi": (
        "tests/attention/test_backends.py::test_alibi_is_refused_by_backends_that_do_not_know_it"
    ),
    "`cudagraph_mode='full'` with an attention backend that cannot be captured": (
        "tests/core/test_graphs.py::test_full_graphs_need_attention_that_can_be_captured"
    ),
    "`live_view` and `record` in engines that torchrun starts": (
        "tests/engine/live/test_live_session.py::test_a_server_and_an_engine_of_torchrun_refuse_the_option"
    ),
    "several workers of a CPU without the C++ kernels": (
        "tests/parallel/test_shared_memory_group.py::test_ranks_without_the_kernels_are_refused"
    ),
}


def page() -> str:
    """Return the text of the page."""
    lines = [_row(COLUMNS), _row(["---"] * len(COLUMNS)), *(_row(row.values()) for row in rows())]
    gpus = [_row(_gpu_cells(capability, choices)) for capability, choices in CHOICES.items()]
    elsewhere = [f"- {what}" for what in ELSEWHERE]
    return _HEAD + "\n".join(lines) + "\n" + _GPUS + "\n".join(gpus) + "\n" + _TAIL + ";\n".join(elsewhere) + ".\n"


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
