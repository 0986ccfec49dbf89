"""Transformers tokenizer of a folder, without the checkpoint's own Python code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.checkpoints.json_file import check_files, read_json_object, shown
from penstock.errors import TokenizerError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
# Known tokenizer files have up to 35 MB.
MAX_TOKENIZER_BYTES = 256 * 2**20
# Files that Transformers reads besides the tokenizer's.
_MORE_TEMPLATES = "additional_chat_templates"
_TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
WHAT_TO_DO = (
    f"A model folder holds {TOKENIZER_FILE} and {TOKENIZER_CONFIG_FILE}. Download them again, or name another folder "
    "with the option tokenizer."
)


def load_hf_tokenizer(folder: Path, *, needed_by: str | None = None) -> Any:
    """Load the `AutoTokenizer` of a local folder, without prompts on stdin. Imports Transformers.

    needed_by: the option that needs it, for errors. Raises TokenizerError for damaged files, and for a tokenizer that
    needs its folder's code (`auto_map`).
    """
    for part in (folder, folder / _MORE_TEMPLATES):
        if part.is_dir():
            check_files(part, TokenizerError, MAX_TOKENIZER_BYTES, _TEXT_SUFFIXES)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # any error of Transformers for a damaged file
        purpose = "" if needed_by is None else f", which {needed_by} needs"
        raise TokenizerError(
            f"The tokenizer in {folder} cannot be loaded{purpose}: {_reason(folder, error)} {WHAT_TO_DO}"
        ) from error


def _reason(folder: Path, error: Exception) -> str:
    own_code = _own_code(folder)
    if own_code is None:
        return " ".join(str(error).split())
    return (
        f"{TOKENIZER_CONFIG_FILE} has auto_map={shown(own_code)}, Python code that comes with the checkpoint, which is "
        "never run (trust_remote_code is not supported). Allowed: a tokenizer of a class that Transformers has."
    )


def _own_code(folder: Path) -> Any:
    """Return the tokenizer class in `auto_map`; None without one, or if the file cannot be read."""
    try:
        auto_map = read_json_object(folder / TOKENIZER_CONFIG_FILE, TokenizerError).get("auto_map")
    except TokenizerError:
        return None
    return auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map
