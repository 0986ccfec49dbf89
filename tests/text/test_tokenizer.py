"""Tokenizer: ids, text and chat templates as in Transformers, from any thread, with errors that name the file."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from penstock.checkpoints.resolve import resolve_model_folder
from penstock.errors import InvalidRequest, TokenizerError
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from penstock.text.tokenizer_files import _CLASS_OF_MODEL_TYPE, TokenizerFiles
from support.fake_engine import byte_fallback_tokenizer, byte_level_tokenizer, gpt2_like, qwen2_like, write_tokenizer

TEXTS = [
    "the quick brown fox",
    "  two spaces, then\n\na line and a tab\t",
    "über naïve 日本語 😀👩‍👩‍👧",
    "e\u0301 is é in another form",
    "digits 1234567, it's we'LL",
    "<s>special</s> tokens <|user|>within<|user|> text",
    "",
]


def agrees_with_transformers(folder: Path) -> bool:
    """Whether encoding and decoding equal AutoTokenizer's on all texts."""
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    for text in TEXTS:
        for add_special_tokens in (True, False):
            ids = theirs.encode(text, add_special_tokens=add_special_tokens)
            assert ours.encode(text, add_special_tokens) == ids
            for skip_special_tokens in (True, False):
                assert ours.decode(ids, skip_special_tokens) == theirs.decode(ids, skip_special_tokens)
    assert (ours.eos_token_id, ours.bos_token_id) == (theirs.eos_token_id, theirs.bos_token_id)
    assert ours.vocab_size == len(theirs)
    return True


def is_read_directly(folder: Path) -> bool:
    return TokenizerFiles.read(folder).tokenizer_json_decides()


def ignoring_merges(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    tokenizer.model.ignore_merges = True
    return tokenizer


def with_own_words(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def with_own_normalizer(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def padded() -> tokenizers.Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_padding(pad_token="[PAD]", pad_id=380)
    return tokenizer


END_OF_TEXT = {"bos_token": None, "eos_token": "<|endoftext|>"}
# name: (tokenizer, tokenizer_config.json, model_type, whether tokenizer.json may be read directly)
CASES: dict[str, tuple[tokenizers.Tokenizer, dict[str, Any], str | None, bool]] = {
    "as it is": (byte_level_tokenizer(), {}, "llama", True),
    "as it is, by its new name": (byte_level_tokenizer(), {"tokenizer_class": "TokenizersBackend"}, "llama", True),
    "add_bos_token is overruled": (byte_level_tokenizer(), {"add_bos_token": False}, "llama", True),
    "add_eos_token is overruled": (byte_level_tokenizer(), {"add_eos_token": True}, None, True),
    "qwen2": (qwen2_like(), {"tokenizer_class": "Qwen2Tokenizer", **END_OF_TEXT}, "qwen2", True),
    "qwen2, the file says fast": (qwen2_like(), {**END_OF_TEXT}, "qwen2", True),
    "qwen3": (qwen2_like(), {"tokenizer_class": "Qwen2TokenizerFast", **END_OF_TEXT}, "qwen3", True),
    "qwen2 with words of its own": (with_own_words(qwen2_like()), END_OF_TEXT, "qwen2", False),
    "qwen2 without normalizer": (with_own_normalizer(qwen2_like()), END_OF_TEXT, "qwen2", False),
    "gpt2": (gpt2_like(), {"tokenizer_class": "GPT2TokenizerFast", **END_OF_TEXT}, "gpt2", True),
    "gpt2 with a space in front": (
        gpt2_like(),
        {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True, **END_OF_TEXT},
        "gpt2",
        False,
    ),
    "gpt2 that ignores merges": (
        ignoring_merges(gpt2_like()),
        {"tokenizer_class": "GPT2Tokenizer", **END_OF_TEXT},
        "gpt2",
        False,
    ),
    "llama 3 by llama 2's class": (
        ignoring_merges(byte_level_tokenizer()),
        {"tokenizer_class": "LlamaTokenizerFast"},
        "llama",
        True,
    ),
    "llama 2": (byte_fallback_tokenizer(), {"tokenizer_class": "LlamaTokenizer"}, "llama", False),
    "llama 2 as it is": (byte_fallback_tokenizer(), {}, "llama", True),
    "one more special token": (byte_level_tokenizer(), {"pad_token": "<pad>"}, "llama", False),
    "one more listed token": (byte_level_tokenizer(), {"additional_special_tokens": ["within"]}, "llama", False),
    "a special token that is not special in the file": (
        byte_level_tokenizer(),
        {"eos_token": "the"},
        "llama",
        False,
    ),
    "an added token": (
        byte_level_tokenizer(),
        {"added_tokens_decoder": {"380": {"content": "brown", "special": False}}},
        "llama",
        False,
    ),
    "an added token of the file": (
        byte_level_tokenizer(),
        {"added_tokens_decoder": {"2": {"content": "<|user|>", "special": True}}},
        "llama",
        True,
    ),
    "a padding token of its own": (padded(), {}, "llama", False),
    "special tokens are split": (byte_level_tokenizer(), {"split_special_tokens": True}, "llama", False),
}


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, bool]:
    tokenizer, config, model_type, is_direct = CASES[request.param]
    folder = write_tokenizer(tmp_path / "model", tokenizer, **config)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type} if model_type else {}))
    return folder, is_direct


def test_ids_and_text_are_those_of_transformers(case: tuple[Path, bool]) -> None:
    assert agrees_with_transformers(case[0])


def test_tokenizer_json_is_read_directly_where_it_is_sufficient(case: tuple[Path, bool]) -> None:
    folder, is_direct = case
    assert is_read_directly(folder) == is_direct


def test_tokens_of_the_legacy_files_count(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, byte_level_tokenizer())
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "quick"}}))
    assert not is_read_directly(folder)
    assert agrees_with_transformers(folder)


def test_the_demo_is_read_directly_and_agrees() -> None:
    folder = resolve_model_folder("demo")
    assert is_read_directly(folder)
    assert agrees_with_transformers(folder)


def test_the_table_of_overridden_classes_is_that_of_transformers() -> None:
    from transformers.models.auto import tokenization_auto as auto

    overridden = {
        name: auto.TOKENIZER_MAPPING_NAMES[name]
        for name in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        if auto.TOKENIZER_MAPPING_NAMES.get(name) not in (None, "TokenizersBackend")
    }
    assert overridden == _CLASS_OF_MODEL_TYPE


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50, pad_id=0, pad_token="<s>")
    folder = write_tokenizer(tmp_path, tokenizer)
    assert len(load_tokenizer(folder).encode("the quick brown fox jumps over")) == 7
    assert agrees_with_transformers(folder)


def test_a_tokenizer_written_in_python_works(tmp_path: Path) -> None:
    """ByT5's tokenizer has no vocabulary file; its tokens are bytes."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("Ж!", add_special_tokens=False)
    detokenizer = tokenizer.start_detokenizer()
    assert [detokenizer.push(token_id) for token_id in ids] == ["", "Ж", "!"]
    assert tokenizer.decode(ids) == "Ж!"
    assert tokenizer.eos_token_id == 1


def test_neither_torch_nor_transformers_is_imported_for_the_demo() -> None:
    code = (
        "import sys; from pathlib import Path; from penstock.text.tokenizer import load_tokenizer; "
        f"tokenizer = load_tokenizer(Path({str(resolve_model_folder('demo'))!r})); tokenizer.encode('hi'); "
        "tokenizer.apply_chat_template([{'role': 'user', 'content': 'hi'}]); "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_many_threads_may_encode_at_once(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, byte_level_tokenizer()))
    expected = [tokenizer.encode(text) for text in TEXTS]
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda n: [tokenizer.encode(text) for text in TEXTS], range(50)))
    assert results == [expected] * 50


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_tokenizer(tmp_path, byte_level_tokenizer())
    (folder / name).write_text('{"version": "1.0", "trunc')
    with pytest.raises(TokenizerError, match=rf"{name}.*Download it again"):
        load_tokenizer(folder)


def test_a_folder_without_a_tokenizer_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer.*tokenizer\.json and tokenizer_config\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"cannot be loaded.*tokenizer\.json and tokenizer_config\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="does not exist"):
        load_tokenizer(tmp_path / "missing")


TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}?{% endif %}"


@pytest.fixture
def chatty(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path, byte_level_tokenizer(), chat_template=TEMPLATE))


def test_a_conversation_is_rendered_by_the_template(chatty: Tokenizer) -> None:
    messages = [{"role": "user", "content": "the fox"}]
    assert chatty.apply_chat_template(messages) == "<|user|>the fox?"
    assert chatty.apply_chat_template(messages, add_generation_prompt=False) == "<|user|>the fox"
    assert chatty.apply_chat_template(messages, chat_template="{{ mood }}", variables={"mood": "calm"}) == "calm"


def test_a_conversation_that_the_template_refuses_is_an_invalid_request(chatty: Tokenizer) -> None:
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        chatty.apply_chat_template([{"role": "user", "content": "x"}], chat_template=refusing)


def test_without_a_template_a_conversation_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, byte_level_tokenizer()))
    with pytest.raises(InvalidRequest, match="has no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_a_text_that_a_vocabulary_without_an_unknown_token_lacks_is_refused(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"known": 0}, unk_token="missing"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, words))
    assert tokenizer.encode("known", add_special_tokens=False) == [0]
    for text in ("unknown", "unknown " * 1000):
        with pytest.raises(InvalidRequest, match=r"cannot encode this text: .*tokenizer\.json"):
            tokenizer.encode(text)
