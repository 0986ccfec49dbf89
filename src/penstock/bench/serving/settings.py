"""Settings of a server benchmark, whose fields are the flags of `penstock bench serve`. Imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import ConfigError

RAMPS = ("linear", "exponential")
DATASETS = ("random", "sharegpt", "custom", "prefix_repetition")
# Datasets that are a file.
_FILES = ("sharegpt", "custom")


@dataclass(frozen=True)
class DatasetSettings:
    """Prompts, and how many tokens to generate for each; equal for equal settings.

    path: file of sharegpt (JSON), custom (JSON Lines)
    disable_shuffle: keep the order of the file
    num_prompts: number of requests
    seed: seed of prompts, lengths, arrivals and disconnects
    random_input_len: prompt tokens
    random_output_len: output tokens
    random_range_ratio: lengths vary by this share
    random_prefix_len: tokens of a prefix that all prompts share
    sharegpt_output_len: output tokens  [default: the file's]
    custom_output_len: output tokens  [default, and -1: the file's output_tokens, else 256]
    prefix_repetition_prefix_len: tokens of each shared prefix
    prefix_repetition_suffix_len: tokens after the prefix
    prefix_repetition_num_prefixes: number of prefixes
    prefix_repetition_output_len: output tokens

    Raises ConfigError for values that are not allowed.
    """

    name: str = field(default="random", metadata={"flag": "--dataset-name", "help": ", ".join(DATASETS)})
    path: Path | None = field(default=None, metadata={"flag": "--dataset-path"})
    disable_shuffle: bool = field(default=False, metadata={"flag": "--disable-shuffle"})
    num_prompts: int = 1000
    seed: int = 0
    random_input_len: int = field(default=1024, metadata={"aliases": ("--input-len",)})
    random_output_len: int = field(default=128, metadata={"aliases": ("--output-len",)})
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    sharegpt_output_len: int | None = None
    custom_output_len: int | None = None
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128

    def __post_init__(self) -> None:
        if self.custom_output_len == -1:
            object.__setattr__(self, "custom_output_len", None)
        if self.name not in DATASETS:
            raise ConfigError(f"--dataset-name {self.name} is not valid. Allowed: {', '.join(DATASETS)}.")
        if self.name in _FILES and self.path is None:
            raise ConfigError(f"--dataset-name {self.name} needs --dataset-path with its file.")
        if self.name not in _FILES and self.path is not None:
            raise ConfigError(
                f"--dataset-path {self.path} means nothing to --dataset-name {self.name}. "
                f"Datasets with a file: {', '.join(_FILES)}."
            )
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError(f"--random-range-ratio {self.random_range_ratio} is not valid. Allowed: 0 to below 1.")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} {value} is not valid. Allowed: {least} or more.")


_LEAST = {
    "num_prompts": 1,
    "random_input_len": 1,
    "random_output_len": 1,
    "random_prefix_len": 0,
    "prefix_repetition_prefix_len": 1,
    "prefix_repetition_suffix_len": 0,
    "prefix_repetition_num_prefixes": 1,
    "prefix_repetition_output_len": 1,
    "sharegpt_output_len": 1,
    "custom_output_len": 1,
}


@dataclass(frozen=True)
class LoadSettings:
    """Arrivals of requests, and how many are open at once.

    request_rate: mean requests per second; inf: all at once
    burstiness: 1: Poisson arrivals; less is burstier, more is evener
    max_concurrency: open requests at most
    request_timeout_s: seconds for a request
    disconnect_fraction: share of clients that leave while tokens come
    ramp_up_strategy: how the rate grows from the first request to the last: linear, exponential
    ramp_up_start_rps: requests per second at the begin
    ramp_up_end_rps: requests per second at the end

    The gaps between arrivals have a gamma distribution of the shape `burstiness`. The time of a request begins when it
    is sent. Raises ConfigError for values that are not allowed.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    request_timeout_s: float = field(default=6 * 3600.0, metadata={"flag": "--request-timeout"})
    disconnect_fraction: float = 0.0
    ramp_up_strategy: str | None = None
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None
    seed: int = field(default=0, metadata={"flag": None})

    def __post_init__(self) -> None:
        concurrency = self.max_concurrency
        self._check_ramp()
        for flag, value, is_valid, allowed in (
            ("--request-rate", self.request_rate, self.request_rate > 0, "more than 0, or inf"),
            ("--burstiness", self.burstiness, 0 < self.burstiness < math.inf, "more than 0"),
            ("--max-concurrency", concurrency, concurrency is None or concurrency > 0, "1 or more"),
            ("--request-timeout", self.request_timeout_s, self.request_timeout_s > 0, "more than 0 seconds"),
            ("--disconnect-fraction", self.disconnect_fraction, 0 <= self.disconnect_fraction <= 1, "0 to 1"),
            ("--seed", self.seed, self.seed >= 0, "0 or more"),
        ):
            if not is_valid:
                raise ConfigError(f"{flag} {value} is not valid. Allowed: {allowed}.")

    def _check_ramp(self) -> None:
        strategy, ends = self.ramp_up_strategy, (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if strategy is None and ends == (None, None):
            return
        if strategy not in RAMPS:
            raise ConfigError(f"--ramp-up-strategy {strategy} is not valid. Allowed: {', '.join(RAMPS)}.")
        for name, rate in zip(("start", "end"), ends, strict=True):
            if rate is None or not 0 < rate < math.inf:
                raise ConfigError(f"--ramp-up-{name}-rps {rate} is not valid. Allowed: more than 0.")
        if not math.isinf(self.request_rate):
            raise ConfigError(
                f"--request-rate {self.request_rate:g} is given beside --ramp-up-strategy. Leave one out."
            )

    @property
    def rate(self) -> str:
        """Rate of arrivals, for people."""
        if self.ramp_up_strategy is not None:
            return f"{self.ramp_up_start_rps:g} to {self.ramp_up_end_rps:g} requests/s"
        return "all at once" if math.isinf(self.request_rate) else f"{self.request_rate:g} requests/s"

    def arrivals(self, num_requests: int) -> list[float]:
        """Seconds from the start to each request's arrival, in order.

        They are scaled to take num_requests / request_rate seconds, so that the rate is exact for few requests too.
        With a ramp, each gap is that of the rate which is reached there.
        """
        if math.isinf(self.request_rate) and self.ramp_up_strategy is None:
            return [0.0] * num_requests
        import numpy as np

        rng = np.random.default_rng([self.seed, 1])
        gaps = rng.gamma(shape=self.burstiness, size=num_requests)
        if self.ramp_up_strategy is not None:
            assert self.ramp_up_start_rps is not None
            assert self.ramp_up_end_rps is not None
            space = np.linspace if self.ramp_up_strategy == "linear" else np.geomspace
            rates = space(self.ramp_up_start_rps, self.ramp_up_end_rps, num_requests)
            return [float(offset) for offset in np.cumsum(gaps / self.burstiness / rates)]
        offsets = np.cumsum(gaps)
        scale = num_requests / self.request_rate / offsets[-1]
        return [float(offset) for offset in offsets * scale]

    def leave_after(self, output_lens: Sequence[int]) -> list[int | None]:
        """Chunks after which each request's client disconnects; None for clients that stay.

        output_lens: requested output lengths, in tokens.
        """
        import numpy as np

        rng = np.random.default_rng([self.seed, 2])
        leaves = rng.random(len(output_lens)) < self.disconnect_fraction
        chunks = [int(rng.integers(1, max(length, 2))) for length in output_lens]
        return [number if does else None for number, does in zip(chunks, leaves, strict=True)]
