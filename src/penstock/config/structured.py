"""Options of structured outputs."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.checks import check_choice, check_flag, check_integer, check_seconds
from penstock.config.reasoning import CUSTOM, REASONING_PARSERS
from penstock.errors import UnsupportedArgument

_LLGUIDANCE = "llguidance"
# Backends of vLLM that llguidance stands in for, and those it does not.
_REPLACED_BACKENDS = ("auto", "guidance", "xgrammar")
_REFUSED_BACKENDS = ("outlines", "lm-format-enforcer")


@dataclass(frozen=True, slots=True)
class StructuredOutputsConfig:
    """structured_outputs_backend: library that enforces constraints. auto, guidance and xgrammar mean llguidance too.
    max_grammar_compile_s: timeout of compiling a grammar, in seconds; its requests end with an error.
    max_grammar_bytes: maximum size of a constraint as text.
    max_cached_grammars: size of the cache of compiled grammars.
    structured_outputs_unenforced: what becomes of keywords of a JSON schema that cannot be enforced, for requests that
        do not say it. "refuse" refuses the request; "check" generates without them and says in the result what does
        not hold.
    reasoning_parser: format of the model's reasoning, after which constraints begin. "custom" is reasoning between
        `reasoning_start_str` and `reasoning_end_str`. None for models without reasoning.
    enable_in_reasoning: constrain the reasoning too.
    """

    structured_outputs_backend: str = "llguidance"
    max_grammar_compile_s: float = 10.0
    max_grammar_bytes: int = 1 << 20
    max_cached_grammars: int = 128
    structured_outputs_unenforced: str = "refuse"
    reasoning_parser: str | None = None
    enable_in_reasoning: bool = False

    def __post_init__(self) -> None:
        if self.structured_outputs_backend in _REFUSED_BACKENDS:
            raise UnsupportedArgument(
                f"structured_outputs_backend={self.structured_outputs_backend!r} is not supported. Leave it out: "
                f"{_LLGUIDANCE} enforces every kind of constraint."
            )
        if self.structured_outputs_backend in _REPLACED_BACKENDS:
            _log_replacement(self.structured_outputs_backend)
            object.__setattr__(self, "structured_outputs_backend", _LLGUIDANCE)
        check_choice("structured_outputs_backend", self.structured_outputs_backend, (_LLGUIDANCE,))
        check_seconds("max_grammar_compile_s", self.max_grammar_compile_s)
        check_integer("max_grammar_bytes", self.max_grammar_bytes, 1)
        check_integer("max_cached_grammars", self.max_cached_grammars, 1)
        check_choice("structured_outputs_unenforced", self.structured_outputs_unenforced, ("refuse", "check"))
        if self.reasoning_parser == "":
            object.__setattr__(self, "reasoning_parser", None)
        if self.reasoning_parser is not None:
            check_choice("reasoning_parser", self.reasoning_parser, (*REASONING_PARSERS, CUSTOM))
        check_flag("enable_in_reasoning", self.enable_in_reasoning)


def _log_replacement(backend: str) -> None:
    import logging

    logging.getLogger(__name__).info(
        "structured_outputs_backend='%s' is taken as '%s', the only backend of structured outputs.",
        backend,
        _LLGUIDANCE,
    )
