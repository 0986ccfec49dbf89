"""Calls by which trainers in the engine's process replace weights: TRL's colocated mode, and extensions of workers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock import LLM, AsyncEngine, EngineArgs, SamplingParams
from penstock.engine.script_helpers import get_open_port
from penstock.parallel.stateless_group import PyNcclCommunicator, StatelessProcessGroup
from support.trained_models import old_and_new

GREEDY = SamplingParams(
    n=1, repetition_penalty=1.0, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=8, logprobs=0
)
PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8, 9]}, {"prompt_token_ids": list(range(40, 80))}]


class Extension:
    """Methods of OpenRLHF's extension of workers, with tensors on the CPU."""

    def init_process_group(self, host: str, port: int, rank_offset: int, world_size: int) -> None:
        worker: Any = self
        group = StatelessProcessGroup.create(host, port, worker.rank + rank_offset, world_size)
        assert worker.device == torch.device("cpu")
        self._group = PyNcclCommunicator(group, device=worker.device)

    def update_weight(self, name: str, dtype: torch.dtype, shape: list[int]) -> None:
        worker: Any = self
        assert dtype == worker.model_config.dtype, f"mismatch dtype: src {dtype}, dst {worker.model_config.dtype}"
        assert (worker.local_rank, worker.model_config.vocab_size) == (0, 1536)
        weight = torch.empty(shape, dtype=dtype, device=worker.device)
        self._group.broadcast(weight, src=0, stream=None)
        worker.model_runner.model.load_weights(weights=[(name, weight)])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return old_and_new(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def trained(folders: tuple[Path, Path]) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32)
    return model


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> list[Any]:
    with LLM(folders[1], num_threads=1, kv_cache_memory_bytes=8 << 20, logprobs_mode="processed_logprobs") as llm:
        return answers(llm)


def answers(llm: LLM) -> list[Any]:
    """Tokens and their log-probabilities."""
    outputs = llm.generate(PROMPTS, sampling_params=GREEDY, use_tqdm=False)
    return [
        [(token, position[token].logprob) for token, position in zip(one.token_ids, one.logprobs, strict=True)]
        for one in (output.outputs[0] for output in outputs)
    ]


@pytest.fixture
def colocated(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    """Makes an engine with the options and variables that TRL gives."""
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        place = {
            "RANK": 0,
            "LOCAL_RANK": 0,
            "WORLD_SIZE": 1,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": get_open_port(),
        }
        for name, value in place.items():
            monkeypatch.setenv(name, str(value))
        made.append(
            LLM(
                model=str(folders[0]),
                tensor_parallel_size=1,
                gpu_memory_utilization=0.1,
                max_model_len=None,
                max_num_seqs=None,
                model_impl="auto",
                distributed_executor_backend="external_launcher",
                seed=0,
                max_num_batched_tokens=4096,
                logprobs_mode="processed_logprobs",
                quantization=None,
                trust_remote_code=False,
                **{"enable_sleep_mode": False, **options},
            )
        )
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def send_by_parameter(llm: LLM, model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights([(name, parameter)])


def test_a_colocated_engine_has_each_steps_weights(
    colocated: Callable[..., LLM], trained: PreTrainedModel, expected: list[Any]
) -> None:
    llm = colocated()
    assert llm.llm_engine.model_config.max_model_len == 1024
    before = answers(llm)
    assert before != expected
    for _ in range(2):
        send_by_parameter(llm, trained)
        llm.reset_prefix_cache()
        assert answers(llm) == expected


def test_a_colocated_engine_sleeps_between_steps(
    colocated: Callable[..., LLM], trained: PreTrainedModel, expected: list[Any]
) -> None:
    llm = colocated(enable_sleep_mode=True)
    llm.sleep(level=2)
    for _ in range(2):
        llm.wake_up(tags=["weights"])
        send_by_parameter(llm, trained)
        llm.reset_prefix_cache()  # while the KV cache sleeps
        llm.wake_up(tags=["kv_cache"])
        assert answers(llm) == expected
        llm.sleep(level=2)


def test_an_extension_of_the_worker_receives_and_loads_weights(
    folders: tuple[Path, Path], trained: PreTrainedModel, expected: list[Any]
) -> None:
    port = get_open_port()
    parameters = list(trained.named_parameters())

    def send() -> None:
        group = PyNcclCommunicator(StatelessProcessGroup.create("127.0.0.1", port, 0, 2), device="cpu")
        for _, parameter in parameters:
            group.broadcast(parameter.data, src=0)

    with (
        ThreadPoolExecutor(1) as threads,
        LLM(
            folders[0],
            num_threads=1,
            kv_cache_memory_bytes=8 << 20,
            logprobs_mode="processed_logprobs",
            worker_extension_cls=f"{__name__}.{Extension.__qualname__}",
        ) as llm,
    ):
        sent = threads.submit(send)
        llm.collective_rpc("init_process_group", args=("127.0.0.1", port, 1, 2))
        for name, parameter in parameters:
            llm.collective_rpc("update_weight", args=(name, parameter.dtype, list(parameter.shape)))
        sent.result()
        llm.reset_prefix_cache()
        assert answers(llm) == expected


def test_an_asynchronous_engine_takes_the_calls_of_openrlhf_and_verl(folders: tuple[Path, Path]) -> None:
    async def train() -> list[str]:
        args = EngineArgs(str(folders[0]), enable_sleep_mode=True, num_threads=1, kv_cache_memory_bytes=8 << 20)
        engine = AsyncEngine.from_engine_args(args)
        try:
            assert not await engine.is_sleeping()
            running = asyncio.ensure_future(text_of(engine))
            await engine.pause_generation(mode="keep")
            await engine.reset_prefix_cache(reset_connector=True)
            await engine.resume_generation()
            texts = [await running]
            await engine.wait_for_requests_to_drain()
            await engine.pause_generation(wait_for_inflight_requests=False, clear_cache=True)
            await engine.resume_generation()
            await engine.sleep(level=1)
            for tag in ("weights", "kv_cache"):
                await engine.wake_up(tags=[tag])
            return [*texts, await text_of(engine)]
        finally:
            engine.shutdown()

    first, second = asyncio.run(train())
    assert first == second


async def text_of(engine: AsyncEngine) -> str:
    text = ""
    async for output in engine.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY, request_id=uuid.uuid4().hex):
        text = output.outputs[0].text
    return text
