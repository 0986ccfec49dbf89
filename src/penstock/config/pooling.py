"""Pooling configuration: what a checkpoint says of embeddings, scores and classes, and what the options say.

The files are those of Transformers (`id2label`, `problem_type`) and of sentence-transformers (`modules.json` with its
folders, `config_sentence_transformers.json`, `sentence_bert_config.json`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.config.architectures import MODERN_BERT, PROCESS_REWARD, Architecture, Use
from penstock.config.checks import check_choice, did_you_mean
from penstock.config.json_file import parse_json_text, shown
from penstock.config.sentence_transformers import LateInteraction, SentenceTransformersFiles, tokenizer_limit
from penstock.errors import ConfigError, ModelError

# Output head of the models of this file.
POOL = "pool"
RUNNERS = ("auto", "generate", "pooling")
CONVERTS = ("auto", "none", "embed", "classify")
POOLINGS = ("last", "mean", "cls", "max")
ACTIVATIONS = ("identity", "sigmoid", "softmax")
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


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """tasks: that the model can do; the first is the default.
    architecture: parts of the model class's name.
    pooling: vector of a text among those of its tokens: "last", "mean", "cls" (the first) or "max".
    normalize: whether embeddings have the length 1.
    dense: folders of sentence-transformers' dense layers after pooling.
    activation: of the classes' logits: "softmax", "sigmoid" or "identity".
    labels: names of the classes, by number.
    classifier_from_token: tokens of the language model's head that become the classes: a reranker's "no" and "yes".
    dimensions: sizes that embeddings may be cut to; None if the model was not trained for that, empty for any size.
    is_causal: whether tokens see the tokens before them only.
    prompts: texts that are put before a text, by name. default_prompt_name: None for none.
    similarity: of two embeddings: "cosine", "dot", "euclidean" or "manhattan"; of embeddings per token "maxsim" or
    "meanmaxsim".
    late_interaction: of a model that was made for it; None for others.
    max_length: most tokens of a text, if less than the model's positions; None for those.
    embedding_size: of the embeddings; None if unknown.
    defaults: what no file says, for the log.
    """

    tasks: tuple[str, ...]
    architecture: Architecture
    pooling: str
    normalize: bool = False
    dense: tuple[str, ...] = ()
    activation: str = "identity"
    labels: tuple[str, ...] = ()
    classifier_from_token: tuple[str, ...] = ()
    dimensions: tuple[int, ...] | None = None
    is_causal: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity: str = "cosine"
    max_length: int | None = None
    embedding_size: int | None = None
    late_interaction: LateInteraction | None = None
    defaults: tuple[str, ...] = ()

    @property
    def has_classes(self) -> bool:
        """Whether hidden states become logits of classes."""
        return bool(self.labels)

    @property
    def is_pooled_in_chunks(self) -> bool:
        """Whether a text may be computed in several steps."""
        return self.architecture.decoder is not None and self.is_causal

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether the vector of a text is right without the hidden states of its first tokens."""
        return self.is_pooled_in_chunks and self.pooling == "last"

    def describe(self) -> str:
        """One line for the log, with the defaults that no file overrides."""
        what = [f"tasks {', '.join(self.tasks)}", f"pooling {self.pooling}"]
        if self.has_classes:
            what.append(f"{len(self.labels)} classes with {self.activation}")
        else:
            what.append("normalised" if self.normalize else "not normalised")
        if not self.is_causal:
            what.append("attention in both directions")
        assumed = f" (assumed, since no file says so: {', '.join(self.defaults)})" if self.defaults else ""
        return ", ".join(what) + assumed


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
    config = _of_files(architecture, hf_config, files or SentenceTransformersFiles(), convert)
    if config.max_length is None and (files is not None or not architecture.is_decoder):
        config = replace(config, max_length=tokenizer_limit(folder))
    return _with_options(config, options, convert)


def _of_files(
    architecture: Architecture, hf_config: Mapping[str, Any], files: SentenceTransformersFiles, convert: str
) -> PoolingConfig:
    use = architecture.use
    from_token = hf_config.get("classifier_from_token") or ()
    if convert == "embed" and use is Use.CLASSIFY:
        use = Use.EMBED
    is_causal = _is_causal(architecture, hf_config)
    defaults: list[str] = []
    default_pooling = "last" if architecture.is_decoder else "cls"
    pooling = files.pooling
    if pooling is None:
        pooling = default_pooling
        if use is not Use.CLASSIFY and use is not Use.CLASSIFY_TOKENS:
            defaults.append(f"pooling {pooling}")
    common: dict[str, Any] = {
        "architecture": architecture,
        "is_causal": is_causal,
        "prompts": files.prompts,
        "default_prompt_name": files.default_prompt_name,
        "similarity": files.similarity,
        "max_length": files.max_length,
        "late_interaction": files.late_interaction,
    }
    if use in (Use.CLASSIFY, Use.CLASSIFY_TOKENS, Use.REWARD) or from_token:
        labels = _labels(hf_config, num_rewards=architecture.num_rewards, from_token=from_token)
        if architecture.encoder == MODERN_BERT:
            default_pooling = hf_config.get("classifier_pooling", "cls")
            if default_pooling not in ("cls", "mean"):
                raise ModelError(f"config.json has classifier_pooling={default_pooling!r}. Allowed: cls, mean.")
        return _classifier(use, labels, hf_config, tuple(from_token), default_pooling, common)
    normalize = files.normalize
    if normalize is None:
        normalize = True
        defaults.append("normalised")
    return PoolingConfig(
        tasks=("embed", "token_embed") if files.late_interaction is None else ("token_embed",),
        pooling=pooling,
        normalize=normalize,
        dense=files.dense,
        dimensions=_dimensions(hf_config),
        embedding_size=files.dense_size if files.dense else _hidden_size(hf_config),
        defaults=tuple(defaults),
        **common,
    )


def _classifier(
    use: Use,
    labels: tuple[str, ...],
    hf_config: Mapping[str, Any],
    from_token: tuple[str, ...],
    pooling: str,
    common: dict[str, Any],
) -> PoolingConfig:
    is_of_steps = common["architecture"].suffix == PROCESS_REWARD
    activation, defaults = ("softmax", ()) if is_of_steps else _activation(use, len(labels), hf_config)
    tasks: tuple[str, ...]
    if use in (Use.CLASSIFY_TOKENS, Use.REWARD):
        tasks = ("token_classify",)
    else:
        tasks = ("classify", "score", "token_classify") if len(labels) == 1 else ("classify", "token_classify")
    return PoolingConfig(
        tasks=tasks,
        pooling=pooling,
        activation=activation,
        labels=labels,
        classifier_from_token=from_token,
        defaults=defaults,
        **common,
    )


def _activation(use: Use, num_labels: int, hf_config: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Activation of the logits, and what was assumed."""
    own = hf_config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, Mapping) else None
    named = named or hf_config.get("sbert_ce_default_activation_function")
    if isinstance(named, str):
        name = named.rsplit(".", 1)[-1].lower()
        if name not in ACTIVATIONS:
            raise ModelError(
                f"config.json has the activation {named!r}. Allowed: {', '.join(ACTIVATIONS)} of torch.nn."
            )
        return name, ()
    problem = hf_config.get("problem_type")
    if use is Use.REWARD or problem == "regression":
        return "identity", ()
    if problem in ("single_label_classification", "multi_label_classification"):
        return ("softmax" if problem.startswith("single") else "sigmoid"), ()
    activation = "sigmoid" if num_labels == 1 and use is not Use.CLASSIFY_TOKENS else "softmax"
    return activation, (f"activation {activation}",)


def _labels(hf_config: Mapping[str, Any], *, num_rewards: int = 0, from_token: Any) -> tuple[str, ...]:
    if from_token:
        return ("LABEL_0",) if len(from_token) <= 2 else tuple(map(str, from_token))
    if num_rewards:
        return tuple(f"LABEL_{index}" for index in range(int(hf_config.get("num_labels") or num_rewards)))
    named = hf_config.get("id2label")
    if isinstance(named, Mapping) and named:
        try:
            return tuple(str(named[key]) for key in sorted(named, key=int))
        except ValueError as error:
            raise ModelError(f"config.json has id2label={named!r}. Its keys must be numbers.") from error
    return tuple(f"LABEL_{index}" for index in range(int(hf_config.get("num_labels") or 2)))


def _dimensions(hf_config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Sizes of Matryoshka embeddings (Kusupati et al. 2022)."""
    sizes = hf_config.get("matryoshka_dimensions")
    if isinstance(sizes, list) and sizes and all(type(size) is int and size > 0 for size in sizes):
        return tuple(sorted(sizes))
    return () if hf_config.get("is_matryoshka") else None


def _hidden_size(hf_config: Mapping[str, Any]) -> int | None:
    sizes = (hf_config.get(name) for name in ("hidden_size", "n_embd", "dim", "d_model"))
    return next((size for size in sizes if type(size) is int), None)


def _is_causal(architecture: Architecture, hf_config: Mapping[str, Any]) -> bool:
    if not architecture.is_decoder:
        return False
    bidirectional = hf_config.get("use_bidirectional_attention")
    return not (bidirectional is True or bidirectional == "all" or hf_config.get("is_causal") is False)


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
    labels = _labels({}, from_token=tokens)
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
