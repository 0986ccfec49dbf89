"""A real core in another process gives the tokens of one in this process, over its own death too."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import pytest

from penstock import LLM
from penstock.config import EngineConfig
from penstock.contract import SamplingParams
from penstock.engine.core import EngineCore
from penstock.engine.core_process import CoreProcess, start_core_process
from penstock.engine.messages import EngineRequest
from penstock.engine.prompts import Prompt
from penstock.engine.session import Session
from penstock.errors import ConfigError, ContextTooLong, EngineDead
from penstock.scheduler.outputs import EngineCoreOutput
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.engines import SMALL, make_core, random_prompts, run
from support.fake_engine import byte_level_tokenizer, write_tokenizer

PROMPTS = random_prompts((5, 21, 40, 3), VOCAB_SIZE, seed=6)


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=40, ignore_eos=True, frequency_penalty=0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(folder)
    return write_tokenizer(folder, byte_level_tokenizer())


def load_slow_core(config: EngineConfig) -> EngineCore:
    """A core that is killed before it is done."""
    core = EngineCore(config)
    step = core.step

    def slow_step() -> list[EngineCoreOutput]:
        time.sleep(0.02)
        return step()

    core.step = slow_step  # type: ignore[method-assign]
    return core


def test_requests_survive_the_death_of_their_core(folder: Path) -> None:
    core = make_core(folder)
    whole = [result.tokens for result in run(core, PROMPTS, [sampled(seed) for seed in range(len(PROMPTS))])]
    core.close()
    requests = {
        f"r{seed}": EngineRequest(req_id=f"r{seed}", prompt_token_ids=prompt, sampling_params=sampled(seed))
        for seed, prompt in enumerate(PROMPTS)
    }
    config = EngineConfig.create(str(folder), **SMALL)
    tokens: dict[str, list[int]] = {req_id: [] for req_id in requests}
    unfinished = set(requests)

    def take_step(core: CoreProcess) -> None:
        for output in core.step():
            tokens[output.req_id] += output.new_token_ids
            if output.finish_reason is not None:
                unfinished.discard(output.req_id)

    def take_all(core: CoreProcess) -> None:
        while core.has_unfinished_requests():
            take_step(core)

    core_that_dies = CoreProcess(config, load_slow_core)
    for request in requests.values():
        core_that_dies.add_request(request)
    while sum(map(len, tokens.values())) < 30:
        take_step(core_that_dies)
    assert core_that_dies.pid is not None
    os.kill(core_that_dies.pid, signal.SIGKILL)
    # What it had sent before is read; nothing is lost or told twice.
    with pytest.raises(EngineDead, match="SIGKILL"):
        take_all(core_that_dies)
    core_that_dies.close()
    assert len(unfinished) == len(requests)
    assert all(tokens.values())

    core_that_takes_over = start_core_process(config)
    for req_id in sorted(unfinished):
        resumed = msgspec.structs.replace(requests[req_id], output_token_ids=tokens[req_id].copy())
        core_that_takes_over.add_request(resumed)
    take_all(core_that_takes_over)
    core_that_takes_over.close()
    assert [tokens[f"r{seed}"] for seed in range(len(PROMPTS))] == whole


def test_an_offline_engine_over_it_gives_the_same_texts_and_calls_its_workers(folder: Path) -> None:
    params = [SamplingParams(max_tokens=12, seed=1, logprobs=2), SamplingParams(max_tokens=8, seed=2, n=2)]
    prompts: list[Prompt] = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:2]]
    with LLM(str(folder), **SMALL) as llm:
        expected = llm.generate(prompts, params)
    session = Session(EngineConfig.create(str(folder), **SMALL), load_core=start_core_process)
    requests = [session.accept(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    outputs = {progress.req_id: progress.output() for progress in session.run(requests) if progress.finished}
    for accepted, one in zip(requests, expected, strict=True):
        assert outputs[accepted.request.req_id].outputs == one.outputs
    (tree,) = session.collective_rpc("get_model_inspection", None, (), None)
    assert "Llama" in tree
    with pytest.raises(ConfigError, match="no method 'dance'"):
        session.collective_rpc("dance", None, (), None)
    session.close()


@pytest.mark.one_path(reason="what is refused never becomes a step")
def test_what_only_the_core_can_know_is_refused_with_its_type(folder: Path) -> None:
    core = start_core_process(EngineConfig.create(str(folder), **{**SMALL, "max_model_len": 32}))
    request = EngineRequest(req_id="long", prompt_token_ids=[1] * 32, sampling_params=sampled(0))
    with pytest.raises(ContextTooLong, match="32"):
        core.add_request(request)
    core.close()
