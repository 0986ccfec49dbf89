"""Worker for CPU and CUDA devices."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock.config import EngineConfig
from penstock.config.model import GENERATE
from penstock.contract import DraftTokenIds, KVCacheConfig, KVCacheSpec, SamplingInput, SchedulerOutput
from penstock.device import Device, DtypeChoice, MemorySnapshot, create_device
from penstock.errors import ConfigError, LifecycleError
from penstock.kernels.native import describe_kernels, why_no_tiles
from penstock.loader.arrangement import new_save_id
from penstock.loader.loader import find_stored_dtype
from penstock.loader.tensorized import uri_of
from penstock.loader.weight_update import WeightUpdate
from penstock.models.causal_lm import CausalLM
from penstock.models.interface import LanguageModel
from penstock.models.registry import refuse_unsuitable
from penstock.observability.spans import SpanLog
from penstock.parallel import ParallelState
from penstock.runner.async_output import StepOutput
from penstock.runner.dummy_runs import measure_step_costs, run_dummy_step, warm_up_decodes
from penstock.runner.model_runner import ModelRunner, RunnerLimits
from penstock.runner.stage import NO_PIPELINE, PipelineStage, Stage
from penstock.runner.warm_up import warm_up_requests
from penstock.worker.base import WorkerBase
from penstock.worker.capabilities import check_options
from penstock.worker.changes_model import changes_model
from penstock.worker.drafter import layers_of_target, place_for_drafter
from penstock.worker.expert_load import ExpertLoad
from penstock.worker.feature import WorkerFeatures, WorkerServices, features_of_model, warm_up_runs
from penstock.worker.inspection import inspect_model
from penstock.worker.memory_by_tag import MemoryByTag
from penstock.worker.memory_plan import MemoryPlan
from penstock.worker.memory_planning import plan_memory
from penstock.worker.names_for_extensions import NamesForExtensions, load_by_updates
from penstock.worker.profiler import RankTrace, create_profiler, not_configured
from penstock.worker.reload import config_of_replacement
from penstock.worker.update_config import updated_config
from penstock.worker.weight_updates import WeightUpdates
from penstock.worker.weights import Weights

logger = logging.getLogger(__name__)
_Part = TypeVar("_Part")


class Worker(NamesForExtensions, WorkerBase):
    """Worker of one rank: owns a device, its memory, the model and the runner."""

    def __init__(self, config: EngineConfig, parallel: ParallelState) -> None:
        super().__init__(config, parallel)
        check_options(config)
        wanted = config.parallel
        for name, size, group in (
            ("tensor_parallel_size", wanted.tensor_parallel_size, parallel.tensor),
            ("pipeline_parallel_size", wanted.pipeline_parallel_size, parallel.pipeline),
        ):
            if group.size != size:
                raise ConfigError(
                    f"{name}={size} needs a worker in a group of {size} ranks, but its group has {group.size}. Use an "
                    "executor for several workers, such as distributed_executor_backend='mp'."
                )
        # Options of the next reload; `config` has those of the current weights.
        self._next_config = config
        self._profiler = create_profiler(config.profiler, parallel, config.parallel.engine_number)
        self._device: Device | None = None
        self._dtype: DtypeChoice | None = None
        self._start: MemorySnapshot | None = None
        self._weights: Weights | None = None
        self._updates: WeightUpdates | None = None
        self._runner: ModelRunner | None = None
        self.memory = MemoryByTag(self)
        self._features: WorkerFeatures | None = None
        self._expert_load: ExpertLoad | None = None
        if config.speculative.method is not None:
            self.num_speculative_tokens = config.speculative.num_speculative_tokens

    def init_device(self) -> None:
        refuse_unsuitable(self.config.model)
        config, ranks = self.config.parallel, self.parallel
        place = config.place(ranks.rank) if ranks.local_rank is None else ranks.place_on_machine
        self._device = create_device(self.config.device, *place, batch_invariant=self.config.model.batch_invariant)
        model = self.config.model
        stored = find_stored_dtype(model.folder, self.config.load, self.parallel)
        self._dtype = self._device.choose_dtype(model.dtype, model.checkpoint_dtype, stored)
        self._device.return_unused_memory()
        self._start = self._device.memory_snapshot()
        kernels = f", {describe_kernels()}" if self._device.kind == "cpu" else ""
        logger.info("Device: %s%s", self._device.describe(), kernels)
        if self._device.kind == "cpu" and (reason := why_no_tiles()) is not None:
            logger.warning("The AMX tiles of this processor are not used: %s", reason)

    def load_model(self) -> None:
        self.parallel = place_for_drafter(self.config, self.parallel)
        self._weights = weights = Weights(self.config, self.parallel, self.own_device, self.dtype)

        def begin(is_checkpoint_format: bool, is_atomic: bool | None) -> tuple[WeightUpdate, bool]:
            return weights.begin_update(self.config, is_checkpoint_format, is_atomic)

        self._updates = WeightUpdates(begin, self._finish_update)
        load_by_updates(weights.model, self.load_weights)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.weights.kv_cache_specs

    def determine_available_memory(self) -> MemoryPlan:
        start = self._required(self._start, "init_device")
        limits = self._limits(self.config.model.planned_context)
        return plan_memory(self.config, self.parallel, self.own_device, self.dtype, self.weights, limits, start)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig, max_model_len: int) -> None:
        weights, layers = self.weights, self.weights.layers
        self._features = features = WorkerFeatures(self._services)
        self._runner = ModelRunner(
            self.own_device,
            weights.language_model,
            layers,
            kv_cache_config.of_layers(layers) if self.parallel.pipeline.size > 1 else kv_cache_config,
            self._limits(max_model_len),
            attention_backend=self.config.device.attention_backend,
            sampling=self.config.sampling,
            fast_paths=self.config.scheduler.fast_paths != "off",
            graphs=self.config.graphs,
            rank=self.rank,
            agreement=self.parallel.agreement,
            speculator=weights.speculator,
            stage=self._stage(),
            model_state=features.model_state,
            owners=features.owners,
            transforms=features.transforms,
            make_head=features.output_head,
            spans=self._spans,
        )
        for group in self._runner.kv_cache.groups:
            refusals = "; ".join(f"not {name}: {why}" for name, why in group.refusals.items())
            logger.log(
                logging.WARNING if refusals else logging.DEBUG,
                "Attention: %s%s",
                group.backend.name,
                f" ({refusals})" if refusals else "",
            )

    def compile_or_warm_up_model(self) -> None:
        runner = self.runner
        if self.config.expert_stats.expert_stats:
            self.start_expert_stats()
        run_dummy_step(runner)
        with torch.no_grad():
            warm_up_decodes(runner)
            if self.own_device.compiles_kernels:
                warm_up_runs(self._services)
                if self.config.model.output_head == GENERATE:
                    warm_up_requests(runner)
        self.own_device.synchronize()
        self.memory.start_prefaulting()

    def measure_step_costs(self) -> list[tuple[int, float]]:
        limits = self.runner.limits
        most = min(limits.max_num_tokens, limits.max_num_reqs * (1 + limits.max_drafts))
        with torch.no_grad():
            return measure_step_costs(self.runner, most, self.parallel)

    def execute_model(self, output: SchedulerOutput) -> None:
        runner = self._runner or self.runner
        if self._updates is not None and self._updates.why_undefined is not None and output.num_scheduled_tokens:
            self._updates.check_defined()
        if self._profiler is None:
            runner.execute_model(output)
        else:
            self._profiler.run_step(runner.execute_model, output, runner.requests.prefill_length)

    def sample_tokens(self, sampling: SamplingInput) -> StepOutput:
        runner = self._runner or self.runner
        if self._profiler is None:
            return runner.sample_tokens(sampling)
        return self._profiler.run_sampling(runner.sample_tokens, sampling)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return self.runner.take_draft_token_ids()

    def execute_dummy_batch(self) -> None:
        with torch.no_grad():
            run_dummy_step(self.runner)

    def forget_programs(self) -> None:
        if self._runner is not None:
            self._runner.forget_programs()

    def features_of_model(self) -> Sequence[str]:
        return features_of_model(self.weights.language_model)

    def rpc_method(self, name: str) -> Callable[..., Any] | None:
        of_feature = None if self._features is None else self._features.rpc_methods.get(name)
        return of_feature or super().rpc_method(name)

    def get_model(self) -> LanguageModel:
        return self.weights.language_model

    def check_health(self) -> None:
        self._required(self._device, "init_device")

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> str | RankTrace | None:
        """Start a profile of steps, or stop it, write the trace and return its path.

        With profiler="steps" return the spans, which the engine core writes; None with profiler="cuda".

        profile_prefix: prefix of the trace's file name. Raises ConfigError without `profiler_dir`, LifecycleError for a
        second start, or a stop without a start.
        """
        if self._profiler is None:
            raise not_configured()
        if is_start:
            self._profiler.start(profile_prefix)
            return None
        self.own_device.synchronize()
        stopped = self._profiler.stop()
        return str(stopped) if isinstance(stopped, Path) else stopped

    @changes_model
    def start_expert_stats(self) -> None:
        """Count the tokens of each expert from zero on. Raises UnsupportedFeature for a model without any."""
        self._expert_load = ExpertLoad(self.weights.model, self.parallel, self.own_device.torch_device)

    def get_expert_stats(self) -> dict[int, list[int]]:
        """Tokens of each expert since the start, by layer; no layers on ranks with copies of another rank's.

        Raises LifecycleError before a start, as on a worker that replaces a lost one without the option `expert_stats`.
        """
        return self._required(self._expert_load, "start_expert_stats").read()

    def update_config(self, overrides: Mapping[str, Mapping[str, Any]]) -> None:
        """Change options of the next `reload_weights`, by section: `load_config` and `model_config`.

        Raises ConfigError for an option that cannot be changed, and changes nothing then.
        """
        self._next_config = updated_config(self._next_config, overrides)

    def reload_weights(self, weights_path: str | None = None, atomic: bool | None = None) -> None:
        """Replace the weights by those of a folder or hub id, between two steps; None: have the newest complete ones
        again, which are those of a trainer, if one has sent some, or of the same folder.

        In place; with atomic=True the old weights stay on failure, which takes their memory once more. A folder whose
        config.json differs, calibrated quantisation and Transformers models always do so. The caller must reset the
        prefix cache. Raises ModelError for a model of another architecture or shape, CheckpointError for damaged
        weights, OutOfMemory without enough memory, LifecycleError where weights of a trainer are lost.
        """
        if weights_path is None and self._next_config == self.config and self.updates.is_pushed:
            self._restore_pushed()
            return
        device, weights = self.own_device, self.weights
        new = replace(self._next_config, model=config_of_replacement(self._next_config.model, weights_path))
        check_options(new, device.kind)
        self.updates.abandon()
        try:
            model = weights.reload(
                self.config, new, None if self._runner is None else self._runner.limits.max_model_len, atomic
            )
        except BaseException as error:
            if weights.is_being_replaced:
                self.updates.undefine(f"a reload in place failed: {error}")
            raise
        self._use_weights(model)
        self.updates.define()
        self.config = self._next_config = new
        _give_back(device)
        logger.info("Weights reloaded from %s%s", new.model.folder, ", in place" if model is None else "")

    def _restore_weights(self, folder: str) -> None:
        """Load the weights of a folder that may go, so that the options stay those of the checkpoint."""
        options = self.config, self._next_config
        self.reload_weights(folder)
        self.config, self._next_config = options

    def _restore_pushed(self) -> None:
        """Have the newest complete weights of a trainer again. Raises LifecycleError if they are lost."""
        updates = self.updates
        version, num_updates = updates.version, updates.num_updates
        if updates.why_undefined is None:
            return
        folder = updates.kept_folder
        if folder is None:
            raise LifecycleError(
                f"reload_weights: the newest weights are those of version {version}, which a trainer has sent, and "
                f"they are lost: {updates.why_undefined}. Send them again, or name a folder (weights_path). "
                "weight_transfer_config with recovery='keep' keeps them."
            )
        self._restore_weights(folder)
        updates.note_state(version, num_updates, is_pushed=True)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors of a checkpoint, one or many per call, in any order.

        An update of the weights opens by itself, and ends once every tensor has come; no step may run in between. The
        caller must reset the prefix cache. Raises CheckpointError for tensors that do not fit.
        """
        self.updates.load(weights)

    @property
    def updates(self) -> WeightUpdates:
        return self._required(self._updates, "load_model")

    def _use_weights(self, model: CausalLM | None) -> None:
        """Run a model that replaces the current one from the next step on; None: the current one has other weights."""
        weights = self.weights
        if model is None:
            if weights.have_moved:
                self.forget_programs()
            weights.have_moved = False
            return
        weights.replace(model)
        load_by_updates(model, self.load_weights)
        if self._runner is not None:
            self._runner.replace_model(weights.language_model)
        if self._features is not None:
            self._features.replace_model(weights.language_model)
        if self._expert_load is not None:
            self._expert_load.attach(weights.model)

    def _finish_update(self, model: CausalLM | None) -> None:
        self._use_weights(model)
        _give_back(self.own_device)

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> list[str]:
        """Write the weights as they are in memory, quantised ones too, for load_format="sharded_state"; return this
        rank's files.

        pattern: file names, with {rank} and {part}. max_size: bytes per file, unless one tensor is larger.
        Rank 0 copies the configuration and the tokenizer too. Raises LifecycleError while the weights are undefined.
        """
        save_id = new_save_id(self.parallel)  # of all ranks, before one of them may raise
        self.updates.check_defined()
        return self.weights.save(path, pattern, max_size, self.config.model, save_id)

    def save_tensorized_model(self, tensorizer_config: Any) -> str:
        """Write the weights as they are in memory by tensorizer, for load_format="tensorizer"; return this rank's file.

        tensorizer_config: the file's path or address, with %03d for the rank of several; or an object or a dictionary
        with it as `tensorizer_uri`.
        """
        save_id = new_save_id(self.parallel)
        return self.weights.save_tensorized(uri_of(tensorizer_config), self.config.model, save_id)

    def get_model_inspection(self) -> str:
        """Return the module tree as text, with sizes, dtypes and linear methods.

        Also the recorded programs, or runs and memory of CUDA graphs, and reasons for eager execution, once a step has
        run.
        """
        execution = [] if self._runner is None else self._runner.execution.describe().lines
        return "\n".join([inspect_model(self.weights.model), *execution])

    def get_graph_stats(self) -> dict[str, int]:
        """Steps, and passes of a drafter, by whether they ran as CUDA graphs; empty on a device without graphs."""
        return dict(self.runner.execution.describe().num_runs)

    def shutdown(self) -> None:
        if self._profiler is not None:
            self._profiler.shutdown()
        self.memory.close()
        if self._features is not None:
            self._features.close()
        if self._updates is not None:
            self._updates.close()
        self._runner = self._weights = self._features = self._updates = None
        device, self._device = self._device, None
        if device is None:
            gc.collect()
        else:
            device.synchronize()
            _give_back(device)
            device.close()

    @property
    def own_device(self) -> Device:
        return self._required(self._device, "init_device")

    @property
    def dtype(self) -> DtypeChoice:
        return self._required(self._dtype, "init_device")

    @property
    def weights(self) -> Weights:
        return self._required(self._weights, "load_model")

    @property
    def features(self) -> WorkerFeatures:
        return self._required(self._features, "initialize_from_config")

    @property
    def runner(self) -> ModelRunner:
        return self._required(self._runner, "initialize_from_config")

    def _limits(self, max_model_len: int) -> RunnerLimits:
        """Sizes of this worker's runner; a worker of another class may have more drafts than the options say."""
        return replace(RunnerLimits.of(self.config, max_model_len), max_drafts=self.num_speculative_tokens)

    @property
    def _services(self) -> WorkerServices:
        dtype, updates = self.dtype.torch_dtype, self.updates
        model, restore = self.weights.language_model, self._restore_weights
        return WorkerServices(self.config, self.own_device, model, dtype, self.memory, self.rank, updates, restore)

    @property
    def _spans(self) -> SpanLog | None:
        return None if self._profiler is None else self._profiler.spans

    def _stage(self) -> Stage:
        if self.parallel.pipeline.size == 1:
            return NO_PIPELINE
        return PipelineStage(
            self.own_device,
            self.parallel,
            self.config.scheduler.max_num_batched_tokens,
            self.config.model.hidden_size,
            self.dtype.torch_dtype,
            self.weights.speculator.aux_layers,
            layers_of_target(self.weights.model, self.parallel),
            self._spans,
        )

    def _required(self, part: _Part | None, method: str) -> _Part:
        if part is None:
            raise LifecycleError(
                f"Worker {self.rank} is not ready for this call: {method} must come first (or it was shut down)."
            )
        return part


def _give_back(device: Device) -> None:
    gc.collect()
    device.return_unused_memory()
