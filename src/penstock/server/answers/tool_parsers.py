"""Tool parsers by the names of vLLM's `--tool-call-parser`, and the registry of plug-ins."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from penstock.errors import ConfigError, InvalidParameter
from penstock.server.answers.call_parser import mistral_call_id
from penstock.server.answers.harmony import HARMONY
from penstock.server.answers.tool_format import ToolCallFormat, ToolFormat
from penstock.text.tokenizer import Tokenizer

_HEAD = '{"name": "{name}", "arguments": '
HERMES = ToolFormat(
    head=f"<tool_call>\n{_HEAD}",
    tail="}\n</tool_call>",
    separator="\n",
    openers=("<tool_call>",),
    closers=("</tool_call>",),
)
LLAMA3_JSON = ToolFormat(
    head='{"name": "{name}", "parameters": ', tail="}", separator="; ", openers=("<|python_tag|>",), starts="{"
)
# Llama 4 writes text between its markers, or calls, or calls behind them.
LLAMA4_JSON = replace(LLAMA3_JSON, openers=("<|python_tag|>", "<|python_start|>"), skipped=("<|python_end|>",))
# Lists of calls, before version 11 of Mistral's tokenizers.
MISTRAL_LIST = ToolFormat(
    begin="[TOOL_CALLS] [",
    head=_HEAD,
    tail="}",
    separator=", ",
    end="]",
    openers=("[TOOL_CALLS]",),
    skipped=("[CALL_ID]", "[ARGS]"),
    bare_names=True,
    id_marker="[CALL_ID]",
    make_id=mistral_call_id,
)
MISTRAL = ToolFormat(
    head="[TOOL_CALLS]{name}[ARGS]",
    tail="",
    openers=("[TOOL_CALLS]",),
    skipped=("[CALL_ID]", "[ARGS]"),
    bare_names=True,
    id_marker="[CALL_ID]",
    make_id=mistral_call_id,
)
_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_PARTS = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
_CALL_BEGIN, _CALL_SEP, _CALL_END = _DEEPSEEK_PARTS
DEEPSEEK_V3 = ToolFormat(
    begin=_DEEPSEEK_BEGIN,
    head=f"{_CALL_BEGIN}function{_CALL_SEP}{{name}}\n```json\n",
    tail=f"\n```{_CALL_END}",
    separator="\n",
    end=_DEEPSEEK_END,
    openers=(_DEEPSEEK_BEGIN,),
    closers=(_DEEPSEEK_END,),
    skipped=(f"function{_CALL_SEP}", "```json", "```", *_DEEPSEEK_PARTS),
    bare_names=True,
)
DEEPSEEK_V31 = ToolFormat(
    begin=_DEEPSEEK_BEGIN,
    head=f"{_CALL_BEGIN}{{name}}{_CALL_SEP}",
    tail=_CALL_END,
    end=_DEEPSEEK_END,
    openers=(_DEEPSEEK_BEGIN,),
    closers=(_DEEPSEEK_END,),
    skipped=_DEEPSEEK_PARTS,
    bare_names=True,
)
# Calls of a model without a tool parser: constrained ones, and those of `told_tools`. Some models leave the list out.
JSON_LIST = ToolFormat(
    begin="[", head='{"name": "{name}", "parameters": ', tail="}", separator=", ", end="]", starts="[{"
)

XLAM = replace(JSON_LIST, head=_HEAD)
GRANITE = replace(XLAM, begin="<|tool_call|>[", starts="", openers=("<|tool_call|>", "<tool_call>"))
PHI4_MINI = replace(GRANITE, end="]<|/tool_call|>", openers=("<|tool_call|>", "functools"), closers=("<|/tool_call|>",))

ToolParserFactory = Callable[[Tokenizer], ToolCallFormat]


def _mistral(tokenizer: Tokenizer) -> ToolCallFormat:
    return MISTRAL if _is_one_token(tokenizer, "[ARGS]") else MISTRAL_LIST


def _is_one_token(tokenizer: Tokenizer, text: str) -> bool:
    return len(tokenizer.encode(text, add_special_tokens=False)) == 1


def _always(format: ToolCallFormat) -> ToolParserFactory:
    return lambda _tokenizer: format


def _xml(_tokenizer: Tokenizer) -> ToolCallFormat:
    from penstock.server.answers.xml_format import XMLFormat

    return XMLFormat()


def _pythonic(_tokenizer: Tokenizer) -> ToolCallFormat:
    from penstock.server.answers.pythonic_format import PythonicFormat

    return PythonicFormat()


_FACTORIES: dict[str, ToolParserFactory] = {
    "hermes": _always(HERMES),
    "llama3_json": _always(LLAMA3_JSON),
    "llama4_json": _always(LLAMA4_JSON),
    "mistral": _mistral,
    "pythonic": _pythonic,
    "llama4_pythonic": _pythonic,
    "qwen3_coder": _xml,
    "qwen3_xml": _xml,
    "deepseek_v3": _always(DEEPSEEK_V3),
    "deepseek_v31": _always(DEEPSEEK_V31),
    "granite": _always(GRANITE),
    "phi4_mini_json": _always(PHI4_MINI),
    "xlam": _always(XLAM),
    "openai": _always(HARMONY),
}


def tool_parser_names() -> list[str]:
    return sorted(_FACTORIES)


def register_tool_parser(name: str, factory: ToolParserFactory) -> None:
    """Add a tool parser, or replace one. factory: called with the tokenizer for each request."""
    _FACTORIES[name] = factory


def tool_call_format(name: str | None, tokenizer: Tokenizer) -> ToolCallFormat:
    """Return the format of a tool parser; that of a plain JSON list for None. Raises InvalidParameter."""
    if name is None:
        return JSON_LIST
    if name not in _FACTORIES:
        raise InvalidParameter(
            f"tool_call_parser={name!r} is not known. Allowed: {', '.join(tool_parser_names())}, or the name of a "
            "plug-in that --tool-parser-plugin loads."
        )
    return _FACTORIES[name](tokenizer)


def load_tool_parser_plugin(path: str | Path) -> None:
    """Run a Python file, which calls `register_tool_parser`. Raises ConfigError."""
    path = Path(path)
    spec = importlib.util.spec_from_file_location(f"penstock_tool_parser_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"tool_parser_plugin={str(path)!r} is not a Python file. Allowed: the path of a .py file.")
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except Exception as error:
        raise ConfigError(
            f"tool_parser_plugin={str(path)!r} failed: {type(error).__name__}: {error}. Correct the file, or leave the "
            "option out."
        ) from error
