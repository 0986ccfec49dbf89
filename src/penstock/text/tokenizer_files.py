"""Files of a tokenizer's folder, and whether `tokenizer.json` alone determines how text is encoded.

Transformers (5.23) rebuilds some tokenizers from vocabulary and merges by the recipe of their class, and adds tokens
from other files. Importing it takes seconds, so `tokenizers` reads `tokenizer.json` directly where both are equivalent:
where the class uses the file as it is, or where the file follows the class's recipe exactly.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from penstock.checkpoints.hf_tokenizer import MAX_TOKENIZER_BYTES, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from penstock.checkpoints.json_file import check_regular_file, read_json_object, shown, typed_field
from penstock.errors import TokenizerError, is_for_the_program
from penstock.templates.files import ModelTemplates

_TAKEN_AS_IT_IS = {"PreTrainedTokenizerFast", "TokenizersBackend"}
# Model types whose declared class Transformers overrides with a rebuilding one.
_CLASS_OF_MODEL_TYPE = {
    "hyperclovax_vision_v2": "GPT2Tokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3_5": "Qwen3_5Tokenizer",
    "qwen3_5_moe": "Qwen3_5Tokenizer",
    "qwen3_5_moe_text": "Qwen3_5Tokenizer",
    "qwen4_exp": "Qwen3_5Tokenizer",
    "siglip2": "Siglip2Tokenizer",
}
# Settings that make Transformers do more than read tokenizer.json.
_SPECIAL_SETTINGS = ("auto_map", "fast_tokenizer_files", "split_special_tokens")
_SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_TOKEN_LISTS = ("additional_special_tokens", "extra_special_tokens")

# Most characters that a normalizer merges into one: a letter with three marks has a composed form.
_SHRINKING = {
    "NFC": 4,
    "NFD": 1,
    "NFKC": 4,
    "NFKD": 1,
    "Lowercase": 1,
    "Prepend": 1,
    "ByteLevel": 1,
}
# Pre-tokenizers that drop no text.
_KEEPS_ALL = {"ByteLevel", "Digits", "Metaspace", "UnicodeScripts", "FixedLength"}
_NUM_BYTES = 256

_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recipe by which a Transformers class builds its tokenizer, besides vocabulary and merges.

    default_tokens: special tokens where the configuration names no others.
    """

    normalizer: Mapping[str, Any] | None
    pre_tokenizer: Mapping[str, Any]
    default_tokens: Mapping[str, str]


_RECIPES = {
    "Qwen2Tokenizer": Recipe(
        normalizer={"type": "NFC"},
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _QWEN2_WORDS}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        default_tokens=dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    ),
    "GPT2Tokenizer": Recipe(
        normalizer=None,
        pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        default_tokens=dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
    ),
}


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Contents of a tokenizer's folder.

    config: `tokenizer_config.json`, or empty. model_type: from `config.json`, or None.
    special_tokens_map, added_tokens: contents of the legacy files, or empty.
    fast: `tokenizer.json`, loaded, or None without one.
    """

    folder: Path
    config: Mapping[str, Any]
    model_type: str | None
    special_tokens_map: Mapping[str, Any]
    added_tokens: Mapping[str, Any]
    fast: FastTokenizer | None

    @classmethod
    def read(cls, folder: Path) -> TokenizerFiles:
        """Read a folder. Raises TokenizerError, naming the file, when one is damaged."""
        return cls(
            folder=folder,
            config=_read_tokens(folder / TOKENIZER_CONFIG_FILE),
            model_type=_read_model_type(folder / "config.json"),
            special_tokens_map=_read_tokens(folder / "special_tokens_map.json"),
            added_tokens=read_json_object(folder / "added_tokens.json", TokenizerError, is_optional=True),
            fast=_read_fast(folder / TOKENIZER_FILE),
        )

    def special_token(self, name: str) -> str | None:
        """Text of a special token such as "eos_token", if the folder names one."""
        named = self.config.get(name, self.special_tokens_map.get(name))
        if named is None and name not in self.config and self.recipe is not None:
            named = self.recipe.default_tokens.get(name)
        return _content(named)

    @property
    def names_special_tokens(self) -> bool:
        """Whether `special_token` knows the defaults of the tokenizer's class in Transformers."""
        return self.recipe is not None or self.class_name in _TAKEN_AS_IT_IS

    def templates(self) -> ModelTemplates:
        """Chat templates of the folder. Raises TokenizerError for a damaged file."""
        tokens = {name: self.special_token(name) for name in _SPECIAL_TOKENS}
        named = {name: token for name, token in tokens.items() if token is not None}
        return ModelTemplates.of_folder(self.folder, self.config, named)

    @property
    def class_name(self) -> str:
        """Tokenizer class that Transformers uses, without the suffix "Fast"; empty if the folder names none."""
        declared = self.config.get("tokenizer_class") or ""
        name = declared if declared in _TAKEN_AS_IT_IS else declared.removesuffix("Fast")
        return _CLASS_OF_MODEL_TYPE.get(self.model_type or "", name)

    @property
    def recipe(self) -> Recipe | None:
        return _RECIPES.get(self.class_name)

    def tokenizer_json_decides(self) -> bool:
        """Whether `tokenizer.json` alone encodes and decodes as Transformers would."""
        return (
            self.fast is not None
            and not any(self.config.get(name) for name in _SPECIAL_SETTINGS)
            and not (self.folder / "tekken.json").exists()
            and type(self.fast.model).__name__ == "BPE"
            and self._class_agrees(self.fast)
            and self._tokens_agree(self.fast)
        )

    def _class_agrees(self, fast: FastTokenizer) -> bool:
        is_byte_level = (component(fast.decoder) or {}).get("type") == "ByteLevel"
        if self.class_name in _TAKEN_AS_IT_IS:
            return True
        if self.class_name == "LlamaTokenizer" and self.model_type == "llama":
            return is_byte_level  # that of Llama 3, declared by the class of Llama 2
        recipe = self.recipe
        if recipe is None or self.config.get("add_prefix_space"):
            return False
        return (
            component(fast.normalizer) == recipe.normalizer
            and component(fast.pre_tokenizer) == recipe.pre_tokenizer
            and is_byte_level
            and _is_plain_bpe(fast.model)
        )

    def _tokens_agree(self, fast: FastTokenizer) -> bool:
        """Whether `tokenizer.json` has every token that the other files name, with the same flags."""
        known = fast.get_added_tokens_decoder()
        special = {token.content for token in known.values() if token.special}
        for token_id, token in (self.config.get("added_tokens_decoder") or {}).items():
            if not _same_token(known.get(int(token_id)), token):
                return False
        if not set(self.added_tokens) <= {token.content for token in known.values()}:
            return False
        if fast.padding and fast.padding["pad_token"] not in special:
            return False
        return all(name in special for name in self._named_tokens())

    def _named_tokens(self) -> Iterator[str]:
        defaults = {} if self.recipe is None else self.recipe.default_tokens
        for source in ({**defaults, **self.config}, self.special_tokens_map):
            for key, value in source.items():
                if key in _TOKEN_LISTS:
                    values = list(value.values() if isinstance(value, dict) else value or [])
                else:
                    values = [value] if key.endswith("_token") else []
                yield from filter(None, map(_content, values))


def component(part: Any) -> Any:
    """Parsed JSON of a part of a tokenizer (normalizer, decoder, ...)."""
    return None if part is None else json.loads(part.__getstate__())


def _is_plain_bpe(model: Any) -> bool:
    options = (model.dropout, model.unk_token, model.continuing_subword_prefix, model.end_of_word_suffix)
    return not any((*options, model.fuse_unk, model.byte_fallback, model.ignore_merges))


def _content(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _same_token(known: Any, named: Mapping[str, Any]) -> bool:
    flags = ("content", "lstrip", "rstrip", "normalized", "single_word", "special")
    return known is not None and all(getattr(known, flag) == named.get(flag, False) for flag in flags)


def _read_model_type(path: Path) -> str | None:
    content = read_json_object(path, TokenizerError, is_optional=True)
    model_type: str | None = typed_field(content, "model_type", (str,), path, TokenizerError)
    return model_type


def _read_tokens(path: Path) -> Mapping[str, Any]:
    """Read a file with tokens and settings; empty without one."""
    content = read_json_object(path, TokenizerError, is_optional=True)
    typed_field(content, "tokenizer_class", (str,), path, TokenizerError)
    for name in _SPECIAL_TOKENS:
        typed_field(content, name, (str, dict), path, TokenizerError)
    for name in _TOKEN_LISTS:
        typed_field(content, name, (list, dict), path, TokenizerError)
    for token_id, token in (typed_field(content, "added_tokens_decoder", (dict,), path, TokenizerError) or {}).items():
        if not re.fullmatch("[0-9]{1,18}", token_id) or not isinstance(token, dict):
            raise TokenizerError(
                f"{path} has added_tokens_decoder with {shown(token_id)}: {shown(token)}. It must have an object by "
                "each token id."
            )
    return content


def _read_fast(path: Path) -> FastTokenizer | None:
    if not os.path.lexists(path):
        return None
    check_regular_file(path, TokenizerError, MAX_TOKENIZER_BYTES)
    try:
        return FastTokenizer.from_file(str(path))
    except BaseException as error:  # tokenizers raises bare Exceptions, and panics, which are none
        if is_for_the_program(error):
            raise
        raise TokenizerError(f"{path} is damaged: {error}. Download it again.") from error


def longest_token(fast: FastTokenizer) -> int | None:
    """Most characters of text per token; None without a limit: a tokenizer that drops text or has an unknown token."""
    added = fast.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    vocabulary = fast.get_vocab(with_added_tokens=True)
    if not _keeps_unknown(fast, vocabulary) or not _keeps_all(component(fast.pre_tokenizer)):
        return None
    shrinking = _shrinking(component(fast.normalizer))
    return None if shrinking is None else shrinking * max(map(len, vocabulary))


def _keeps_unknown(fast: FastTokenizer, vocabulary: Mapping[str, int]) -> bool:
    """Whether every character is encoded as tokens of at least one byte each."""
    model = fast.model
    if type(model).__name__ != "BPE":
        return False
    if _is_byte_level(component(fast.pre_tokenizer)) or _is_byte_level(component(fast.normalizer)):
        # Byte alphabet of `tokenizers`: printable Latin-1 characters as themselves, other bytes from U+0100 on.
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = range(0x100, 0x100 + _NUM_BYTES - len(printable))
        return all(chr(character) in vocabulary for character in [*printable, *others])
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(_NUM_BYTES))


def _is_byte_level(part: Any) -> bool:
    return part is not None and any(each["type"] == "ByteLevel" for each in _parts(part))


def _keeps_all(pre_tokenizer: Any) -> bool:
    return pre_tokenizer is None or all(
        part["type"] in _KEEPS_ALL or (part["type"] == "Split" and part["behavior"] != "Removed")
        for part in _parts(pre_tokenizer)
    )


def _shrinking(normalizer: Any) -> int | None:
    """Most characters that the normalizer merges into one; None if unknown."""
    factors = [] if normalizer is None else [_shrinking_of_part(part) for part in _parts(normalizer)]
    return None if None in factors else math.prod(filter(None, factors))


def _shrinking_of_part(part: Mapping[str, Any]) -> int | None:
    if part["type"] == "Replace":
        replaced = part["pattern"].get("String")
        return 1 if replaced is not None and 0 < len(replaced) <= len(part["content"]) else None
    return _SHRINKING.get(part["type"])


def _parts(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Flatten a sequence of parts."""
    inner = part.get("pretokenizers", part.get("normalizers")) if part["type"] == "Sequence" else None
    return [part] if inner is None else [each for nested in inner for each in _parts(nested)]
