"""Workloads, their settings and defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.config import vllm
from penstock.errors import ConfigError

LONG_CONTEXTS = (8192, 16_384)
LONG_CONTEXT_BATCHES = (1, 8)
_COMMON = {"num_iters": 5, "num_iters_warmup": 1}


@dataclass(frozen=True)
class Settings:
    """Settings of a workload. Lengths are in tokens; None if the workload does not have the setting.

    input_len: prompt length; for "prefix" without the prefix. output_len: output length.
    prefix_len: length of the shared prefix. batch_size, num_prompts: concurrent requests.
    num_iters, num_iters_warmup: measured and warm-up runs. seed: of the prompts. n: outputs of each prompt.
    """

    workload: str
    input_len: int | None
    output_len: int | None
    prefix_len: int | None
    batch_size: int | None
    num_prompts: int | None
    num_iters: int
    num_iters_warmup: int
    seed: int
    n: int = 1

    @property
    def num_requests(self) -> int:
        return self.batch_size or self.num_prompts or 1


# Settings by workload, with defaults. None: several values by default.
WORKLOADS: dict[str, dict[str, int | None]] = {
    "latency": {"input_len": 32, "output_len": 128, "batch_size": 8, "n": 1, **_COMMON},
    "throughput": {"input_len": 128, "output_len": 128, "num_prompts": 32, "n": 1, **_COMMON},
    "prefill": {"input_len": 512, "num_prompts": 8, **_COMMON},
    "prefix": {"input_len": 16, "output_len": 32, "prefix_len": 384, "num_prompts": 32, **_COMMON},
    "startup": {"input_len": 32, **_COMMON},
    "long-context": {"input_len": None, "output_len": 32, "batch_size": None, "num_iters": 3, "num_iters_warmup": 0},
}
_LEAST = {"num_iters_warmup": 0}


def make_settings(workload: str, seed: int, **given: int | None) -> Settings:
    """Return the workload's settings: given values that are not None, else its defaults.

    Raises ConfigError for an unknown workload, a setting that it does not have, or a value that is not allowed.
    """
    if workload not in WORKLOADS:
        vllm.command_as_ours(f"bench {workload}")
        raise ConfigError(
            f"There is no workload {workload!r}. Allowed: {', '.join(WORKLOADS)}; or `penstock bench serve ...` for a "
            "server."
        )
    settings: dict[str, Any] = dict(WORKLOADS[workload])
    for name, value in given.items():
        if value is None:
            continue
        if name not in settings:
            having = [other for other, its in WORKLOADS.items() if name in its]
            raise ConfigError(
                f"{option(name)} {value} means nothing to {workload}. It is an option of: {', '.join(having)}."
            )
        least = _LEAST.get(name, 1)
        if value < least:
            raise ConfigError(f"{option(name)} {value} is not valid. Allowed: {least} or more.")
        settings[name] = value
    if seed < 0:
        raise ConfigError(f"--seed {seed} is not valid. Allowed: 0 or more.")
    absent = dict.fromkeys(("input_len", "output_len", "prefix_len", "batch_size", "num_prompts"))
    return Settings(workload=workload, seed=seed, **{**absent, **settings})


def make_sweep(workload: str, seed: int, **given: str | int | None) -> list[Settings]:
    """Return the settings of each run of a workload: one of the given values may be a list, such as "1,4,16".

    Raises ConfigError as `make_settings`, and for a text that is no list of numbers, or several lists.
    """
    lists = {name: _numbers(name, value) for name, value in given.items() if value is not None}
    swept = [name for name, values in lists.items() if len(values) > 1]
    if len(swept) > 1:
        raise ConfigError(f"{' and '.join(map(option, swept))} have several values. Give one of them one value.")
    num_runs = max((len(values) for values in lists.values()), default=1)
    return [
        make_settings(workload, seed, **{name: values[min(index, len(values) - 1)] for name, values in lists.items()})
        for index in range(num_runs)
    ]


def swept_setting(sweep: Sequence[Settings]) -> str | None:
    """Name of the setting that differs between the runs; None where there is only one run."""
    first = asdict(sweep[0])
    return next((name for one in sweep for name, value in asdict(one).items() if value != first[name]), None)


def _numbers(name: str, value: str | int) -> list[int]:
    try:
        return sorted({int(part) for part in str(value).split(",")})
    except ValueError as error:
        raise ConfigError(f"{option(name)} {value} is not valid. Allowed: a number, or several as 1,4,16.") from error


def option(name: str) -> str:
    """Flag of a setting."""
    return f"--{name.replace('_', '-')}"
