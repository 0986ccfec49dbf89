"""Options of the sampler."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.checks import check_choice, check_integer
from penstock.errors import ConfigError

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
# Entry points of logits processors in installed packages.
LOGITS_PROCESSORS_GROUP = "penstock.logits_processors"
_WHOLE_VOCABULARY = -1
# Logits that are processed at once, by kind of device: 8 or 256 MiB of them; temporaries take several times as much.
# On the CPU fewer at once are faster, too: 8 MiB took 0.54 to 0.97 of the time of 32 MiB (top-p, two cores, 64 to 256
# rows, vocabularies of 32,000 to 152,000). On a GPU each part costs launches: 256 rows of 152,000 are one part.
_MAX_LOGITS = {"cpu": 1 << 21, "cuda": 1 << 26}
_MAX_ROWS = 1024
# Prompt log-probabilities of a step that the device holds at once.
MAX_PROMPT_RESULTS = 1 << 23


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """max_logprobs: most log-probabilities per token that a request may ask for; -1 for the whole vocabulary.
    logprobs_mode: "raw_logprobs" are of the model's logits, "processed_logprobs" after penalties, masks, temperature
        and truncation; "raw_logits" and "processed_logits" return logits. Prompts have raw log-probabilities always.
    logits_processors: custom logits processors, as classes or as their qualified names ("module:Class").
    reasoning_start_str, reasoning_end_str: markers around the reasoning, for `thinking_token_budget` and
        `reasoning_parser` "custom". Other parsers have their own.
    """

    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    logits_processors: tuple[str | type, ...] = ()
    reasoning_start_str: str = "<think>"
    reasoning_end_str: str = "</think>"

    def __post_init__(self) -> None:
        if self.max_logprobs != _WHOLE_VOCABULARY:
            check_integer("max_logprobs", self.max_logprobs, 0)
        check_choice("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        object.__setattr__(self, "logits_processors", _listed(self.logits_processors))
        for name in ("reasoning_start_str", "reasoning_end_str"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{name}={value!r} is not valid. Allowed: a text that is not empty.")

    def most_logprobs(self, vocab_size: int) -> int:
        """Maximum log-probabilities per position of a request."""
        return vocab_size if self.max_logprobs == _WHOLE_VOCABULARY else min(self.max_logprobs, vocab_size)


def rows_at_once(vocab_size: int, device: str) -> int:
    """Rows of logits that are sampled or reduced at once, which bounds memory. device: kind of the device."""
    return max(1, min(_MAX_ROWS, _MAX_LOGITS[device] // vocab_size))


def _listed(value: object) -> tuple[str | type, ...]:
    listed = (value,) if isinstance(value, (str, type)) else value
    if not isinstance(listed, (tuple, list)) or not all(isinstance(item, (str, type)) for item in listed):
        raise ConfigError(
            f"logits_processors={value!r} is not valid. Allowed: a list of classes, or of their qualified names such "
            "as 'my_package.my_module:MyProcessor'."
        )
    return tuple(listed)
