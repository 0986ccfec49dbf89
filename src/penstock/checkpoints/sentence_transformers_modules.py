"""Modules of sentence-transformers, by `modules.json` and their own files: each of their fields is read, or refused.

What the fields mean: the constructors of its modules (https://sbert.net/docs/package_reference/sentence_transformer/
modules.html).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from penstock.checkpoints.json_file import read_json_object, shown, typed_field
from penstock.errors import ModelError, UnsupportedModel

MODULES_FILE = "modules.json"
# Names of the Transformer module's file, by the kinds of its models; the first one counts.
_TRANSFORMER_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
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
# Order of the modules that compute something.
_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")
_TASKS = ("feature-extraction", "sequence-classification")
_OUTPUTS = ("last_hidden_state", "logits")
# Arguments, with the names of versions, and those of them that change no result here.
_LOADING = frozenset({"cache_dir", "local_files_only", "revision", "token", "trust_remote_code"})
_ARGUMENTS: Mapping[str, frozenset[str]] = {
    "model_args": _LOADING | {"attn_implementation", "device_map", "dtype", "low_cpu_mem_usage", "torch_dtype"},
    "tokenizer_args": _LOADING | {"model_max_length", "padding_side", "use_fast"},
    "config_args": _LOADING,
}
_NEWER_NAMES = {"model_args": "model_kwargs", "tokenizer_args": "processor_kwargs", "config_args": "config_kwargs"}
_PADDING = frozenset({"pad_to_multiple_of", "padding", "return_tensors"})
_READ = {
    *(
        "max_seq_length",
        "do_lower_case",
        "query_length",
        "document_length",
        "query_expansion",
        "tokenizer_name_or_path",
    ),
    *("transformer_task", "modality_config", "module_output_name", "processing_kwargs"),
    *("unpad_inputs", "cache_dir", "backend", "__version__"),
    *_NEWER_NAMES,
    *_NEWER_NAMES.values(),
}
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransformerFields:
    """Fields of the Transformer module. path: of its file, for errors; None without one.

    max_length: most tokens of a text. lower_cases: whether texts are lowered before they are tokenised.
    query_length, document_length, expands_queries: of late interaction.
    """

    path: Path | None = None
    max_length: int | None = None
    lower_cases: bool = False
    query_length: int | None = None
    document_length: int | None = None
    expands_queries: bool = False

    @classmethod
    def read(cls, folder: Path) -> TransformerFields:
        """Raises ModelError for damaged files, UnsupportedModel, naming the field, for what is not done here."""
        for path in (folder / name for name in _TRANSFORMER_FILES):
            content = read_json_object(path, ModelError, is_optional=True)
            if content:
                break
        else:
            return cls()
        _check_transformer(content, path)
        of_tokenizer = _arguments(content, "tokenizer_args", path)
        return cls(
            path=path,
            max_length=_positive(of_tokenizer, "model_max_length", path) or _positive(content, "max_seq_length", path),
            lower_cases=bool(typed_field(content, "do_lower_case", (bool,), path, ModelError)),
            query_length=_positive(content, "query_length", path),
            document_length=_positive(content, "document_length", path),
            expands_queries=content.get("query_expansion") is not None,
        )


def lower_cases(folder: Path) -> bool:
    """Whether the model of a folder lowers texts before they are tokenised."""
    return (folder / MODULES_FILE).is_file() and TransformerFields.read(folder).lower_cases


@dataclass(frozen=True, slots=True)
class Modules:
    """Modules of a model. dense: folders of the dense layers. mask: configuration of MultiVectorMask."""

    transformer: TransformerFields
    pooling: str | None
    normalize: bool
    dense: tuple[str, ...]
    mask: Mapping[str, Any] | None

    @classmethod
    def read(cls, folder: Path) -> Modules:
        """Raises ModelError for damaged files, UnsupportedModel for modules and fields that are not done here."""
        path = folder / MODULES_FILE
        transformer, pooling, dense, mask, kinds = TransformerFields.read(folder), None, list[str](), None, list[str]()
        inputs: set[str] = set()
        for module in _read_modules(path):
            kind, place = _kind_of(module, path), _place_of(module, path)
            content = read_json_object(folder / place / "config.json", ModelError, is_optional=True)
            if kind == "Transformer" and place:
                transformer = TransformerFields.read(folder / place)
            elif kind == "Pooling":
                pooling = _pooling_of(folder / place)
            elif kind == "Dense":
                dense.append(place)
            elif kind == "MultiVectorMask":
                mask = content
            if kind in _ORDER:
                kinds.append(kind)
            if kind in ("Normalize", "Dense"):
                inputs.add(_input_of(content, folder / place / "config.json"))
        _check_order(kinds, path)
        if inputs - {_TEXT if mask is None else _TOKENS}:
            raise UnsupportedModel(
                f"{path} has Dense or Normalize with the input {', '.join(sorted(inputs))}, which is not supported. "
                f"Supported: {_TEXT} after Pooling, {_TOKENS} beside MultiVectorMask."
            )
        if mask is None and (transformer.query_length or transformer.document_length or transformer.expands_queries):
            raise UnsupportedModel(
                f"{transformer.path} has query_length, document_length or query_expansion, which are supported beside "
                "MultiVectorMask only."
            )
        return cls(transformer, pooling, "Normalize" in kinds, tuple(dense), mask)


def _check_transformer(content: Mapping[str, Any], path: Path) -> None:
    task = content.get("transformer_task") or _TASKS[0]
    if task not in _TASKS:
        raise _unsupported(path, "transformer_task", task, ", ".join(_TASKS))
    modalities = content.get("modality_config")
    if modalities is not None:
        text = modalities.get("text") if isinstance(modalities, Mapping) else None
        plain = [{"method": "forward", "method_output_name": output} for output in _OUTPUTS]
        if text not in plain:
            raise _unsupported(path, "modality_config", modalities, f"text by forward, of {' or '.join(_OUTPUTS)}")
    output = content.get("module_output_name")
    if task == _TASKS[0] and output not in (None, _TOKENS):
        raise _unsupported(path, "module_output_name", output, _TOKENS)
    if content.get("tokenizer_name_or_path") is not None:
        name = content["tokenizer_name_or_path"]
        raise _unsupported(path, "tokenizer_name_or_path", name, "the option tokenizer, with its folder")
    for name, inert in _ARGUMENTS.items():
        _refuse_others(_arguments(content, name, path), inert, name, path)
    given = typed_field(content, "processing_kwargs", (dict,), path, ModelError) or {}
    for name in ("common", "text", "chat_template"):
        arguments = {
            key: value for key, value in (given.get(name) or {}).items() if (key, value) != ("truncation", True)
        }
        _refuse_others(arguments, _PADDING, f"processing_kwargs.{name}", path)
    unknown = sorted(content.keys() - _READ)
    if unknown:
        logger.warning("%s has fields that are not known, and not used: %s.", path, ", ".join(map(shown, unknown)))


def _arguments(content: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    """Arguments of the module under their older or newer name."""
    found: dict[str, Any] = {}
    for one in (name, _NEWER_NAMES[name]):
        found |= typed_field(content, one, (dict,), path, ModelError) or {}
    return found


def _refuse_others(arguments: Mapping[str, Any], inert: frozenset[str], name: str, path: Path) -> None:
    for key, value in arguments.items():
        if key not in inert and value is not None:
            raise _unsupported(path, f"{name}.{key}", value, f"{', '.join(sorted(inert))}; put others into the model")


def _unsupported(path: Path, name: str, value: Any, allowed: str) -> UnsupportedModel:
    return UnsupportedModel(f"{path} has {name}={shown(value)}, which is not supported. Supported: {allowed}.")


def _kind_of(module: Mapping[str, Any], path: Path) -> str:
    name = str(module.get("type", ""))
    package, _, kind = name.rpartition(".")
    known = (*_ORDER, "Dropout", "MultiVectorMask")
    if kind not in known or not f"{package}.".startswith("sentence_transformers."):
        raise UnsupportedModel(
            f"{path} has the module {name!r}, which is not supported. Supported: {', '.join(known)} of "
            "sentence_transformers."
        )
    return kind


def _check_order(kinds: list[str], path: Path) -> None:
    """Raise UnsupportedModel for modules in another order than they are applied in here, or several of a kind."""
    is_ordered = kinds == sorted(kinds, key=_ORDER.index)
    if not is_ordered or kinds.count("Transformer") > 1 or kinds.count("Pooling") > 1:
        raise UnsupportedModel(
            f"{path} has the modules {', '.join(kinds)}, an order that is not supported. Supported: "
            f"{', '.join(_ORDER)}; Dense several times."
        )


def _input_of(content: Mapping[str, Any], path: Path) -> str:
    """Input of Dense or Normalize, which is its output too."""
    given = str(content.get("module_input_name") or _TEXT)
    output = content.get("module_output_name")
    if output not in (None, given):
        raise _unsupported(path, "module_output_name", output, f"{given}, its input")
    return given


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
    if typed_field(content, "include_prompt", (bool,), path, ModelError) is False:
        raise UnsupportedModel(f"{path} has include_prompt=false, which is not supported: prompts are pooled too.")
    named = typed_field(content, "pooling_mode", (str, list), path, ModelError)
    if isinstance(named, str):
        modes = [_NAMES.get(named, named)]
    elif named is not None:
        modes = [_NAMES.get(str(one), str(one)) for one in named]
    else:
        # The mean is sentence-transformers' default.
        modes = [name for mode, name in _MODES.items() if typed_field(content, mode, (bool,), path, ModelError)]
        modes = modes or ["mean"]
    if len(modes) != 1 or modes[0] not in _NAMES.values():
        raise UnsupportedModel(
            f"{path} pools by {' and '.join(modes) or 'nothing'}, which is not supported. Supported: one of "
            f"{', '.join(sorted(set(_NAMES.values())))}."
        )
    return modes[0]


def _positive(content: Mapping[str, Any], name: str, path: Path) -> int | None:
    value: int | None = typed_field(content, name, (int,), path, ModelError)
    if value is not None and value < 1:
        raise ModelError(f"{path} has {name}={shown(value)}. It must be a positive integer, or null.")
    return value
