"""What requests may ask of the sampler, and what takes part in it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.checks import check_choice, check_integer
from penstock.errors import ConfigError

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
# Installed packages name their logits processors in this group of entry points.
LOGITS_PROCESSORS_GROUP = "penstock.logits_processors"
_WHOLE_VOCABULARY = -1
# Logits that are worked on at once, by kind of device: 8 or 32 MiB of them, beside which stages hold several times as
# much. On the CPU fewer at once are faster, too: 8 MiB took 0.54 to 0.97 of the time of 32 MiB (top-p, two cores, 64 to
# 256 rows, vocabularies of 32,000 to 152,000). A GPU wants much to do at once.
_MAX_LOGITS = {"cpu": 1 << 21, "cuda": 1 << 23}
_MAX_ROWS = 1024
# Log-probabilities of a step's prompts that the device holds at once.
MAX_PROMPT_RESULTS = 1 << 23


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """max_logprobs: most log-probabilities per token that a request may ask for; -1 for the whole vocabulary.
    logprobs_mode: what is returned as log-probabilities: "raw_logprobs" (of the logits as the model gave them),
        "processed_logprobs" (after penalties, masks, temperature and truncation), or the "raw_logits" or
        "processed_logits" themselves. Those of prompts are always raw log-probabilities.
    logits_processors: custom logits processors, as classes or as their qualified names ("module:Class").
    reasoning_start_str, reasoning_end_str: the texts between which a model thinks, for `thinking_token_budget` and
        where `reasoning_parser` is "custom". Other parsers know theirs.
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
        """Most likely tokens per position that a request may ask for."""
        return vocab_size if self.max_logprobs == _WHOLE_VOCABULARY else min(self.max_logprobs, vocab_size)


def rows_at_once(vocab_size: int, device: str) -> int:
    """Rows of logits that are sampled or reduced at once: memory is bounded whatever the batch and the vocabulary.

    device: its kind.
    """
    return max(1, min(_MAX_ROWS, _MAX_LOGITS[device] // vocab_size))


def _listed(value: object) -> tuple[str | type, ...]:
    listed = (value,) if isinstance(value, (str, type)) else value
    if not isinstance(listed, (tuple, list)) or not all(isinstance(item, (str, type)) for item in listed):
        raise ConfigError(
            f"logits_processors={value!r} is not valid. Allowed: a list of classes, or of their qualified names such "
            "as 'my_package.my_module:MyProcessor'."
        )
    return tuple(listed)
