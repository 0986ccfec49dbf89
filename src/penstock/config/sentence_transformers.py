"""Files of sentence-transformers in a model's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config.json_file import read_json_object
from penstock.errors import ModelError, UnsupportedModel

MODULES_FILE = "modules.json"
_PROMPTS_FILE = "config_sentence_transformers.json"
# Configuration of the tokenizing module, by the names of its versions.
_TRANSFORMER_FILES = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json")
# Transformers writes a larger number where there is no limit.
_NO_LIMIT = 10**9
_SIMILARITIES = {"cosine": "cosine", "dot": "dot", "dot_score": "dot", "euclidean": "euclidean"}
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
class SentenceTransformersFiles:
    """Contents of the files; None for what they do not say. Fields as in `PoolingConfig`.

    dense_size: outputs of the last dense layer.
    """

    pooling: str | None = None
    normalize: bool | None = None
    dense: tuple[str, ...] = ()
    dense_size: int | None = None
    activation: str | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity: str = "cosine"
    max_length: int | None = None

    @classmethod
    def read(cls, folder: Path) -> SentenceTransformersFiles | None:
        """Read the files; None without `modules.json`.

        Raises ModelError for damaged ones, UnsupportedModel for modules that Penstock does not have.
        """
        path = folder / MODULES_FILE
        if not os.path.lexists(path):
            return None
        pooling, normalize, dense, activation = None, False, list[str](), None
        for module in _read_modules(path):
            kind, place = str(module.get("type", "")).rsplit(".", 1)[-1], str(module.get("path") or "")
            if kind == "Transformer":
                continue
            if kind == "Pooling":
                pooling = _pooling_of(folder / place)
            elif kind == "Normalize":
                normalize = True
            elif kind == "Dense":
                dense.append(place)
            elif kind != "Dropout":
                raise UnsupportedModel(
                    f"{path} has the module {kind!r}, which is not supported. Supported: Transformer, Pooling, Dense, "
                    "Normalize, Dropout."
                )
        texts = read_json_object(folder / _PROMPTS_FILE, ModelError, is_optional=True)
        named = texts.get("prompts")
        prompts = {str(key): str(text) for key, text in named.items() if text} if isinstance(named, Mapping) else {}
        default = texts.get("default_prompt_name")
        return cls(
            pooling=pooling,
            normalize=normalize,
            dense=tuple(dense),
            dense_size=_outputs_of(folder / dense[-1]) if dense else None,
            activation=activation,
            prompts=prompts,
            default_prompt_name=default if isinstance(default, str) and default in prompts else None,
            similarity=_SIMILARITIES.get(str(texts.get("similarity_fn_name") or "cosine"), "cosine"),
            max_length=_max_length(folder),
        )


def tokenizer_limit(folder: Path) -> int | None:
    """Most tokens of a text, as the tokenizer's files say; None if they do not."""
    limit = read_json_object(folder / "tokenizer_config.json", ModelError, is_optional=True).get("model_max_length")
    return limit if type(limit) is int and 0 < limit < _NO_LIMIT else None


def _read_modules(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, list) or not all(isinstance(module, dict) for module in content):
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


def _max_length(folder: Path) -> int | None:
    for name in _TRANSFORMER_FILES:
        length = read_json_object(folder / name, ModelError, is_optional=True).get("max_seq_length")
        if type(length) is int and length > 0:
            return length
    return None
