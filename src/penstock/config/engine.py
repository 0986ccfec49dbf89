"""All options of one engine."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config import vllm
from penstock.config.additional import AdditionalConfig
from penstock.config.cache import CacheConfig
from penstock.config.checks import as_plain, did_you_mean
from penstock.config.device import DeviceConfig
from penstock.config.ec_transfer import ECTransferConfig
from penstock.config.expert_stats import ExpertStatsConfig
from penstock.config.graphs import GraphConfig
from penstock.config.kv_connector import KVConnectorConfig
from penstock.config.kv_events import KVEventsOption
from penstock.config.kv_tiers import KVTierConfig
from penstock.config.live_view import LiveViewConfig
from penstock.config.load import LoadConfig
from penstock.config.lora import LoRAConfig
from penstock.config.model import MODEL_OPTIONS, ModelConfig
from penstock.config.multimodal import MultimodalConfig
from penstock.config.parallel import ParallelConfig
from penstock.config.profiler import ProfilerConfig
from penstock.config.reasoning import ReasoningMarkers, reasoning_markers
from penstock.config.recording import RecordingConfig
from penstock.config.request_limits import RequestLimits
from penstock.config.sampling import SamplingConfig
from penstock.config.scheduler import SchedulerConfig
from penstock.config.sleep import SleepConfig
from penstock.config.speculative import SpeculativeConfig
from penstock.config.structured import StructuredOutputsConfig
from penstock.config.weight_transfer import WeightTransferConfig
from penstock.errors import ConfigError, UnknownOption
from penstock.system import env

# Option whose value is a dictionary of options.
_SPECULATIVE_CONFIG = "speculative_config"
_STEP_SIZE = "max_num_batched_tokens"
# Token budget with pipeline parallelism: shorter steps make a smaller pipeline bubble.
_STAGED_TOKENS = 512
# Token budget of models that need whole texts.
_WHOLE_TEXTS_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Configuration of an engine, one dataclass per concern. Derived decisions are in plans, not here.

    replaces_lost_core: not an option: the engine replaces a lost core, and takes over the size of its KV cache.
    """

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    load: LoadConfig
    device: DeviceConfig
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    limits: RequestLimits = field(default_factory=RequestLimits)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    graphs: GraphConfig = field(default_factory=GraphConfig)
    structured: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    multimodal: MultimodalConfig = field(default_factory=MultimodalConfig)
    recording: RecordingConfig = field(default_factory=RecordingConfig)
    live_view: LiveViewConfig = field(default_factory=LiveViewConfig)
    expert_stats: ExpertStatsConfig = field(default_factory=ExpertStatsConfig)
    sleep: SleepConfig = field(default_factory=SleepConfig)
    kv_tiers: KVTierConfig = field(default_factory=KVTierConfig)
    kv_connector: KVConnectorConfig = field(default_factory=KVConnectorConfig)
    kv_events: KVEventsOption = field(default_factory=KVEventsOption)
    ec_transfer: ECTransferConfig = field(default_factory=ECTransferConfig)
    weight_transfer: WeightTransferConfig = field(default_factory=WeightTransferConfig)
    additional: AdditionalConfig = field(default_factory=AdditionalConfig)
    replaces_lost_core: bool = False

    def __post_init__(self) -> None:
        markers, texts = self.reasoning_markers, (self.sampling.reasoning_start_str, self.sampling.reasoning_end_str)
        defaults = SamplingConfig()
        for name, known, text in zip(("reasoning_start_str", "reasoning_end_str"), markers, texts, strict=False):
            if text not in (known, getattr(defaults, name)):
                raise ConfigError(
                    f"{name}={text!r} is not valid with reasoning_parser={self.structured.reasoning_parser!r}, which "
                    f"has {known!r}. Leave it out, or use reasoning_parser='custom'."
                )

        if not self.scheduler.enable_chunked_prefill and not self.model.pools:
            raise ConfigError(
                "enable_chunked_prefill=False is not valid for a model that generates text, whose requests could grow "
                "beyond the token budget of a step. Leave it out, and set max_num_batched_tokens to the length of the "
                "longest prompt instead."
            )
        self._check_recording()
        self._check_live_view()
        self._check_kv_tiers()
        self._check_kv_connector()
        self._check_kv_events()
        self._check_ec_transfer()
        block_size, interleave = self.cache.block_size, self.parallel.cp_kv_cache_interleave_size
        if block_size % interleave != 0:
            raise ConfigError(
                f"cp_kv_cache_interleave_size={interleave} is not valid with block_size={block_size}. "
                "Allowed: its divisors."
            )
        between = self.cache.mamba_block_size
        if between is not None and between > self.model.planned_context:
            raise ConfigError(
                f"mamba_block_size={between} is not valid with a context of {self.model.planned_context} tokens: no "
                "state would be kept. Use at most that, or mamba_cache_mode='none'."
            )
        self._check_messages()

    @property
    def reasoning_markers(self) -> ReasoningMarkers:
        """Markers around the model's reasoning."""
        sampling = self.sampling
        return reasoning_markers(
            self.structured.reasoning_parser, sampling.reasoning_start_str, sampling.reasoning_end_str
        )

    @property
    def max_concurrent_batches(self) -> int:
        """Steps in flight: one per pipeline stage, or one with speculative decoding.

        Bounded by the sampled tokens that a channel between stages holds, so that the last stage never waits to send.
        """
        if self.speculative.method is not None or self.parallel.pipeline_parallel_size == 1:
            return 1
        return min(
            self.parallel.pipeline_parallel_size, _CHANNEL_PIECES // self._message_pieces(self.scheduler.max_num_seqs)
        )

    def _check_recording(self) -> None:
        """Refuse recordings that could not be replayed, or that several processes would write."""
        if self.recording.record is None:
            return
        if self.parallel.must_agree_on_time:
            raise ConfigError(
                f"record={str(self.recording.record)!r} is not valid with engines that another program starts "
                "(distributed_executor_backend='external_launcher'): each rank would write it. Leave it out."
            )
        rule = self.speculative.rejection_sample_method
        if self.speculative.method is not None and rule != "exact":
            raise ConfigError(
                f"record={str(self.recording.record)!r} is not valid with rejection_sample_method={rule!r}, whose "
                "tokens depend on the probabilities of drafts, which are not recorded. Allowed: 'exact'."
            )

    def _check_live_view(self) -> None:
        """Refuse a socket that several processes would listen on."""
        if self.live_view.live_view is not None and self.parallel.must_agree_on_time:
            raise ConfigError(
                f"live_view={str(self.live_view.live_view)!r} is not valid with engines that another program starts "
                "(distributed_executor_backend='external_launcher'): each rank would listen there. Leave it out."
            )

    def _check_kv_tiers(self) -> None:
        """Refuse blocks outside of the KV cache that nothing could look for, or ranks at different times."""
        if self.kv_tiers.option is None:
            return
        shown = f"{self.kv_tiers.option} is not valid"
        if not self.cache.enable_prefix_caching:
            raise ConfigError(f"{shown} with enable_prefix_caching=False. Leave one of them out.")
        if self.parallel.must_agree_on_time:
            raise ConfigError(
                f"{shown} with engines that another program starts (distributed_executor_backend="
                "'external_launcher'), whose ranks would find blocks at different times. Leave it out."
            )

    def _check_kv_connector(self) -> None:
        """Refuse a KV connector with what would read or write blocks in another way, or at different times."""
        if self.kv_connector.connector is None:
            return
        others = {
            "kv_offload_dir": self.kv_tiers.folder is not None,
            "kv_offloading_size": self.kv_tiers.kv_offloading_size is not None,
            "record": self.recording.record is not None,
            "distributed_executor_backend='external_launcher'": self.parallel.must_agree_on_time,
        }
        for name, is_given in others.items():
            if is_given:
                raise ConfigError(f"kv_transfer_config is not valid with {name}. Leave one of them out.")

    def _check_kv_events(self) -> None:
        """Refuse events of a cache that is off, and endpoints that several engines would have."""
        events = self.kv_events.events
        if events is None:
            return
        if not self.cache.enable_prefix_caching:
            raise ConfigError(
                "kv_events_config is not valid with enable_prefix_caching=False, as events tell what blocks the prefix "
                "cache has. Leave one of them out."
            )
        if self.parallel.must_agree_on_time:
            raise ConfigError(
                "kv_events_config is not valid with engines that another program starts "
                "(distributed_executor_backend='external_launcher'): each rank would publish. Leave it out."
            )
        events.check_ranks(self.parallel.data_parallel_size)

    def _check_ec_transfer(self) -> None:
        """Refuse the transfer of encoder outputs for models without them, or with ranks at different times."""
        if self.ec_transfer.folder is None:
            return
        shown = "ec_transfer_config is not valid"
        if not self.model.media_limits:
            raise ConfigError(f"{shown} for an engine of texts alone, which runs no encoder of media. Leave it out.")
        if self.parallel.must_agree_on_time:
            raise ConfigError(f"{shown} with distributed_executor_backend='external_launcher'. Leave it out.")

    def _message_pieces(self, num_reqs: int) -> int:
        """Pieces of the message with the outcome of a step, from the last stage to another."""
        outcome = _OUTCOME_BYTES + self.speculative.num_speculative_tokens * _TOKEN_BYTES
        # Drafts of a model on the last stage; each stage computes other drafts itself.
        drafts = self.speculative.num_lookahead_tokens * _DRAFT_BYTES
        return sum(1 + -(-num_reqs * size // _PIECE_BYTES) for size in (outcome, drafts) if size)

    @property
    def keeps_kv(self) -> bool:
        """Whether blocks of the KV cache are kept beyond the engine, which finds them by keys that last."""
        return self.kv_tiers.folder is not None or self.kv_connector.connector is not None

    def _check_messages(self) -> None:
        """Refuse more requests than a message between stages holds: it is read when the next step begins."""
        wanted = self.scheduler.max_num_seqs
        if self.parallel.pipeline_parallel_size == 1 or self._message_pieces(wanted) <= _CHANNEL_PIECES:
            return
        drafts = self.speculative.num_speculative_tokens
        with_drafts = f", num_speculative_tokens={drafts}" if drafts else ""
        allowed = next((size for size in range(wanted, 0, -1) if self._message_pieces(size) <= _CHANNEL_PIECES), 0)
        raise ConfigError(
            f"max_num_seqs={wanted} is more than a message between pipeline stages holds "
            f"(pipeline_parallel_size={self.parallel.pipeline_parallel_size}{with_drafts}). "
            f"Allowed: up to {allowed}{', or a shorter draft length' if drafts else ''}."
        )

    @property
    def constraints_wait_for(self) -> ReasoningMarkers | None:
        """Markers of the reasoning after which constraints begin; None if they begin with the output."""
        has_reasoning = self.structured.reasoning_parser is not None and not self.structured.enable_in_reasoning
        return self.reasoning_markers if has_reasoning else None

    def options(self) -> dict[str, Any]:
        """Options besides the model that differ from their defaults, as `create` takes them; plain data."""
        concerns = [self.model, *(getattr(self, name) for name in _CONCERNS)]
        options = {
            one.name: value
            for concern in concerns
            for one in dataclasses.fields(concern)
            if one.init and (value := getattr(concern, one.name)) != _default(one) and _default(one) is not _REQUIRED
        }
        speculative = {
            one.name: value
            for one in dataclasses.fields(self.speculative)
            if (value := getattr(self.speculative, one.name)) != _default(one)
        }
        if self.speculative.method is not None:
            options[_SPECULATIVE_CONFIG] = speculative
        return {name: _as_data(value) for name, value in options.items()}

    @classmethod
    def create(cls, model: str | Path, **options: Any) -> EngineConfig:
        """Sort flat options, as the API and the command line take them, into their concerns.

        Raises UnknownOption for an unknown name, ConfigError for a value that is not allowed, and UnsupportedArgument
        (both a ConfigError and an UnsupportedFeature) for arguments of vLLM's that Penstock does not have.
        """
        if variables := env.variables_of_vllm():
            vllm.log_variables(variables)
        options = {name: as_plain(value) for name, value in options.items()}
        with suppress(ConfigError):
            return cls._sorted(model, options)
        # The options may be vLLM's.
        return cls._sorted(model, vllm.options_as_ours(options, option_names()))

    @classmethod
    def _sorted(cls, model: str | Path, options: Mapping[str, Any]) -> EngineConfig:
        _refuse_unknown(options, option_names())
        model_config = ModelConfig.load(model, **_take(options, MODEL_OPTIONS))
        if options.get(_STEP_SIZE) is None:
            default = {} if options.get("pipeline_parallel_size", 1) == 1 else {_STEP_SIZE: _STAGED_TOKENS}
            options = {name: value for name, value in options.items() if name != _STEP_SIZE} | default
        if model_config.pooling is not None and not model_config.pooling.is_pooled_in_chunks:
            wanted = model_config.max_model_len
            # A model without a limit is refused, or runs, by its kind; the model registry knows which.
            longest = model_config.longest_context if model_config.has_longest_context else 0
            longest = wanted if isinstance(wanted, int) else longest
            default = {_STEP_SIZE: max(_WHOLE_TEXTS_TOKENS, longest)}
            options = {**default, **options, "enable_chunked_prefill": False}
        return cls(
            model=model_config,
            speculative=SpeculativeConfig.from_option(options.get(_SPECULATIVE_CONFIG)),
            **{name: config(**_take(options, _fields(config))) for name, config in _CONCERNS.items()},
        )


# Size of a channel between ranks (`csrc/collectives.cpp`), and of a request's outcome in a step: one token and three
# numbers, a token per verified draft, and the new drafts. The number of the step takes a piece of its own.
_CHANNEL_PIECES, _PIECE_BYTES = 8, 64 << 10
_OUTCOME_BYTES, _TOKEN_BYTES, _DRAFT_BYTES = 32, 8, 4

_CONCERNS: dict[str, type[Any]] = {
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "load": LoadConfig,
    "device": DeviceConfig,
    "sampling": SamplingConfig,
    "limits": RequestLimits,
    "profiler": ProfilerConfig,
    "graphs": GraphConfig,
    "structured": StructuredOutputsConfig,
    "lora": LoRAConfig,
    "multimodal": MultimodalConfig,
    "recording": RecordingConfig,
    "live_view": LiveViewConfig,
    "expert_stats": ExpertStatsConfig,
    "sleep": SleepConfig,
    "kv_tiers": KVTierConfig,
    "kv_connector": KVConnectorConfig,
    "kv_events": KVEventsOption,
    "ec_transfer": ECTransferConfig,
    "weight_transfer": WeightTransferConfig,
    "additional": AdditionalConfig,
}


# Default of fields without one.
_REQUIRED = object()


def _default(one: dataclasses.Field[Any]) -> Any:
    if one.default is not dataclasses.MISSING:
        return one.default
    return _REQUIRED if one.default_factory is dataclasses.MISSING else one.default_factory()


def _as_data(value: Any) -> Any:
    """Return an option's value as JSON has it."""
    if isinstance(value, Mapping):
        return {name: _as_data(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_data(one) for one in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def option_names() -> list[str]:
    """Names of all engine options, besides the model."""
    return [*MODEL_OPTIONS, _SPECULATIVE_CONFIG, *(name for config in _CONCERNS.values() for name in _fields(config))]


def sections() -> tuple[type[Any], ...]:
    """Dataclasses whose fields are the engine's options, but for those of drafts."""
    return (ModelConfig, *_CONCERNS.values())


def option_is_flag(name: str) -> bool | None:
    """Whether an option, of Penstock's or of vLLM's, is a flag; None for an unknown name."""
    types = {field.name: str(field.type) for config in sections() for field in dataclasses.fields(config)}
    own_name, _, key = vllm.table().other_names["options"].get(name, name).partition(".")
    if key:
        return False
    if own_name in option_names():
        return types.get(own_name, "str").startswith("bool")
    if name in vllm.table().ignored["options"] or name in vllm.table().ignored["flags"]:
        return name in vllm.table().ignored["flags"]
    entry = vllm.table().entries["options"].get(name)
    return None if entry is None else entry.is_flag


def option_is_list(name: str) -> bool:
    """Whether an option, of Penstock's or of vLLM's, takes several values."""
    types = {field.name: str(field.type) for config in sections() for field in dataclasses.fields(config)}
    return types.get(name, "").startswith(("tuple", "Sequence")) or name in vllm.table().lists["options"]


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
