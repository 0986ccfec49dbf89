"""Reasoning markers of models, by the names of vLLM's reasoning parsers."""

from __future__ import annotations

from typing import NamedTuple

# Reasoning between reasoning_start_str and reasoning_end_str, which are options.
CUSTOM = "custom"
# Messages with headers, which constraints and answers follow. The markers are those of a thinking budget, which is that
# of one message of analysis.
HARMONY = "openai_gptoss"


class ReasoningMarkers(NamedTuple):
    """start, end: texts around the reasoning.
    starts_in_reasoning: whether the output begins within reasoning, without a start marker, unless the prompt has ended
        it. Other models write `start` in the prompt or in the output, or do not reason.
    implied_ends: texts that end reasoning too where the constraint after it may begin with them, such as a tool call.
    """

    start: str
    end: str
    starts_in_reasoning: bool = False
    implied_ends: tuple[str, ...] = ()


REASONING_PARSERS = {
    "deepseek_r1": ReasoningMarkers("<think>", "</think>", starts_in_reasoning=True),
    "minimax_m2": ReasoningMarkers("<think>", "</think>", starts_in_reasoning=True),
    "qwen3": ReasoningMarkers("<think>", "</think>", implied_ends=("<tool_call>",)),
    "glm45": ReasoningMarkers("<think>", "</think>"),
    "ernie45": ReasoningMarkers("<think>", "</think>"),
    "seed_oss": ReasoningMarkers("<seed:think>", "</seed:think>"),
    "granite": ReasoningMarkers("Here is my thought process:", "Here is my response:"),
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
    HARMONY: ReasoningMarkers(
        "<|channel|>analysis<|message|>",
        "<|start|>assistant<|channel|>final<|message|>",
        implied_ends=(
            "<|end|>",
            "<|channel|>final",
            "<|channel|>commentary",
            "<|channel|>analysis to=",
            "<|start|>assistant to=",
        ),
    ),
}

# Parsers of models, by their type, whose every answer is in that form.
PARSERS_OF_MODELS = {"gpt_oss": HARMONY}


def reasoning_markers(parser: str | None, start: str, end: str) -> ReasoningMarkers:
    """Markers of a parser. start, end: markers of a model without one of these parsers."""
    return REASONING_PARSERS.get(parser or CUSTOM, ReasoningMarkers(start, end))
