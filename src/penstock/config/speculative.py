"""Options of speculative decoding: method, draft length, rejection rule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from penstock.config.checks import check_choice, check_flag, check_integer, did_you_mean
from penstock.errors import ConfigError

HOST_METHODS = ("ngram", "suffix")
# Draft heads on the hidden states of the target model.
HEAD_METHODS = ("eagle", "eagle3", "mtp")
MODEL_METHODS = ("draft_model", *HEAD_METHODS)
METHODS = HOST_METHODS + MODEL_METHODS
# Other names in vLLM, besides those of MTP by model family, such as deepseek_mtp; and methods that are not here.
_OTHER_NAMES = {"[ngram]": "ngram", "ngram_gpu": "ngram"}
_METHODS_OF_VLLM = ("medusa", "mlp_speculator", "dflash", "extract_hidden_states", "custom_class")
REJECTION_SAMPLE_METHODS = ("exact", "standard", "synthetic")
# Default draft lengths. For "suffix" it is the depth of the tree.
_DEFAULT_NUM_TOKENS = {"ngram": 5, "draft_model": 4, "eagle": 3, "eagle3": 3, "mtp": 1}
_DEFAULT_LOOKUP = 5
_DEFAULT_TREE_DEPTH = 24


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Options of speculative decoding, by vLLM's names; off without `method`.

    method: drafting method; None for no speculation.
    model: folder or hub id of the draft model or head; "mtp" uses the target's layers, and "eagle3" defaults to the
        head that ships with the demo model.
    num_speculative_tokens: maximum draft length of a request in a step.
    adaptive: adaptive draft length, by measured acceptance and step times, down to 0; False always drafts
        num_speculative_tokens.
    prompt_lookup_min, prompt_lookup_max: minimum and maximum length of the n-gram that "ngram" matches in the request's
        tokens.
    suffix_decoding_max_tree_depth: depth of the suffix tree of "suffix", in tokens.
    suffix_decoding_max_cached_requests: earlier outputs in the suffix tree; 0 for the request's own tokens only.
    suffix_decoding_max_spec_factor: draft tokens per matched token.
    suffix_decoding_min_token_prob: minimum estimated probability of a draft, given the drafts before it.
    rejection_sample_method: "exact" keeps a draft that equals the token sampled without it, so that no token changes.
        "standard" is the rejection sampling of Leviathan et al., which preserves the distribution, not the tokens.
        "synthetic" keeps drafts at the rates below, for load tests; its tokens are meaningless.
    synthetic_acceptance_rates: acceptance rate of a draft, by its position.
    synthetic_acceptance_length: mean number of tokens per step, instead of the rates.
    """

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int = 0
    adaptive: bool = True
    prompt_lookup_min: int = _DEFAULT_LOOKUP
    prompt_lookup_max: int = _DEFAULT_LOOKUP
    suffix_decoding_max_tree_depth: int = _DEFAULT_TREE_DEPTH
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    rejection_sample_method: str = "exact"
    synthetic_acceptance_rates: Sequence[float] | None = None
    synthetic_acceptance_length: float | None = None

    @classmethod
    def from_option(cls, given: Any) -> Self:
        """Read the option `speculative_config`: None, or a dictionary.

        Raises ConfigError for an unknown key, an invalid value, and keys that exclude each other.
        """
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"speculative_config={given!r} is not valid. Allowed: a dictionary, such as "
                '{"method": "ngram", "num_speculative_tokens": 4}, or None.'
            )
        given = _as_ours(given)
        names = [field.name for field in dataclasses.fields(cls)]
        for name, value in given.items():
            if name not in names:
                hint = did_you_mean(str(name), names) or f" Allowed: {', '.join(names)}."
                raise ConfigError(f"speculative_config has {name!r} (given: {value!r}).{hint}")
        # As vLLM has it, None stands for the default.
        options = {name: value for name, value in given.items() if value is not None}
        method = options.get("method")
        check_choice("method of speculative_config", method, METHODS)
        if "prompt_lookup_min" in options or "prompt_lookup_max" in options:
            options.setdefault("prompt_lookup_min", options.get("prompt_lookup_max"))
            options.setdefault("prompt_lookup_max", options["prompt_lookup_min"])
        depth = options.get("suffix_decoding_max_tree_depth", _DEFAULT_TREE_DEPTH)
        options.setdefault("num_speculative_tokens", _DEFAULT_NUM_TOKENS.get(str(method), depth))
        return cls(**options)

    def __post_init__(self) -> None:
        if self.method is None:
            return
        check_choice("method of speculative_config", self.method, METHODS)
        self._check_model()
        self._check_lookup()
        self._check_suffixes()
        check_integer("num_speculative_tokens", self.num_speculative_tokens, 1)
        check_flag("adaptive", self.adaptive)
        check_choice("rejection_sample_method", self.rejection_sample_method, REJECTION_SAMPLE_METHODS)
        self._check_synthetic()

    @property
    def num_lookahead_tokens(self) -> int:
        """Positions beyond those of a step that the draft model's layers may write to."""
        return self.num_speculative_tokens if self.method in MODEL_METHODS else 0

    @property
    def reads_next_token(self) -> bool:
        """Whether the draft layers' KV cache at a position depends on the next token."""
        return self.method in HEAD_METHODS

    def _check_model(self) -> None:
        if self.model is None:
            return
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(
                f"model={self.model!r} of speculative_config is not valid. Allowed: a folder or a hub id."
            )
        if self.method in HOST_METHODS:
            raise ConfigError(
                f"speculative_config has model={self.model!r}, but the method {self.method!r} has no draft model. "
                "Leave it out, or choose another method."
            )

    def _check_lookup(self) -> None:
        check_integer("prompt_lookup_min", self.prompt_lookup_min, 1)
        check_integer("prompt_lookup_max", self.prompt_lookup_max, 1)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min} is not valid. Allowed: at most "
                f"prompt_lookup_max={self.prompt_lookup_max}."
            )

    def _check_suffixes(self) -> None:
        check_integer("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, 1)
        check_integer("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests, 0)
        _check_number("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, 0.0, math.inf)
        _check_number("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, 0.0, 1.0)

    def _check_synthetic(self) -> None:
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        if self.rejection_sample_method != "synthetic":
            if rates is not None or length is not None:
                raise ConfigError(
                    "speculative_config has a synthetic acceptance, which needs rejection_sample_method='synthetic', "
                    f"not {self.rejection_sample_method!r}."
                )
            return
        if (rates is None) is (length is None):
            raise ConfigError(
                "rejection_sample_method='synthetic' needs one of synthetic_acceptance_rates and "
                "synthetic_acceptance_length."
            )
        if length is not None:
            _check_number("synthetic_acceptance_length", length, 1.0, 1.0 + self.num_speculative_tokens)
        if rates is not None:
            self._check_rates(rates)

    def _check_rates(self, rates: Any) -> None:
        num = self.num_speculative_tokens
        allowed = f"{num} numbers from 0 to 1 that do not rise: the share of steps that keep the 1st, 2nd, … draft"
        is_list = isinstance(rates, (list, tuple)) and len(rates) == num
        if (
            not is_list
            or not all(_is_number(rate, 0.0, 1.0) for rate in rates)
            or sorted(rates, reverse=True) != [*rates]
        ):
            raise ConfigError(f"synthetic_acceptance_rates={rates!r} is not valid. Allowed: {allowed}.")


def _as_ours(given: Mapping[Any, Any]) -> dict[Any, Any]:
    """Translate vLLM's forms: a method given as the model, a missing method, the ranks of the draft model.

    Raises ConfigError for a draft model with ranks of its own.
    """
    options = dict(given)
    num_ranks = options.pop("draft_tensor_parallel_size", None)
    if num_ranks not in (None, 1):
        raise ConfigError(
            f"draft_tensor_parallel_size={num_ranks!r} of speculative_config is not available. Allowed: 1, or leave "
            "it out."
        )
    model, method = options.get("model"), _own_name(options.get("method"))
    options["method"] = method
    name = _own_name(model)
    if isinstance(name, str) and name in (*METHODS, *_METHODS_OF_VLLM) and method in (None, name):
        return options | {"method": name, "model": None}
    if method is None and isinstance(model, str) and model:
        name = model.rstrip("/").rpartition("/")[2].lower().replace("-", "")
        kind = next((head for head in ("eagle3", "eagle", "mtp") if head in name), "draft_model")
        return options | {"method": kind}
    return options


def _own_name(method: Any) -> Any:
    """Penstock's name of a method of vLLM's; other values stay."""
    if isinstance(method, str):
        return "mtp" if method.endswith("_mtp") and "/" not in method else _OTHER_NAMES.get(method, method)
    return method


def _is_number(value: Any, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    if not _is_number(value, low, high):
        to = "or more" if high == math.inf else f"to {high:g}"
        raise ConfigError(f"{name}={value!r} is not valid. Allowed: {low:g} {to}.")
