"""Options of pooling: the runner, the use of its model, and what replaces the pooling of the checkpoint's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.checkpoints.architectures import Architecture, Use
from penstock.checkpoints.json_file import parse_json_text, shown
from penstock.checkpoints.pooling import ACTIVATIONS, PoolingConfig, class_labels, pooling_of_files
from penstock.checkpoints.sentence_transformers import SentenceTransformersFiles, tokenizer_limit
from penstock.config.checks import check_choice, did_you_mean
from penstock.errors import ConfigError

# Output head of the models of this file.
POOL = "pool"
RUNNERS = ("auto", "generate", "pooling")
CONVERTS = ("auto", "none", "embed", "classify")
POOLINGS = ("last", "mean", "cls", "max")
# Tasks of one vector per token.
TOKEN_TASKS = ("token_embed", "token_classify")
_OPTIONS = (
    "pooling_type",
    "seq_pooling_type",
    "normalize",
    "use_activation",
    "activation",
    "dimensions",
    "classifier_from_token",
    "query_expansion",
)


def read_pooling(
    folder: Path, hf_config: Mapping[str, Any], *, runner: str, convert: str, pooler_config: Any
) -> PoolingConfig | None:
    """Return the pooling of a model, or None for one that generates text.

    Raises ConfigError for options that do not fit the model, ModelError for damaged files.
    """
    check_choice("runner", runner, RUNNERS)
    check_choice("convert", convert, CONVERTS)
    options = _read_options(pooler_config)
    architecture = Architecture.of(hf_config)
    files = SentenceTransformersFiles.read(folder)
    says_so = architecture.use is not Use.GENERATE or files is not None
    asks = runner == "pooling" or (runner == "auto" and (convert in ("embed", "classify") or options))
    if runner == "generate" or not (says_so or asks):
        if runner == "generate" and architecture.use is not Use.GENERATE:
            raise ConfigError(
                f"runner='generate' is not valid for {architecture.name}, which has no language model head. "
                "Allowed: 'pooling' or 'auto'."
            )
        if convert in ("embed", "classify") or options:
            name = "pooler_config" if options else f"convert={convert!r}"
            raise ConfigError(f"{name} has no meaning with runner='generate'. Leave it out, or give runner='pooling'.")
        return None
    config = pooling_of_files(architecture, hf_config, files or SentenceTransformersFiles(), convert)
    if config.max_length is None and (files is not None or not architecture.is_decoder):
        config = replace(config, max_length=tokenizer_limit(folder))
    return _with_options(config, options, convert)


def _read_options(given: Any) -> dict[str, Any]:
    """Options of `pooler_config`: a dictionary, or one as JSON."""
    if given is None:
        return {}
    if isinstance(given, str):
        try:
            given = parse_json_text(given)
        except ValueError as error:
            raise ConfigError(f"pooler_config={shown(given)} is not JSON: {error}.") from error
    if not isinstance(given, Mapping):
        raise ConfigError(f"pooler_config={given!r} is not valid. Allowed: a dictionary.")
    for name, value in given.items():
        if name not in _OPTIONS:
            raise ConfigError(
                f"pooler_config has {name!r} (given: {value!r}).{did_you_mean(str(name), _OPTIONS)} "
                f"Allowed: {', '.join(_OPTIONS)}."
            )
    return {name: value for name, value in given.items() if value is not None}


def _with_options(config: PoolingConfig, options: dict[str, Any], convert: str) -> PoolingConfig:
    changes: dict[str, Any] = {}
    _check_query_expansion(config, options)
    pooling = options.get("seq_pooling_type", options.get("pooling_type"))
    if pooling is not None:
        pooling = {"lasttoken": "last", "first": "cls"}.get(str(pooling).lower(), str(pooling).lower())
        check_choice("pooler_config['pooling_type']", pooling, POOLINGS)
        changes["pooling"] = pooling
    normalize = options.get("normalize", options.get("use_activation"))
    if normalize is not None:
        if type(normalize) is not bool:
            raise ConfigError(f"pooler_config has normalize={normalize!r}. Allowed: true or false.")
        if config.has_classes:
            if not normalize:
                changes["activation"] = "identity"
        else:
            changes["normalize"] = normalize
    if "activation" in options:
        check_choice("pooler_config['activation']", options["activation"], ACTIVATIONS)
        changes["activation"] = options["activation"]
    if "dimensions" in options:
        sizes = options["dimensions"]
        sizes = [sizes] if type(sizes) is int else sizes
        if not isinstance(sizes, (list, tuple)) or not all(type(size) is int and size > 0 for size in sizes):
            raise ConfigError(f"pooler_config has dimensions={sizes!r}. Allowed: sizes of embeddings.")
        changes["dimensions"] = tuple(sizes)
    if "classifier_from_token" in options:
        config = _from_tokens(config, options["classifier_from_token"])
    elif convert == "classify" and not config.has_classes:
        raise ConfigError(
            f"convert='classify' needs the classes of {config.architecture.name}, which has no classifier. Give "
            "pooler_config={'classifier_from_token': ['no', 'yes']} for a reranker that answers with these tokens, or "
            "convert='embed'."
        )
    if convert == "none":
        changes["tasks"] = tuple(task for task in config.tasks if task in TOKEN_TASKS)
        if not config.similarity.endswith("maxsim"):
            changes["similarity"] = "maxsim"
    changed = {"pooling": "pooling", "normalize": "normalised", "activation": "activation"}
    kept = tuple(one for one in config.defaults if not any(one.startswith(changed.get(name, "\0")) for name in changes))
    return replace(config, **changes, defaults=kept)


def _check_query_expansion(config: PoolingConfig, options: Mapping[str, Any]) -> None:
    """Refuse queries that are filled up with mask tokens, unless the options say to leave them as they are."""
    is_off = options.get("query_expansion") is False
    if "query_expansion" in options and not is_off:
        raise ConfigError(f"pooler_config has query_expansion={options['query_expansion']!r}. Allowed: false.")
    if config.late_interaction is not None and config.late_interaction.expands_queries and not is_off:
        raise ConfigError(
            f"{config.architecture.name} was trained with queries that are filled up with mask tokens (query_expansion "
            "in sentence_bert_config.json), which is not supported. With pooler_config={'query_expansion': false} "
            "queries have their own tokens only, and other scores."
        )


def _from_tokens(config: PoolingConfig, tokens: Any) -> PoolingConfig:
    if not isinstance(tokens, (list, tuple)) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ConfigError(f"classifier_from_token={tokens!r} is not valid. Allowed: a list of tokens as text.")
    if not config.architecture.has_lm_head:
        raise ConfigError(
            f"classifier_from_token={tokens!r} needs a language model head, which {config.architecture.name} has not."
        )
    labels = class_labels({}, from_token=tokens)
    one = len(labels) == 1
    return replace(
        config,
        tasks=("classify", "score", "token_classify") if one else ("classify", "token_classify"),
        labels=labels,
        classifier_from_token=tuple(tokens),
        activation="sigmoid" if one else "softmax",
        pooling="last",
        normalize=False,
        dense=(),
        dimensions=None,
        defaults=(),
    )
