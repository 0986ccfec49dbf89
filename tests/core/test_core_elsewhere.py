"""A real core in another process gives the texts of one in this process, and refuses the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import LLM
from penstock.config import EngineConfig
from penstock.contract import RpcCall, SamplingParams
from penstock.engine.inputs.prompts import Prompt
from penstock.engine.messages import EngineRequest
from penstock.engine.processes.core_group import CoreGroup
from penstock.engine.session import Session
from penstock.errors import ConfigError, ContextTooLong
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.engines import SMALL, random_prompts
from support.fake_engine import byte_level_tokenizer, write_tokenizer

PROMPTS = random_prompts((5, 21, 40, 3), VOCAB_SIZE, seed=6)


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=40, ignore_eos=True, frequency_penalty=0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(folder)
    return write_tokenizer(folder, byte_level_tokenizer())


@pytest.mark.slow
def test_an_offline_engine_over_it_gives_the_same_texts_and_calls_its_workers(folder: Path) -> None:
    params = [SamplingParams(max_tokens=12, seed=1, logprobs=2), SamplingParams(max_tokens=8, seed=2, n=2)]
    prompts: list[Prompt] = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:2]]
    with LLM(str(folder), **SMALL) as llm:
        expected = llm.generate(prompts, params)
    session = Session(EngineConfig.create(str(folder), enable_multiprocessing=True, **SMALL))
    requests = [session.accept(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    outputs = {progress.req_id: progress.output() for progress in session.run(requests) if progress.finished}
    for accepted, one in zip(requests, expected, strict=True):
        assert outputs[accepted.request.req_id].outputs == one.outputs
    (tree,) = session.collective_rpc(RpcCall("get_model_inspection"))
    assert "Llama" in tree
    with pytest.raises(ConfigError, match="no method 'dance'"):
        session.collective_rpc(RpcCall("dance"))
    session.close()


@pytest.mark.one_path(reason="what is refused never becomes a step")
@pytest.mark.slow
def test_what_only_the_core_can_know_is_refused_with_its_type(folder: Path) -> None:
    core = CoreGroup(EngineConfig.create(str(folder), **{**SMALL, "max_model_len": 32}))
    request = EngineRequest(req_id="long", prompt_token_ids=[1] * 32, sampling_params=sampled(0))
    with pytest.raises(ContextTooLong, match="32"):
        core.add_request(request)
    core.close()
