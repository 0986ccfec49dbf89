"""Model folder of a GGUF file: `config.json`, tokenizer and chat template from its metadata, and links to its files.

It is made once per version of the file, in the cache folder, so that all that reads a model folder reads GGUF.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.checkpoints.generation_config import GENERATION_CONFIG_FILE
from penstock.checkpoints.gguf.container import SUFFIX, encoders_in, models_in, parts_of, read_header, read_headers
from penstock.checkpoints.gguf.encoder_fields import DOES_NOT_FIT, whole_model
from penstock.checkpoints.gguf.fields import Metadata
from penstock.checkpoints.gguf.model_fields import hf_config_of
from penstock.checkpoints.gguf.tokenizer import end_tokens_of, tokenizer_files_of
from penstock.errors import (
    CheckpointError,
    ModelError,
    ModelNotFound,
    TokenizerError,
    UnsupportedFeature,
    UnsupportedModel,
)
from penstock.system import env

# Changes with what is written, so that folders of older versions are not taken.
_VERSION = 5
_CONFIG_FILE, _TOKENIZER_FILE = "config.json", "tokenizer_config.json"
# Name of an encoder's file in the folder, which no other folder's files have.
_ENCODER_FILE = f"penstock-mmproj{SUFFIX}"
# Type of the matrices' values, by ggml's number; others are quantised, and computed in bfloat16 on a GPU.
_DTYPES = {0: "float32", 1: "float16", 30: "bfloat16"}
_QUANTIZED_DTYPE = "bfloat16"
logger = logging.getLogger(__name__)


def folder_of_file(path: Path, encoder: Path | None = None) -> Path:
    """Return the model folder of a GGUF file, or of one of the files that a model is split into.

    encoder: file with the model's encoder of images (mmproj); None takes one beside the model's file that fits it.

    It lacks a configuration or tokenizer that cannot be converted: `check_model_fields` and `check_tokenizer` say why.
    Raises CheckpointError for damaged files, ModelError for invalid metadata, UnsupportedModel for an encoder that does
    not run or fit.
    """
    parts = parts_of(path.absolute())
    is_given = encoder is not None
    # The model's own name may be that of an encoder.
    beside = [one for one in encoders_in(parts[0].parent) if one not in parts][:1]
    encoders = beside if encoder is None else [encoder.absolute()]
    fingerprint = _fingerprint([*parts, *encoders], is_given=is_given)
    folder = env.cache_folder() / "gguf" / f"{path.name.removesuffix(SUFFIX)}-{fingerprint}"
    if not (folder / GENERATION_CONFIG_FILE).exists():
        _write(folder, parts, encoders, is_given=is_given)
    return folder


def folder_of_only_model(folder: Path, option: str, encoder: Path | None = None) -> Path:
    """Return the model folder of the GGUF file in a folder. Raises ModelNotFound if there are several."""
    found = models_in(folder)
    if len(found) != 1:
        names = ", ".join(path.name for path in found)
        raise ModelNotFound(f"{option}={str(folder)!r} holds several GGUF models: {names}. Give the path of one.")
    return folder_of_file(found[0], encoder)


def _fingerprint(files: Sequence[Path], *, is_given: bool) -> str:
    """Name of what is written for these files. is_given: whether an encoder among them must fit."""
    status = [(str(file), (found := file.stat()).st_size, found.st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps([_VERSION, is_given, status]).encode()).hexdigest()[:16]


def _write(folder: Path, parts: Sequence[Path], encoders: Sequence[Path], *, is_given: bool) -> None:
    header = read_headers(list(parts))
    metadata = Metadata(str(parts[0]), header)
    files: dict[str, dict[str, Any]] = {
        GENERATION_CONFIG_FILE: {"eos_token_id": end_tokens_of(metadata)},
        **_config_file(metadata),
        **_tokenizer_files(metadata),
    }
    links = {part.name: part for part in parts}
    for encoder in encoders:
        try:
            files = _with_encoder(files, encoder, metadata)
        except DOES_NOT_FIT as error:
            if is_given:
                raise
            logger.info("The encoder of images beside the model is not used: %s", error)
        else:
            links[_ENCODER_FILE] = encoder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        try:
            for name, content in files.items():
                (unfinished / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
            for name, file in links.items():
                (unfinished / name).symlink_to(file)
            os.replace(unfinished, folder)
        except OSError:
            shutil.rmtree(unfinished, ignore_errors=True)
            if not (folder / GENERATION_CONFIG_FILE).exists():  # unless another process was faster
                raise
    except OSError as error:
        raise CheckpointError(
            f"The configuration and tokenizer of {parts[0]} cannot be written to {folder}: {error}. Set "
            "PENSTOCK_CACHE to a folder that can be written."
        ) from error


def _config_file(metadata: Metadata) -> dict[str, dict[str, Any]]:
    """Configuration of a file; nothing for one that cannot be converted, since hf_config_path may name another."""
    kinds = {tensor.kind for tensor in metadata.tensors.values() if len(tensor.shape) > 1}
    dtype = _DTYPES.get(kinds.pop(), _QUANTIZED_DTYPE) if len(kinds) == 1 else _QUANTIZED_DTYPE
    try:
        return {_CONFIG_FILE: {**hf_config_of(metadata), "dtype": dtype}}
    except (UnsupportedFeature, ModelError) as error:
        logger.debug("No configuration: %s", error)
        return {}


def _with_encoder(files: dict[str, dict[str, Any]], path: Path, metadata: Metadata) -> dict[str, dict[str, Any]]:
    """Files of a model folder with an encoder's. Raises UnsupportedModel for a language model without configuration."""
    encoder = Metadata(str(path), read_header(path))
    text = files.get(_CONFIG_FILE) or hf_config_of(metadata)
    whole = whole_model(encoder, metadata, text)
    named = {"extra_special_tokens": whole.tokens}
    tokenizer = {_TOKENIZER_FILE: {**files[_TOKENIZER_FILE], **named}} if _TOKENIZER_FILE in files else {}
    return {**files, _CONFIG_FILE: whole.config, **whole.processor, **tokenizer}


def _tokenizer_files(metadata: Metadata) -> dict[str, dict[str, Any]]:
    """Tokenizer of a file; nothing for one that cannot be converted, since the option tokenizer may name another."""
    try:
        return tokenizer_files_of(metadata)
    except (UnsupportedModel, TokenizerError) as error:
        logger.debug("No tokenizer: %s", error)
        return {}


def encoder_in(folder: Path) -> Path | None:
    """The encoder's file in the model folder of a GGUF file; None without one."""
    path = folder / _ENCODER_FILE
    return path if path.exists() else None


def check_model_fields(folder: Path) -> None:
    """Raise the reason why the folder of a GGUF file has no `config.json`, if there is one."""
    for metadata in _metadata_in(folder):
        hf_config_of(metadata)


def check_tokenizer(folder: Path) -> None:
    """Raise the reason why the folder of a GGUF file has no tokenizer, if there is one."""
    for metadata in _metadata_in(folder):
        tokenizer_files_of(metadata)


def _metadata_in(folder: Path) -> Iterator[Metadata]:
    for path in models_in(folder) if folder.is_dir() else ():
        yield Metadata(str(path.resolve()), read_headers(parts_of(path)))
