"""Files of sentence-transformers in a model's folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.checkpoints.json_file import read_json_object
from penstock.checkpoints.sentence_transformers_modules import MODULES_FILE, Modules, TransformerFields
from penstock.errors import ModelError, UnsupportedModel

_PROMPTS_FILE = "config_sentence_transformers.json"
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
        if not os.path.lexists(folder / MODULES_FILE):
            return None
        texts = read_json_object(folder / _PROMPTS_FILE, ModelError, is_optional=True)
        if texts.get("model_type") == "ColBERT":
            raise UnsupportedModel(
                f"{folder} was saved by PyLate. Load it with MultiVectorEncoder of sentence-transformers 6, and save "
                "it again."
            )
        modules = Modules.read(folder)
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
        late = None if modules.mask is None else _late_interaction(folder, modules.transformer, modules.mask)
        return cls(
            pooling=modules.pooling,
            normalize=modules.normalize,
            dense=modules.dense,
            dense_size=_outputs_of(folder / modules.dense[-1]) if modules.dense else None,
            prompts=prompts,
            default_prompt_name=default if isinstance(default, str) and default in prompts else None,
            similarity=_similarity(texts, folder, "cosine" if late is None else "maxsim"),
            max_length=modules.transformer.max_length,
            late_interaction=late,
        )


def tokenizer_limit(folder: Path) -> int | None:
    """Most tokens of a text, as the tokenizer's files say; None if they do not."""
    limit = read_json_object(folder / "tokenizer_config.json", ModelError, is_optional=True).get("model_max_length")
    return limit if type(limit) is int and 0 < limit < _NO_LIMIT else None


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


def _late_interaction(folder: Path, transformer: TransformerFields, mask: Mapping[str, Any]) -> LateInteraction:
    """mask: configuration of the module MultiVectorMask."""
    if mask.get("keep_only_token_ids"):
        raise UnsupportedModel(f"{folder} has keep_only_token_ids, which is not supported: all tokens are scored.")
    return LateInteraction(
        query_length=transformer.query_length,
        document_length=transformer.document_length,
        expands_queries=transformer.expands_queries,
        skipped=tuple(map(str, mask.get("skiplist_words") or ())),
        skipped_in=tuple(map(str, mask.get("skiplist_tasks") or ("document",))),
    )
