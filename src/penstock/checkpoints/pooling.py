"""Pooling configuration of a checkpoint: what its files say of embeddings, scores and classes.

The files are those of Transformers (`id2label`, `problem_type`) and of sentence-transformers (`modules.json` with its
folders, `config_sentence_transformers.json`, `sentence_bert_config.json`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.checkpoints.architectures import MODERN_BERT, PROCESS_REWARD, Architecture, Use
from penstock.checkpoints.sentence_transformers import LateInteraction, SentenceTransformersFiles
from penstock.errors import ModelError

ACTIVATIONS = ("identity", "sigmoid", "softmax")


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
        """Describe the pooling in a line for the log, with the defaults that no file overrides."""
        what = [f"tasks {', '.join(self.tasks)}", f"pooling {self.pooling}"]
        if self.has_classes:
            what.append(f"{len(self.labels)} classes with {self.activation}")
        else:
            what.append("normalised" if self.normalize else "not normalised")
        if not self.is_causal:
            what.append("attention in both directions")
        assumed = f" (assumed, since no file says so: {', '.join(self.defaults)})" if self.defaults else ""
        return ", ".join(what) + assumed


def pooling_of_files(
    architecture: Architecture, hf_config: Mapping[str, Any], files: SentenceTransformersFiles, convert: str
) -> PoolingConfig:
    """Pooling configuration of a checkpoint by its files alone, as `convert` uses it. Raises ModelError."""
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
        labels = class_labels(hf_config, num_rewards=architecture.num_rewards, from_token=from_token)
        if architecture.encoder == MODERN_BERT:
            default_pooling = hf_config.get("classifier_pooling", "cls")
            if default_pooling not in ("cls", "mean"):
                raise ModelError(f"config.json has classifier_pooling={default_pooling!r}. Allowed: cls, mean.")
        return _classifier(use, labels, hf_config, tuple(from_token), default_pooling, common)
    normalize = files.normalize
    if normalize is None:
        normalize = True
        defaults.append("normalised")
    if architecture.is_page_encoder:
        common["similarity"] = "maxsim"
        return PoolingConfig(tasks=("token_embed",), pooling="last", normalize=normalize, **common)
    if architecture.is_dual_encoder:
        return PoolingConfig(tasks=("embed",), pooling="last", normalize=normalize, defaults=("normalised",), **common)
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


def class_labels(hf_config: Mapping[str, Any], *, num_rewards: int = 0, from_token: Any) -> tuple[str, ...]:
    """Names of the classes, by number. Raises ModelError."""
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
