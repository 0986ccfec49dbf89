"""Chat templates of a model folder, read without Transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.checkpoints.json_file import check_regular_file, read_json_object
from penstock.checkpoints.shown_model import shown_model
from penstock.errors import InvalidRequest, TokenizerError

_FILE = "chat_template.jinja"
# Older folders of multimodal models have the template of their processor in a file with one field.
_PROCESSOR_FILE = "chat_template.json"
# Templates besides the default one, each in a file with its name.
_MORE_FILES = "additional_chat_templates"
_MAX_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class ModelTemplates:
    """Chat templates of a tokenizer.

    own: text of the only template, several by name, or None.
    special_tokens: variables of every template, such as `bos_token`.
    """

    own: Any
    special_tokens: Mapping[str, str]

    @classmethod
    def of_transformers(cls, hf_tokenizer: Any) -> ModelTemplates:
        """Templates of a tokenizer of Transformers."""
        return cls(hf_tokenizer.chat_template, hf_tokenizer.special_tokens_map)

    @classmethod
    def of_folder(
        cls, folder: Path, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str]
    ) -> ModelTemplates:
        """Templates of a folder, as Transformers reads them: those in files replace those of `tokenizer_config.json`.

        Raises TokenizerError for a file that is not text.
        """
        paths = {"default": folder / _FILE} if (folder / _FILE).exists() else {}
        paths |= {path.stem: path for path in sorted((folder / _MORE_FILES).glob("*.jinja"))}
        own: Any = {name: _read(path) for name, path in paths.items()}
        if list(own) == ["default"]:
            own = own["default"]
        elif not own:
            processor = read_json_object(folder / _PROCESSOR_FILE, TokenizerError, is_optional=True)
            own = processor.get("chat_template") or tokenizer_config.get("chat_template")
            if isinstance(own, list):
                own = {one["name"]: one["template"] for one in own}
        return cls(own, special_tokens)

    def choose(self, folder: Path, tools: Sequence[Any] | None) -> Any:
        """Template of a conversation for which none is named. Raises InvalidRequest where no default exists."""
        if not isinstance(self.own, Mapping):
            return self.own
        for name in ("tool_use", "default") if tools is not None else ("default",):
            if name in self.own:
                return self.own[name]
        names = ", ".join(map(repr, sorted(self.own)))
        raise InvalidRequest(
            f"The tokenizer of {shown_model(folder)} has several chat templates and none for all. Give chat_template: "
            f"{names}."
        )


def _read(path: Path) -> str:
    check_regular_file(path, TokenizerError, _MAX_BYTES)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}. Download it again.") from error
