"""Resolution of model names to local folders, with downloads from the hub, and folders of GGUF files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from penstock.checkpoints.gguf.container import SUFFIX, is_gguf, models_in, parts_of
from penstock.checkpoints.gguf.folder import encoder_in, folder_of_file, folder_of_only_model
from penstock.checkpoints.json_file import shown
from penstock.checkpoints.published import PUBLISHED, fetched_path
from penstock.errors import ModelNotFound
from penstock.system import env

SHIPPED_MODELS = ("demo",)
# EAGLE-3 heads that ship, by their target model.
SHIPPED_HEADS = {"demo": "demo-eagle3"}
_ASSETS = Path(__file__).resolve().parent.parent / "assets"
_METADATA_FILES = ["*.json"]
_WANTED_FILES = ["*.json", "*.safetensors", "*.bin", "*.txt", "*.model", "*.jinja"]


def is_model_here(name: str) -> bool:
    """Whether a name is that of a shipped or published model, a model's folder, or a GGUF file."""
    path = Path(name).expanduser()
    try:
        is_local = (path / "config.json").exists() or _has_only_gguf(path) if path.is_dir() else path.is_file()
    except OSError:  # such as a text that is too long for a name
        return False
    return name in SHIPPED_MODELS or name in PUBLISHED or (is_local and (path.is_dir() or is_gguf(path)))


def resolve_model_folder(
    model: str | Path, revision: str | None = None, *, option: str = "model", mmproj: str | Path | None = None
) -> Path:
    """Return the folder of a shipped model, a local folder, a GGUF file, or a hub id. A Path is a folder or file.

    Hub ids are downloaded, or found in the local cache without a network. ID:QUANTISATION names a GGUF file of a
    repository by the end of its name, such as Q4_K_M.
    option: name in errors. mmproj: GGUF file with the encoder of images of a model of GGUF files; None takes one beside
    the model. Raises ModelNotFound, and UnsupportedModel for an encoder that does not run or fit.
    """
    encoder = None if mmproj is None else _encoder_file(mmproj)
    folder = _local_folder(model, option, encoder)
    if folder is None:
        repository, _, quantisation = str(model).partition(":")
        if not quantisation:
            folder = _download(repository, revision, _WANTED_FILES, option)
        else:
            folder = _folder_of_quantisation(repository, revision, quantisation, option, encoder)
    if encoder is not None and encoder_in(folder) is None:
        raise ModelNotFound(
            f"mmproj={str(mmproj)!r} is not valid for {option}={str(model)!r}, which is no GGUF file. Give the GGUF "
            "file of its language model, or leave the option out: other models have their encoder among their weights."
        )
    return folder


def resolve_metadata_folder(
    model: str | Path, revision: str | None = None, *, option: str = "model"
) -> tuple[Path, bool]:
    """Return the folder of a model's configuration, and whether it is the local copy of a hub id.

    No weights are downloaded; those in the local cache are in the folder. option: name in errors. Raises ModelNotFound.
    """
    folder = _local_folder(model, option)
    if folder is None and ":" in str(model):  # a GGUF file is its own metadata
        return resolve_model_folder(model, revision, option=option), False
    return (folder, False) if folder is not None else (_download(str(model), revision, _METADATA_FILES, option), True)


def _encoder_file(mmproj: str | Path) -> Path:
    path = Path(mmproj).expanduser()
    if not is_gguf(path) or not path.is_file():
        raise ModelNotFound(f"mmproj={str(mmproj)!r} is not there. Allowed: a GGUF file with an encoder of images.")
    return path


def _local_folder(model: Any, option: str, encoder: Path | None = None) -> Path | None:
    """Folder of a shipped or local model; None for a possible hub id."""
    if not isinstance(model, (str, os.PathLike)):
        raise ModelNotFound(
            f"{option}={model!r} is a {type(model).__name__}. Allowed: {', '.join(SHIPPED_MODELS)}, a folder, or a hub "
            "id, as text; or a Path to a folder or a GGUF file."
        )
    if model in (*SHIPPED_MODELS, *SHIPPED_HEADS.values()):
        return _ASSETS / model
    if model in PUBLISHED:
        path = fetched_path(PUBLISHED[str(model)], option)
        return path if path.is_dir() else folder_of_file(path, encoder)
    name = os.fspath(model)
    folder = Path(model).expanduser()
    try:
        is_folder = folder.is_dir()
    except OSError as error:  # such as a name that is too long
        raise ModelNotFound(f"{option}={shown(name)} cannot be opened: {error.strerror}.") from error
    if is_folder:
        return folder_of_only_model(folder, option, encoder) if _has_only_gguf(folder) else folder
    if is_gguf(folder) and (folder.exists() or parts_of(folder) != [folder]):
        return folder_of_file(folder, encoder)
    if folder.exists():
        raise ModelNotFound(
            f"{option}={name!r} is a file. Give the folder that holds config.json and the weights, or a GGUF file."
        )
    if not isinstance(model, str):
        raise ModelNotFound(f"{option}={name!r}: there is no such folder. A hub id is given as text, not as a Path.")
    looks_like_path = model.startswith((".", "/", "~")) or model.count("/") != 1
    if looks_like_path:
        raise ModelNotFound(
            f"{option}={name!r}: there is no such folder or file, and it is no hub id ('organisation/name'). "
            f"Shipped models: {', '.join(SHIPPED_MODELS)}; fetched on demand: {', '.join(PUBLISHED)}."
        )
    return None


def _folder_of_quantisation(
    repository: str, revision: str | None, quantisation: str, option: str, encoder: Path | None
) -> Path:
    """Folder of a repository's GGUF file whose name ends in a quantisation, in any case."""
    endings = {quantisation, quantisation.lower(), quantisation.upper()}
    patterns = [f"*{ending}{part}{SUFFIX}" for ending in sorted(endings) for part in ("", "-*-of-*")]
    snapshot = _download(repository, revision, patterns, option)
    by_ending = {path: _ending(path) for folder in (snapshot, *snapshot.glob("*/")) for path in models_in(folder)}
    wanted = [path for path, ending in by_ending.items() if ending == quantisation.upper()]
    if len(wanted) != 1:
        there = ", ".join(sorted(path.name for path in wanted or by_ending)) or "no GGUF file"
        raise ModelNotFound(
            f"{option}={f'{repository}:{quantisation}'!r} names {len(wanted) or 'none'} of the repository's GGUF files "
            f"here: {there}. Give the end of one's name, as in {repository}:Q4_K_M, or the path of a file."
        )
    return folder_of_file(wanted[0], encoder)


def _ending(path: Path) -> str:
    """Quantisation in the name of a GGUF file, or of the first of a model's files: Q4_K_M of model-Q4_K_M.gguf."""
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", path.name[: -len(SUFFIX)])
    return re.split(r"[-.]", stem)[-1].upper()


def _has_only_gguf(folder: Path) -> bool:
    """Whether GGUF files are all that could be loaded: a folder's own config.json and tokenizer take precedence."""
    has_own = any((folder / name).exists() for name in ("config.json", "tokenizer.json", "tokenizer_config.json"))
    return not has_own and bool(models_in(folder))


def _download(model: str, revision: str | None, patterns: list[str], option: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    offline = env.hub_is_offline()
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns, local_files_only=offline))
    except LocalEntryNotFoundError as error:
        why = "the network is forbidden (HF_HUB_OFFLINE)" if offline else "the hub cannot be reached"
        raise ModelNotFound(
            f"{option}={model!r} is neither a local folder nor in the local hub cache, and {why}. "
            "Download it first, or give a local folder."
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelNotFound(f"{option}={model!r} could not be downloaded from the hub: {error}") from error
