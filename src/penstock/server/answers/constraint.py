"""Constraint of an answer's text: valid tool calls, or content of a form that the request asks for."""

from __future__ import annotations

import json
from typing import Any

from penstock.contract import StructuredOutputsParams
from penstock.errors import InvalidParameter
from penstock.server.answers.tool_choice import Mode, ToolChoice
from penstock.server.answers.tool_format import ToolCallFormat

# Templates write up to two newlines behind reasoning.
_BLANKS = {"type": "regex", "pattern": r"\n{0,2}"}


def constraint(
    format: ToolCallFormat,
    choice: ToolChoice,
    content: StructuredOutputsParams | None,
    *,
    parallel: bool,
    follows_reasoning: bool,
) -> StructuredOutputsParams | None:
    """Return the constraint of answers that may or must have calls; None if nothing restricts them.

    content: constraint of the content. It does not apply to answers that must be calls, which have none.
    Raises InvalidParameter for a constraint of the content that calls cannot stand beside.
    """
    if not choice.is_constrained and content is None:
        return None
    if choice.mode is Mode.AUTO and content is None:
        return _tag(format.free_text_with_calls(choice.tools, parallel=parallel))
    calls = format.calls(choice.tools, parallel=parallel)
    if choice.mode is Mode.AUTO and content is not None:
        calls = {"type": "or", "elements": [calls, _content_format(content)]}
    if follows_reasoning:
        calls = {"type": "sequence", "elements": [_BLANKS, calls]}
    return _tag(calls, None if choice.mode is Mode.REQUIRED else content)


def _tag(format: dict[str, Any], content: StructuredOutputsParams | None = None) -> StructuredOutputsParams:
    """Constraint by a structural tag, with the JSON options of the content's constraint."""
    tag = {"type": "structural_tag", "format": format}
    if content is None:
        return StructuredOutputsParams(structural_tag=json.dumps(tag, ensure_ascii=False))
    return StructuredOutputsParams(
        structural_tag=json.dumps(tag, ensure_ascii=False),
        whitespace_pattern=content.whitespace_pattern,
        disable_any_whitespace=content.disable_any_whitespace,
        disable_additional_properties=content.disable_additional_properties,
    )


def _content_format(content: StructuredOutputsParams) -> dict[str, Any]:
    if content.unenforced == "check":
        raise InvalidParameter(
            'structured_outputs.unenforced="check" cannot be combined with tool_choice "auto". Allowed: "refuse", or '
            'tool_choice "none".'
        )
    if content.json is not None:
        return {"type": "json_schema", "json_schema": json.loads(content.json)}
    if content.json_object:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if content.regex is not None:
        return {"type": "regex", "pattern": content.regex}
    if content.choice is not None:
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in content.choice]}
    raise InvalidParameter(
        f'structured_outputs.{content.constraint} cannot be combined with tool_choice "auto". Allowed: json, '
        'json_object, regex, choice, or tool_choice "none".'
    )
