"""All options of one engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config import env, vllm
from penstock.config.cache import CacheConfig
from penstock.config.checks import as_plain, did_you_mean
from penstock.config.device import DeviceConfig
from penstock.config.load import LoadConfig
from penstock.config.model import MODEL_OPTIONS, ModelConfig
from penstock.config.parallel import ParallelConfig
from penstock.config.profiler import ProfilerConfig
from penstock.config.reasoning import ReasoningMarkers, reasoning_markers
from penstock.config.sampling import SamplingConfig
from penstock.config.scheduler import SchedulerConfig
from penstock.config.speculative import SpeculativeConfig
from penstock.config.structured import StructuredOutputsConfig
from penstock.errors import ConfigError, UnknownOption

# An option of its own, which is a dictionary of options.
_SPECULATIVE_CONFIG = "speculative_config"
_STEP_SIZE = "max_num_batched_tokens"
# Of steps that stages pass on: the first stage has nothing to do in the last of them, and the last one in the first.
_STAGED_TOKENS = 512


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Composes one options object per concern. Derived decisions are not stored here but in plans.

    replaces_lost_core: no option: this engine takes the place of one that is gone, with the KV cache that it had.
    """

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    load: LoadConfig
    device: DeviceConfig
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    structured: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    replaces_lost_core: bool = False

    def __post_init__(self) -> None:
        markers, texts = self.reasoning_markers, (self.sampling.reasoning_start_str, self.sampling.reasoning_end_str)
        defaults = SamplingConfig()
        for name, known, text in zip(("reasoning_start_str", "reasoning_end_str"), markers, texts, strict=False):
            if text not in (known, getattr(defaults, name)):
                raise ConfigError(
                    f"{name}={text!r} is not valid with reasoning_parser={self.structured.reasoning_parser!r}, which "
                    f"has {known!r}. Leave it out, or say reasoning_parser='custom'."
                )

        if not self.scheduler.enable_chunked_prefill and not self.model.pools:
            raise ConfigError(
                "enable_chunked_prefill=False is not valid for a model that generates text, whose requests could grow "
                "beyond what a step runs. Leave it out, and set max_num_batched_tokens to the length of the longest "
                "prompt instead."
            )
        block_size, interleave = self.cache.block_size, self.parallel.cp_kv_cache_interleave_size
        if block_size % interleave != 0:
            raise ConfigError(
                f"cp_kv_cache_interleave_size={interleave} is not valid with block_size={block_size}. "
                "Allowed: its divisors."
            )
        self._check_mail()

    @property
    def reasoning_markers(self) -> ReasoningMarkers:
        """Between which texts the model reasons, if it does."""
        sampling = self.sampling
        return reasoning_markers(
            self.structured.reasoning_parser, sampling.reasoning_start_str, sampling.reasoning_end_str
        )

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that workers have use for at once, one for each stage; those with drafts go one at a time.

        No more than those of which a channel holds what was sampled, so that the last stage never waits to tell it.
        """
        if self.speculative.method is not None or self.parallel.pipeline_parallel_size == 1:
            return 1
        return min(self.parallel.pipeline_parallel_size, _MAIL_PIECES // self._mail_pieces(self.scheduler.max_num_seqs))

    def _mail_pieces(self, num_reqs: int) -> int:
        """What the last stage tells another one of a step with so many requests."""
        outcome = _OUTCOME_BYTES + self.speculative.num_speculative_tokens * _TOKEN_BYTES
        # Of a model on the last stage; other drafts each stage makes itself.
        drafts = self.speculative.num_lookahead_tokens * _DRAFT_BYTES
        return sum(1 + -(-num_reqs * size // _MAIL_PIECE_BYTES) for size in (outcome, drafts) if size)

    def _check_mail(self) -> None:
        """The others hear of a step when the next one begins, and the last stage cannot wait for that."""
        wanted = self.scheduler.max_num_seqs
        if self.parallel.pipeline_parallel_size == 1 or self._mail_pieces(wanted) <= _MAIL_PIECES:
            return
        drafts = self.speculative.num_speculative_tokens
        with_drafts = f", with num_speculative_tokens={drafts} for each" if drafts else ""
        allowed = next((size for size in range(wanted, 0, -1) if self._mail_pieces(size) <= _MAIL_PIECES), 0)
        raise ConfigError(
            f"max_num_seqs={wanted} is more than stages can tell each other of in a step "
            f"(pipeline_parallel_size={self.parallel.pipeline_parallel_size}{with_drafts}). "
            f"Allowed: up to {allowed}{', or fewer drafts' if drafts else ''}."
        )

    @property
    def constraints_wait_for(self) -> ReasoningMarkers | None:
        """The reasoning behind which constraints begin; None where they begin with the output."""
        has_reasoning = self.structured.reasoning_parser is not None and not self.structured.enable_in_reasoning
        return self.reasoning_markers if has_reasoning else None

    @classmethod
    def create(cls, model: str | Path, **options: Any) -> EngineConfig:
        """Sort flat options, as the API and the command line take them, into their concerns.

        Raises UnknownOption for a name that no concern has, ConfigError for a value that is not allowed, and
        UnsupportedArgument (both a ConfigError and an UnsupportedFeature) for what vLLM has and Penstock has not.
        """
        if variables := env.variables_of_vllm():
            vllm.log_variables(variables)
        options = {name: as_plain(value) for name, value in options.items()}
        with suppress(ConfigError):
            return cls._sorted(model, options)
        # What is not right here may be how vLLM says it.
        return cls._sorted(model, vllm.options_as_ours(options, option_names()))

    @classmethod
    def _sorted(cls, model: str | Path, options: Mapping[str, Any]) -> EngineConfig:
        _refuse_unknown(options, option_names())
        if options.get(_STEP_SIZE) is None:
            default = {} if options.get("pipeline_parallel_size", 1) == 1 else {_STEP_SIZE: _STAGED_TOKENS}
            options = {name: value for name, value in options.items() if name != _STEP_SIZE} | default
        return cls(
            model=ModelConfig.load(model, **_take(options, MODEL_OPTIONS)),
            speculative=SpeculativeConfig.from_option(options.get(_SPECULATIVE_CONFIG)),
            **{name: config(**_take(options, _fields(config))) for name, config in _CONCERNS.items()},
        )


# What ranks have room for between them (`csrc/collectives.cpp`), and what is told of a request in a step: one token and
# three numbers, a token for each draft that it verified, and those that were drafted. A step's number takes a piece.
_MAIL_PIECES, _MAIL_PIECE_BYTES = 8, 64 << 10
_OUTCOME_BYTES, _TOKEN_BYTES, _DRAFT_BYTES = 32, 8, 4

_CONCERNS: dict[str, type[Any]] = {
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "load": LoadConfig,
    "device": DeviceConfig,
    "sampling": SamplingConfig,
    "profiler": ProfilerConfig,
    "structured": StructuredOutputsConfig,
}


def option_names() -> list[str]:
    """Names of all options that `EngineConfig.create` takes, besides the model."""
    return [*MODEL_OPTIONS, _SPECULATIVE_CONFIG, *(name for config in _CONCERNS.values() for name in _fields(config))]


def option_is_flag(name: str) -> bool | None:
    """Whether an option, of ours or of vLLM's, is True or False; None for a name that is neither."""
    concerns: list[type[Any]] = [ModelConfig, *_CONCERNS.values()]
    types = {field.name: str(field.type) for config in concerns for field in dataclasses.fields(config)}
    own_name = vllm.table().other_names["options"].get(name, name)
    if own_name in option_names():
        return types.get(own_name, "str").startswith("bool")
    if name in vllm.table().ignored["options"] or name in vllm.table().ignored["flags"]:
        return name in vllm.table().ignored["flags"]
    entry = vllm.table().entries["options"].get(name)
    return None if entry is None else entry.is_flag


def _fields(config: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(config)]


def _take(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}


def _refuse_unknown(options: Mapping[str, Any], known: list[str]) -> None:
    for name, value in options.items():
        if name not in known:
            hint = did_you_mean(name, known)
            raise UnknownOption(
                f"There is no option {name} (given: {value!r}).{hint} docs/options.md explains all options."
            )


# As vLLM calls arguments that are kept until an engine is made of them: AsyncEngine.from_engine_args(EngineArgs(...)).
EngineArgs = EngineConfig.create
