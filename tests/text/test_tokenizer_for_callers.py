"""`get_tokenizer` returns a Transformers tokenizer that agrees with the engine's."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, AsyncEngine, SamplingParams
from penstock.errors import TokenizerError
from penstock.text.tokenizer import load_tokenizer
from support.fake_engine import byte_level_tokenizer, install_fake_core, write_model, write_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|user|>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MESSAGES = [{"role": "user", "content": "the fox"}]
SHORT = SamplingParams(max_tokens=2)


@pytest.fixture(params=["by_tokenizers", "by_transformers"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Model folder whose tokenizer the engine loads itself, or through Transformers."""
    folder = write_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    if request.param == "by_transformers":
        write_tokenizer(folder, byte_level_tokenizer(), fast_tokenizer_files=["tokenizer.json"])
    assert (load_tokenizer(folder)._encoding is None) == (request.param == "by_tokenizers")
    return folder


@pytest.fixture(autouse=True)
def _fake_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "penstock.engine.core.engine_core", None)
    install_fake_core()


@pytest.fixture
def oracle(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


def test_it_is_used_as_that_of_transformers(folder: Path, oracle: Any) -> None:
    with LLM(folder) as llm:
        tokenizer: Any = llm.get_tokenizer()
        assert llm.get_tokenizer() is tokenizer
    assert type(tokenizer) is type(oracle)
    options = {"add_generation_prompt": True}
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, **options)
    assert text == "<s><|user|>the fox</s>assistant: "
    assert tokenizer.apply_chat_template(MESSAGES, **options) == oracle.apply_chat_template(MESSAGES, **options)
    assert tokenizer("the fox").input_ids == oracle("the fox").input_ids == tokenizer.encode("the fox")
    ids = tokenizer(["the fox", "a dog"]).input_ids
    assert tokenizer.batch_decode(ids) == oracle.batch_decode(ids)
    for name in ("bos_token", "eos_token_id", "pad_token_id", "all_special_ids", "vocab_size"):
        assert getattr(tokenizer, name) == getattr(oracle, name), name
    assert len(tokenizer) == len(oracle)
    assert tokenizer.get_vocab() == oracle.get_vocab()
    assert tokenizer.convert_tokens_to_ids("</s>") == oracle.eos_token_id


def test_the_engine_makes_the_same_prompts(folder: Path) -> None:
    with LLM(folder) as llm:
        tokenizer: Any = llm.get_tokenizer()
        (chatted,) = llm.chat(MESSAGES, SHORT)
        rendered = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
        assert chatted.prompt == rendered
        encoded = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
        assert chatted.prompt_token_ids == encoded["input_ids"]
        (generated,) = llm.generate("the fox", SHORT)
        assert generated.prompt_token_ids == tokenizer.encode("the fox")
        assert generated.outputs[0].text == tokenizer.decode(generated.outputs[0].token_ids, skip_special_tokens=True)
        internal = llm._session.tokenizer
        assert (internal.eos_token_id, internal.bos_token_id) == (tokenizer.eos_token_id, tokenizer.bos_token_id)
        assert internal.vocab_size == len(tokenizer)


def test_what_a_caller_sets_stays_out_of_the_engines_encoding(folder: Path) -> None:
    with LLM(folder) as llm:
        before = llm.generate(["the fox", "the lazy dog"], SHORT)
        tokenizer: Any = llm.get_tokenizer()
        tokenizer.pad_token = tokenizer.eos_token
        tokenizer(["the fox", "the lazy dog"], padding="max_length", max_length=3, truncation=True)
        after = llm.generate(["the fox", "the lazy dog"], SHORT)
        assert [output.prompt_token_ids for output in after] == [output.prompt_token_ids for output in before]


def test_a_template_that_a_caller_sets_is_what_chat_uses(folder: Path) -> None:
    with LLM(folder) as llm:
        assert llm.chat(MESSAGES, SHORT)[0].prompt == "<s><|user|>the fox</s>assistant: "
        llm.get_tokenizer().chat_template = "{{ messages[0].content }}!"
        assert llm.chat(MESSAGES, SHORT)[0].prompt == "the fox!"


def test_an_async_engine_has_it_too(folder: Path, oracle: Any) -> None:
    async def render() -> Any:
        async with AsyncEngine(str(folder), enable_multiprocessing=False) as engine:
            assert engine.tokenizer is engine.get_tokenizer()
            return engine.get_tokenizer().apply_chat_template(MESSAGES, tokenize=False)

    assert asyncio.run(render()) == oracle.apply_chat_template(MESSAGES, tokenize=False)


def test_what_transformers_cannot_load_is_a_tokenizer_error(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    tokenizer = load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="cannot be loaded"):
        tokenizer.for_callers()
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        LLM(str(folder))
