"""`tokenizer.json` and `tokenizer_config.json` from the metadata of a GGUF file."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from penstock.checkpoints.gguf.fields import Metadata
from penstock.checkpoints.json_file import clipped
from penstock.errors import TokenizerError, UnsupportedModel

_TOKENS, _TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "▁"
# Characters that are compared to find the pairs that make each piece; the largest vocabularies need 60 million.
_MAX_COMPARED = 2 * 10**9
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# Ends of a turn or text that a file may not name as such, by the control token's text.
_END_TEXTS = (
    *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>"),
    *("<|eot|>", "<EOT>", "[EOT]"),
)

# Pre-tokenizer of GPT-2 (Radford et al. 2019), and the patterns of models after it, as in their `tokenizer.json`.
_GPT2: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_WORDS_WITH_MARKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DIGITS = {"type": "Digits", "individual_digits": True}


def _split(*patterns: str) -> list[dict[str, Any]]:
    return [
        *(
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in patterns
        ),
        {**_GPT2, "use_regex": False},
    ]


# Steps of the pre-tokenizer, with the names that `tokenizer.ggml.pre` has for them.
_PRE_TOKENIZERS: Sequence[tuple[list[dict[str, Any]], Sequence[str]]] = (
    ([_GPT2], ("gpt-2", "gpt2", "olmo", "jais", "phi-2", "mpt", "granite-docling")),
    (_split(_WORDS % "{1,3}"), ("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe")),
    (_split(_WORDS % ""), ("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan")),
    (_split(_WORDS_WITH_MARKS), ("qwen35",)),
    ([_DIGITS, _GPT2], ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone")),
    (_split(_O200K), ("gpt-4o", "llama4")),
    (_split(*_DEEPSEEK), ("deepseek-v3",)),
)
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3")
_NFC = ("qwen2", "qwen35", "deepseek-r1-qwen")


def tokenizer_files_of(metadata: Metadata) -> dict[str, dict[str, Any]]:
    """Return the tokenizer's files by name.

    Raises UnsupportedModel for an unknown kind of tokenizer, TokenizerError for damaged metadata.
    """
    kind = metadata.get("tokenizer.ggml.model", str)
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"{metadata.name} has tokenizer.ggml.model={kind!r}, which is not supported. Supported: gpt2 (BPE), llama "
            "(SentencePiece). Give the folder of its original tokenizer with the option tokenizer."
        )
    tokens: list[str] = _tokens(metadata)
    parts = _byte_level(metadata, tokens) if kind == "gpt2" else _sentence_piece(metadata, tokens)
    special = {name: _token(metadata, tokens, key) for name, key in _SPECIAL.items()}
    begin = special["bos"] if metadata.get("tokenizer.ggml.add_bos_token", bool, _begins(metadata, kind)) else None
    end = special["eos"] if metadata.get("tokenizer.ggml.add_eos_token", bool, False) else None
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": _added_tokens(metadata, tokens),
            "post_processor": _post_processor(tokens, begin, end),
            **parts,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **{f"{name}_token": text for name, text in special.items() if text is not None},
            **_chat_templates(metadata),
        },
    }


def end_tokens_of(metadata: Metadata) -> list[int]:
    """Ids of all tokens that end a turn or the text."""
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot", "eom")]
    tokens = metadata.list_of(_TOKENS, str) or []
    kinds = metadata.list_of(_TYPES, int) or []
    known = [
        index
        for index, (text, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (_CONTROL, _USER_DEFINED) and text in _END_TEXTS
    ]
    return sorted({*known, *(one for one in named if one is not None)})


def _tokens(metadata: Metadata) -> list[str]:
    # llama.cpp gives these names to empty tokens.
    tokens = [text or f"[EMPTY_{index}]" for index, text in enumerate(metadata.list_of(_TOKENS, str) or [])]
    if not tokens:
        raise TokenizerError(f"{metadata.name} has no {_TOKENS}. Give a tokenizer's folder with the option tokenizer.")
    if len(set(tokens)) != len(tokens):
        raise TokenizerError(f"{metadata.name} has a token twice in {_TOKENS}. Convert the model again.")
    return tokens


def _per_token(metadata: Metadata, key: str, kind: type, tokens: Sequence[str]) -> list[Any]:
    values = metadata.list_of(key, kind)
    if values is None or len(values) != len(tokens):
        found = "none" if values is None else len(values)
        raise TokenizerError(f"{metadata.name} has {len(tokens)} tokens and {found} of {key}. Convert the model again.")
    return values


def _token(metadata: Metadata, tokens: Sequence[str], key: str) -> str | None:
    index: int | None = metadata.get(f"tokenizer.ggml.{key}_token_id", int)
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        raise TokenizerError(
            f"{metadata.name} has tokenizer.ggml.{key}_token_id={index}, but {len(tokens)} tokens. Convert it again."
        )
    return tokens[index]


def _begins(metadata: Metadata, kind: str) -> bool:
    """Whether a text begins with the BOS token, where the file does not say."""
    return kind == "llama" or metadata.get("tokenizer.ggml.pre", str) in _WHOLE_WORDS_FIRST


def _added_tokens(metadata: Metadata, tokens: Sequence[str]) -> list[dict[str, Any]]:
    kinds = _per_token(metadata, _TYPES, int, tokens)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": index, "content": text, **flags, "special": kind == _CONTROL}
        for index, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED) and text != f"[EMPTY_{index}]"
    ]


def _byte_level(metadata: Metadata, tokens: Sequence[str]) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre", str)
    steps = next((steps for steps, names in _PRE_TOKENIZERS if pre in names), None)
    if steps is None:
        known = sorted(name for _, names in _PRE_TOKENIZERS for name in names)
        raise UnsupportedModel(
            f"{metadata.name} has tokenizer.ggml.pre={pre!r}, which is not known here. Supported: "
            f"{', '.join(known)}. Give the folder of its original tokenizer with the option "
            "tokenizer."
        )
    merges = [merge.split(" ") for merge in metadata.list_of("tokenizer.ggml.merges", str) or []]
    wrong = next((merge for merge in merges if len(merge) != 2), None)
    if wrong is not None:
        raise TokenizerError(f"{metadata.name} has the merge {clipped(repr(wrong))}, which is not a pair of tokens.")
    return {
        "normalizer": {"type": "NFC"} if pre in _NFC else None,
        "pre_tokenizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(tokens, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST),
    }


def _sentence_piece(metadata: Metadata, tokens: Sequence[str]) -> dict[str, Any]:
    scores = _per_token(metadata, "tokenizer.ggml.scores", float, tokens)
    kinds = _per_token(metadata, _TYPES, int, tokens)
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", bool, True)
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    unknown = _token(metadata, tokens, "unknown") or "<unk>"
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*prefix, {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": _bpe(
            tokens,
            _merges_by_score(tokens, scores, kinds),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=unknown if unknown in tokens else None,
        ),
    }


def _merges_by_score(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[list[str]]:
    """Return the pairs that make each piece, best score first: SentencePiece's order of merging.

    Raises TokenizerError for tokens whose comparison would take minutes.
    """
    ids = {text: index for index, text in enumerate(tokens)}
    lengths = sorted({len(text) for text in tokens})
    merges, num_characters = [], 0
    for index, text in enumerate(tokens):
        if kinds[index] != _NORMAL:
            continue
        cuts = lengths[: bisect_left(lengths, len(text))]
        num_characters += len(cuts) * len(text)
        if num_characters > _MAX_COMPARED:
            raise TokenizerError(
                f"{_TOKENS} has tokens of too many lengths, up to {lengths[-1]:,} characters, to find the pairs "
                "that make them. Give a tokenizer's folder with the option tokenizer."
            )
        merges += [
            (-scores[index], ids[text[:cut]], ids[text[cut:]])
            for cut in cuts
            if text[:cut] in ids and text[cut:] in ids
        ]
    return [[tokens[left], tokens[right]] for _, left, right in sorted(merges)]


def _bpe(tokens: Sequence[str], merges: Sequence[Sequence[str]], **options: Any) -> dict[str, Any]:
    defaults = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    vocabulary = {text: index for index, text in enumerate(tokens)}
    return {"type": "BPE", **defaults, **options, "vocab": vocabulary, "merges": merges}


def _post_processor(tokens: Sequence[str], begin: str | None, end: str | None) -> dict[str, Any] | None:
    around = [text for text in (begin, end) if text is not None]
    if not around:
        return None

    def template(name: str, type_id: int) -> list[dict[str, Any]]:
        sequence = {"Sequence": {"id": name, "type_id": type_id}}
        before, after = ([{"SpecialToken": {"id": text, "type_id": type_id}}] if text else [] for text in (begin, end))
        return [*before, sequence, *after]

    return {
        "type": "TemplateProcessing",
        "single": template("A", 0),
        "pair": [*template("A", 0), *template("B", 1)],
        "special_tokens": {text: {"id": text, "ids": [tokens.index(text)], "tokens": [text]} for text in around},
    }


def _chat_templates(metadata: Metadata) -> dict[str, Any]:
    """The field `chat_template`: a text, or a list if there are several by name."""
    prefix = "tokenizer.chat_template"
    default = metadata.get(prefix, str)
    named = [
        {"name": key.removeprefix(f"{prefix}."), "template": metadata.required(key, str)}
        for key in metadata.keys_under(f"{prefix}.")
    ]
    if not named:
        return {} if default is None else {"chat_template": default}
    first = [] if default is None else [{"name": "default", "template": default}]
    return {"chat_template": [*first, *named]}
