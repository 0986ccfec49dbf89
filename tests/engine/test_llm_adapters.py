"""Adapters of `LLM`: chat, beam search, and adapters in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from penstock import LLM, LoRARequest, SamplingParams
from penstock.checkpoints.resolve import resolve_model_folder
from penstock.engine.beam_search import BeamSearchParams
from penstock.errors import CheckpointError, InvalidParameter, InvalidRequest, UnsupportedParameter
from support.adapted_models import in_memory
from support.adapters import make_adapters

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = AutoModelForCausalLM.from_pretrained(resolve_model_folder("demo"), dtype="float32")
    return make_adapters(
        model, tmp_path_factory.mktemp("adapter"), [{"r": 4, "target_modules": ["q_proj", "up_proj"]}]
    )[0]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="cpu", dtype="float32", enable_lora=True, max_cpu_loras=2) as made:
        yield made


def tokens(llm: LLM, prompt: object, adapter: LoRARequest | None) -> list[int]:
    (output,) = llm.generate(prompt, PARAMS, use_tqdm=False, lora_request=adapter)  # type: ignore[arg-type]
    return list(output.outputs[0].token_ids)


def test_chat_and_beam_search_take_an_adapter(llm: LLM, folder: Path) -> None:
    adapter = LoRARequest("mine", 1, str(folder))
    answers = [
        llm.chat([{"role": "user", "content": "Hello."}], PARAMS, use_tqdm=False, lora_request=one)[0]
        for one in (None, adapter)
    ]
    for answer, one in zip(answers, (None, adapter), strict=True):
        assert answer.outputs[0].token_ids == tokens(llm, {"prompt_token_ids": answer.prompt_token_ids}, one)
        said = answer.lora_request
        assert (said and (said.lora_name, said.lora_int_id, said.lora_path)) == (one and ("mine", 1, str(folder)))
    assert answers[0].outputs[0].token_ids != answers[1].outputs[0].token_ids
    params = BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True)
    (found,) = llm.beam_search(["ROMEO:"], params, lora_request=adapter)
    assert found.sequences[0].tokens[-8:] == tokens(llm, "ROMEO:", adapter)


def test_an_adapter_in_memory_is_sent_once_and_referred_to_by_its_number(llm: LLM, folder: Path) -> None:
    expected = tokens(llm, "KING", LoRARequest("mine", 1, str(folder)))
    adapter = in_memory(2, folder)
    assert llm.add_lora(adapter)
    assert not llm.add_lora(adapter)
    assert llm.list_loras() == {1, 2}
    assert tokens(llm, "KING", adapter) == tokens(llm, "KING", LoRARequest("adapter2", 2)) == expected
    assert llm.remove_lora(2)
    with pytest.raises(InvalidRequest, match="There is no adapter 'adapter2'"):
        tokens(llm, "KING", LoRARequest("adapter2", 2))


def test_adapters_that_cannot_be_loaded_are_refused_before_anything_runs(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no adapter_config.json"):
        tokens(llm, "KING", LoRARequest("missing", 3, str(tmp_path)))
    with pytest.raises(InvalidRequest, match="neither lora_path nor tensors"):
        llm.add_lora(LoRARequest("empty", 3))
    with pytest.raises(InvalidRequest, match="1 prompts but 2 lora_requests"):
        tokens(llm, "KING", [None, None])  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match=r"prompts\[1\]: lora_request='adapter' is not valid"):
        llm.generate(["a", "b"], use_tqdm=False, lora_request=[None, "adapter"])  # type: ignore[list-item]


def test_an_engine_without_adapters_refuses_requests_with_one(folder: Path) -> None:
    with LLM("demo", device="cpu", kv_cache_memory_bytes="8MiB") as plain:
        for prompt in ("KING", {"prompt": "KING", "cache_salt": "a"}):
            with pytest.raises(UnsupportedParameter, match="LoRA adapters are not enabled .*enable_lora=True"):
                plain.generate(prompt, use_tqdm=False, lora_request=LoRARequest("mine", 1, str(folder)))
