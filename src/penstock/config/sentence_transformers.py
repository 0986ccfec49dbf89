"""Files of sentence-transformers in a model's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from penstock.config.json_file import read_json_object, shown
from penstock.errors import ModelError, UnsupportedModel

MODULES_FILE = "modules.json"
_PROMPTS_FILE = "config_sentence_transformers.json"
# Configuration of the tokenizing module, by the names of its versions.
_TRANSFORMER_FILES = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json")
# Transformers writes a larger number where there is no limit.
_NO_LIMIT = 10**9
_SIMILARITIES = {
    "cosine": "cosine",
    "dot": "dot",
    "dot_score": "dot",
    "euclidean": "euclidean",
    "manhattan": "manhattan",
    "maxsim": "maxsim",
    "meanmaxsim": "meanmaxsim",
}
# Inputs of sentence-transformers' modules: a vector per text, and one per token.
_TEXT, _TOKENS = "sentence_embedding", "token_embeddings"
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_NAMES = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last", "last": "last"}


@dataclass(frozen=True, slots=True)
class LateInteraction:
    """Late interaction of an embedding per token (Khattab and Zaharia 2020, https://arxiv.org/abs/2004.12832).

    query_length, document_length: most tokens of each; None for the model's.
    expands_queries: whether the model was trained with queries that are filled up with mask tokens.
    skipped: tokens that scores leave out, by their texts, in the texts of these roles: "query" and "document".
    """

    query_length: int | None = None
    document_length: int | None = None
    expands_queries: bool = False
    skipped: tuple[str, ...] = ()
    skipped_in: tuple[str, ...] = ("document",)

    def length(self, role: str) -> int | None:
        """Most tokens of a text of this role."""
        return self.query_length if role == "query" else self.document_length


@dataclass(frozen=True, slots=True)
class SentenceTransformersFiles:
    """Contents of the files; None for what they do not say. Fields as in `PoolingConfig`.

    dense_size: outputs of the last dense layer.
    """

    pooling: str | None = None
    normalize: bool | None = None
    dense: tuple[str, ...] = ()
    dense_size: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity: str = "cosine"
    max_length: int | None = None
    late_interaction: LateInteraction | None = None

    @classmethod
    def read(cls, folder: Path) -> SentenceTransformersFiles | None:
        """Read the files; None without `modules.json`.

        Raises ModelError for damaged ones, UnsupportedModel for modules that Penstock does not have.
        """
        path = folder / MODULES_FILE
        if not os.path.lexists(path):
            return None
        modules = _Modules.read(folder, path)
        texts = read_json_object(folder / _PROMPTS_FILE, ModelError, is_optional=True)
        if texts.get("model_type") == "ColBERT":
            raise UnsupportedModel(
                f"{folder} was saved by PyLate. Load it with MultiVectorEncoder of sentence-transformers 6, and save "
                "it again."
            )
        named = texts.get("prompts")
        # An empty one says that these texts have none, not even the default one.
        prompts = {str(key): str(text or "") for key, text in named.items()} if isinstance(named, Mapping) else {}
        default = texts.get("default_prompt_name")
        # sentence-transformers has these two without a prompt, where the file does not.
        if default is not None and str(default) not in {"query", "document", *prompts}:
            raise ModelError(
                f"{folder / _PROMPTS_FILE} has default_prompt_name={default!r}, which is none of its prompts: "
                f"{', '.join(prompts) or 'it has none'}."
            )
        late = None if modules.mask is None else _late_interaction(folder, modules.mask)
        return cls(
            pooling=modules.pooling,
            normalize=modules.normalize,
            dense=modules.dense,
            dense_size=_outputs_of(folder / modules.dense[-1]) if modules.dense else None,
            prompts=prompts,
            default_prompt_name=default if isinstance(default, str) and default in prompts else None,
            similarity=_similarity(texts, folder, "cosine" if late is None else "maxsim"),
            max_length=_positive(_transformer_content(folder).get("max_seq_length")),
            late_interaction=late,
        )


@dataclass(frozen=True, slots=True)
class _Modules:
    """Modules after the one that tokenises and runs the model. mask: configuration of MultiVectorMask."""

    pooling: str | None
    normalize: bool
    dense: tuple[str, ...]
    mask: Mapping[str, Any] | None

    @classmethod
    def read(cls, folder: Path, path: Path) -> _Modules:
        pooling, normalize, dense, mask, inputs = None, False, list[str](), None, set[str]()
        for module in _read_modules(path):
            kind, place = str(module.get("type", "")).rsplit(".", 1)[-1], _place_of(module, path)
            content = read_json_object(folder / place / "config.json", ModelError, is_optional=True)
            if kind == "Pooling":
                pooling = _pooling_of(folder / place)
            elif kind == "Normalize":
                normalize = True
            elif kind == "Dense":
                dense.append(place)
            elif kind == "MultiVectorMask":
                mask = content
            elif kind not in ("Transformer", "Dropout"):
                raise UnsupportedModel(
                    f"{path} has the module {kind!r}, which is not supported. Supported: Transformer, Pooling, Dense, "
                    "Normalize, Dropout, MultiVectorMask."
                )
            if kind in ("Normalize", "Dense"):
                inputs.add(str(content.get("module_input_name") or _TEXT))
        if inputs - {_TEXT if mask is None else _TOKENS}:
            raise UnsupportedModel(
                f"{path} has Dense or Normalize with the input {', '.join(sorted(inputs))}, which is not supported. "
                f"Supported: {_TEXT} after Pooling, {_TOKENS} beside MultiVectorMask."
            )
        return cls(pooling, normalize, tuple(dense), mask)


def tokenizer_limit(folder: Path) -> int | None:
    """Most tokens of a text, as the tokenizer's files say; None if they do not."""
    limit = read_json_object(folder / "tokenizer_config.json", ModelError, is_optional=True).get("model_max_length")
    return limit if type(limit) is int and 0 < limit < _NO_LIMIT else None


def _place_of(module: Mapping[str, Any], path: Path) -> str:
    """Folder of a module, relative to the model's; "" for the model's own. Raises ModelError for one elsewhere."""
    place = str(module.get("path") or "")
    if PurePath(place).is_absolute() or ".." in PurePath(place).parts or "\0" in place:
        raise ModelError(
            f"{path} has the path {shown(place)} for {shown(module.get('type'))}, which is not in the model's folder. "
            "Allowed: names of folders beside the file. Download the model again."
        )
    return place


def _read_modules(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, list) or not content or not all(isinstance(module, dict) for module in content):
        raise ModelError(f"{path} is not a list of modules.")
    return content


def _pooling_of(folder: Path) -> str:
    path = folder / "config.json"
    content = read_json_object(path, ModelError)
    if content.get("include_prompt") is False:
        raise UnsupportedModel(f"{path} has include_prompt=false, which is not supported: prompts are pooled too.")
    named = content.get("pooling_mode")
    if isinstance(named, str):
        modes = [_NAMES.get(named, named)]
    elif isinstance(named, list):
        modes = [_NAMES.get(str(one), str(one)) for one in named]
    else:
        modes = [name for mode, name in _MODES.items() if content.get(mode) is True]
    if len(modes) != 1 or modes[0] not in _NAMES.values():
        raise UnsupportedModel(
            f"{path} pools by {' and '.join(modes) or 'nothing'}, which is not supported. Supported: one of "
            f"{', '.join(sorted(set(_NAMES.values())))}."
        )
    return modes[0]


def _outputs_of(folder: Path) -> int | None:
    size = read_json_object(folder / "config.json", ModelError).get("out_features")
    return size if type(size) is int else None


def _similarity(texts: Mapping[str, Any], folder: Path, default: str) -> str:
    name = str(texts.get("similarity_fn_name") or default)
    if name not in _SIMILARITIES:
        raise UnsupportedModel(
            f"{folder / _PROMPTS_FILE} has similarity_fn_name={name!r}. Supported: {', '.join(_SIMILARITIES)}."
        )
    return _SIMILARITIES[name]


def _late_interaction(folder: Path, mask: Mapping[str, Any]) -> LateInteraction:
    """mask: configuration of the module MultiVectorMask."""
    if mask.get("keep_only_token_ids"):
        raise UnsupportedModel(f"{folder} has keep_only_token_ids, which is not supported: all tokens are scored.")
    content = _transformer_content(folder)
    return LateInteraction(
        query_length=_positive(content.get("query_length")),
        document_length=_positive(content.get("document_length")),
        expands_queries=content.get("query_expansion") is not None,
        skipped=tuple(map(str, mask.get("skiplist_words") or ())),
        skipped_in=tuple(map(str, mask.get("skiplist_tasks") or ("document",))),
    )


def _transformer_content(folder: Path) -> Mapping[str, Any]:
    """Configuration of the tokenizing module."""
    found = (read_json_object(folder / name, ModelError, is_optional=True) for name in _TRANSFORMER_FILES)
    return next((content for content in found if content), {})


def _positive(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None
