"""One driver per engine: load once, then run a workload and say how long it took.

Each engine lives in a process of its own: the thread pools of one would slow the others down, even while it idles.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import torch

from benchmarks.workloads import Workload


class Engine(Protocol):
    """`run` returns the generated tokens per request and the seconds it took."""

    name: str

    def run(self, workload: Workload) -> tuple[list[list[int]], float]: ...

    def close(self) -> None: ...


class PenstockEngine:
    name = "Penstock"

    def __init__(self, folder: Path, num_threads: int) -> None:
        from penstock.config import EngineConfig
        from penstock.engine.core import EngineCore

        self._core = EngineCore(EngineConfig.create(str(folder), num_threads=num_threads, device="cpu"))
        self._num_runs = 0

    def run(self, workload: Workload) -> tuple[list[list[int]], float]:
        from penstock.contract import SamplingParams
        from penstock.engine.messages import EngineRequest

        # Every run starts without cached prefixes, as the first one does.
        self._core.step()
        assert self._core.reset_prefix_cache()
        self._num_runs += 1
        tokens: dict[str, list[int]] = {}
        begin = time.perf_counter()
        for index, (prompt, num_outputs) in enumerate(zip(workload.prompts, workload.num_outputs, strict=True)):
            req_id = f"{self._num_runs}-{index}"
            tokens[req_id] = []
            params = SamplingParams(temperature=0.0, seed=0, max_tokens=num_outputs, ignore_eos=True)
            self._core.add_request(EngineRequest(req_id=req_id, prompt_token_ids=prompt, sampling_params=params))
        while self._core.has_unfinished_requests():
            for output in self._core.step():
                tokens[output.req_id] += output.new_token_ids
        return list(tokens.values()), time.perf_counter() - begin

    def close(self) -> None:
        self._core.close()


class PenstockTorchProducts(PenstockEngine):
    """With torch's matrix products in place of ours: what the rest is worth."""

    name = "Penstock with torch's products"

    def __init__(self, folder: Path, num_threads: int) -> None:
        os.environ["PENSTOCK_CPU_PRODUCTS"] = "torch"
        super().__init__(folder, num_threads)


class TransformersGenerate:
    """`generate` on one left-padded batch; it runs until the longest output is done, as it must."""

    name = "Transformers generate"

    def __init__(self, folder: Path, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._model = _load_transformers(folder, "sdpa")

    def run(self, workload: Workload) -> tuple[list[list[int]], float]:
        longest = max(map(len, workload.prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in workload.prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in workload.prompts])
        begin = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(workload.num_outputs),
                min_new_tokens=max(workload.num_outputs),
                do_sample=False,
                pad_token_id=0,
            )
        elapsed = time.perf_counter() - begin
        rows = output[:, longest:].tolist()
        return [row[:count] for row, count in zip(rows, workload.num_outputs, strict=True)], elapsed

    def close(self) -> None:
        del self._model


class TransformersContinuousBatching:
    """`generate_batch`: paged attention and a scheduler of its own. One output length per call, so it is the mean."""

    name = "Transformers continuous batching"

    def __init__(self, folder: Path, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._model = _load_transformers(folder, "sdpa")

    def run(self, workload: Workload) -> tuple[list[list[int]], float]:
        from transformers import GenerationConfig

        # The call knows one length for all requests: the mean gives the same number of tokens in all.
        mean = max(1, round(sum(workload.num_outputs) / len(workload.num_outputs)))
        config = GenerationConfig(max_new_tokens=mean, do_sample=False, eos_token_id=-1, pad_token_id=0)
        begin = time.perf_counter()
        # Its own thread generates, where an inference mode of this one would not hold.
        outputs = self._model.generate_batch(inputs=workload.prompts, generation_config=config, progress_bar=False)
        elapsed = time.perf_counter() - begin
        tokens = [output.generated_tokens for output in outputs.values()]
        assert len(tokens) == len(workload.prompts), "continuous batching lost requests"
        assert all(len(row) == mean for row in tokens), "continuous batching stopped early"
        return tokens, elapsed * sum(workload.num_outputs) / (mean * len(tokens))

    def close(self) -> None:
        del self._model


def _load_transformers(folder: Path, attention: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()


class InOwnProcess:
    """An engine of this module, by name, in a fresh process that waits while it has nothing to run."""

    def __init__(self, name: str, folder: Path, num_threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, name, folder, num_threads), daemon=True)
        self._process.start()
        # Then an engine that dies is the end of its file, and not a wait for ever.
        theirs.close()
        self.name = self._connection.recv()

    def run(self, workload: Workload) -> tuple[list[list[int]], float]:
        self._connection.send(workload)
        tokens, seconds = self._connection.recv()
        return tokens, seconds

    def close(self) -> None:
        self._connection.send(None)
        self._process.join()


def _serve(connection: Connection, name: str, folder: Path, num_threads: int) -> None:
    engine = ENGINES[name](folder, num_threads)
    connection.send(engine.name)
    while (workload := connection.recv()) is not None:
        connection.send(engine.run(workload))
    engine.close()


ENGINES: dict[str, Callable[[Path, int], Engine]] = {
    "penstock": PenstockEngine,
    "torch-products": PenstockTorchProducts,
    "generate": TransformersGenerate,
    "continuous": TransformersContinuousBatching,
}
