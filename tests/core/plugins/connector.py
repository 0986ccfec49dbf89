"""A KV connector: it keeps the blocks of prompts in a dictionary, and loads them into waiting requests.

Loads take a few steps, and each layer may wait for them at a hook of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.contract import ModelRunnerOutput, Part, SchedulerOutput, part_of
from penstock.contract.feature import Feature, register_feature
from penstock.kernels.rotary import Rotation
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, DecoderForCausalLM, DecoderLayer, DecoderModel, SelfAttention
from penstock.models.registry import register_model
from penstock.parallel import ParallelState
from penstock.runner.kv_cache import PagedKVCache
from penstock.runner.slot_owner import SlotOwner
from penstock.scheduler.feature import SchedulerFeature
from penstock.scheduler.request import Request
from penstock.scheduler.services import SchedulerServices
from penstock.worker.feature import WorkerServices

ARCHITECTURE = "ConnectedLlamaForCausalLM"
LOAD, SAVE = "a load by the connector", "a save by the connector"
# Steps that a load takes.
LOAD_STEPS = 3


@dataclass
class Store:
    """Pages of prompts by their tokens, one list per block. fails: whether loads fail."""

    is_on: bool = False
    fails: bool = False
    pages: dict[tuple[int, ...], list[list[Tensor]]] = field(default_factory=dict)
    num_hooks: int = 0

    def longest(self, token_ids: Sequence[int], block_size: int) -> int:
        """Leading tokens whose blocks are here, but for the last token."""
        ends = range((len(token_ids) - 1) // block_size * block_size, 0, -block_size)
        return next((end for end in ends if tuple(token_ids[:end]) in self.pages), 0)


STORE = Store()


class Transfer(Part, frozen=True, kw_only=True):
    """A prompt's leading tokens, and the blocks that hold them."""

    feature = "connector transfer"
    req_id: str
    token_ids: list[int]
    block_ids: list[int]


class ConnectorPart(Part, frozen=True, kw_only=True):
    """Transfers that the workers begin. A step with this part is not repeated."""

    feature = "connector"
    may_repeat = False
    loads: list[Transfer]
    saves: list[Transfer]


class ConnectorResults(Part, frozen=True, kw_only=True):
    """Transfers that have ended: tokens loaded, by request, and requests whose blocks are saved."""

    feature = "connector results"
    loaded: dict[str, int]
    saved: list[str]


class ConnectorScheduler(SchedulerFeature):
    """The scheduler's side: reserves and holds blocks. num_loaded_tokens: of all requests."""

    def __init__(self, services: SchedulerServices) -> None:
        self._scheduler = services.scheduler
        self._is_on = STORE.is_on
        self._to_load: list[Transfer] = []
        self._loading: set[str] = set()
        self._to_save: dict[str, Transfer] = {}
        self._saving: set[str] = set()
        self.num_loaded_tokens = 0

    def request_added(self, request: Request) -> None:
        if not self._is_on:
            return
        num_tokens = STORE.longest(request.prompt_token_ids, self._block_size)
        block_ids = self._scheduler.reserve_blocks(request.req_id, num_tokens, LOAD) if num_tokens else None
        if block_ids is None:
            return
        self._scheduler.kv_cache.hold_blocks(request.req_id, LOAD)
        token_ids = request.prompt_token_ids[: len(block_ids[0]) * self._block_size]
        self._to_load.append(Transfer(req_id=request.req_id, token_ids=token_ids, block_ids=block_ids[0]))
        self._loading.add(request.req_id)

    def part_of_step(self, message: SchedulerOutput) -> Part | None:
        if not self._is_on:
            return None
        for req_id in message.preempted_req_ids & self._to_save.keys():
            self._release(req_id)
        for new in message.scheduled_new_reqs:
            num_blocks = len(new.prompt_token_ids) // self._block_size
            token_ids, block_ids = new.prompt_token_ids[: num_blocks * self._block_size], new.block_ids[0][:num_blocks]
            if num_blocks == 0 or len(block_ids) < num_blocks or tuple(token_ids) in STORE.pages:
                continue
            self._scheduler.kv_cache.hold_blocks(new.req_id, SAVE)
            self._to_save[new.req_id] = Transfer(req_id=new.req_id, token_ids=token_ids, block_ids=block_ids)
        saves = [self._to_save.pop(req_id) for req_id in message.finished_req_ids & self._to_save.keys()]
        self._saving |= {save.req_id for save in saves}
        loads, self._to_load = self._to_load, []
        return ConnectorPart(loads=loads, saves=saves) if saves or self._loading else None

    def take_results(self, message: SchedulerOutput, results: ModelRunnerOutput) -> None:
        part = part_of(results.parts, ConnectorResults)
        if part is None:
            return
        for req_id, num_tokens in part.loaded.items():
            self._scheduler.blocks_loaded(req_id, num_tokens, LOAD)
            self._scheduler.kv_cache.release_blocks(req_id, LOAD)
            self._loading.remove(req_id)
            self.num_loaded_tokens += num_tokens
        for req_id in part.saved:
            self._scheduler.kv_cache.release_blocks(req_id, SAVE)
            self._saving.remove(req_id)

    def workers_replaced(self) -> None:
        for req_id in self._loading:
            self._scheduler.blocks_loaded(req_id, 0, LOAD)
            self._scheduler.kv_cache.release_blocks(req_id, LOAD)
        for req_id in [*self._to_save, *self._saving]:
            self._release(req_id)
        self._to_load, self._loading, self._saving = [], set(), set()

    @property
    def _block_size(self) -> int:
        return self._scheduler.kv_cache.groups[0].block_size

    def _release(self, req_id: str) -> None:
        self._to_save.pop(req_id, None)
        self._scheduler.kv_cache.release_blocks(req_id, SAVE)


class ConnectorWorker(SlotOwner):
    """The worker's side: copies pages."""

    def __init__(self) -> None:
        self._loading: list[tuple[int, Transfer]] = []
        self._loaded: dict[str, int] = {}
        self._saved: list[str] = []
        self._num_steps = 0

    def use_kv_cache(self, kv_cache: PagedKVCache) -> None:
        self._kv_cache = kv_cache

    def begin(self, output: SchedulerOutput) -> None:
        part = part_of(output.parts, ConnectorPart)
        if part is None:
            return
        self._num_steps += 1
        for save in part.saves:
            STORE.pages[tuple(save.token_ids)] = [
                [pages.clone() for pages in self._kv_cache.memory_of_blocks(0, block, block + 1)]
                for block in save.block_ids
            ]
            self._saved.append(save.req_id)
        self._loading += [(self._num_steps + LOAD_STEPS, load) for load in part.loads]
        while self._loading and self._loading[0][0] <= self._num_steps:
            self._load(self._loading.pop(0)[1])

    def part_of_results(self, output: SchedulerOutput) -> Part | None:
        if not self._loaded and not self._saved:
            return None
        part = ConnectorResults(loaded=self._loaded, saved=self._saved)
        self._loaded, self._saved = {}, []
        return part

    def _load(self, load: Transfer) -> None:
        if not STORE.fails:
            stored = STORE.pages[tuple(load.token_ids)]
            for block, pages in zip(load.block_ids, stored, strict=True):
                for memory, kept in zip(self._kv_cache.memory_of_blocks(0, block, block + 1), pages, strict=True):
                    memory.copy_(kept)
        self._loaded[load.req_id] = 0 if STORE.fails else len(load.token_ids)


class ConnectedLayer(DecoderLayer):
    """A decoder layer with a hook before it, at which it could wait for its part of a load."""

    def forward(
        self, hidden_TD: Tensor, residual_TD: Tensor | None, rotation: Rotation, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        context.opaque(self.wait_for_load, hidden_TD, widths=())
        return super().forward(hidden_TD, residual_TD, rotation, context)

    def wait_for_load(self, context: ForwardContext, hidden_TD: Tensor) -> Sequence[Tensor]:
        STORE.num_hooks += 1
        return ()


class ConnectedLlamaForCausalLM(DecoderForCausalLM):
    """Llama with a hook of the connector in every layer."""

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        config = DecoderConfig.read(ConfigFields(model_config))

        def layer(index: int) -> DecoderLayer:
            attention = SelfAttention(config, index, parallel, qkv_bias=False, output_bias=False)
            return ConnectedLayer(config, attention, parallel)

        super().__init__(config, parallel, DecoderModel(config, parallel, layer))


def make_worker_side(services: WorkerServices) -> ConnectorWorker | None:
    """The worker's side, for a model with the hooks."""
    return ConnectorWorker() if isinstance(services.model, ConnectedLlamaForCausalLM) else None


def register() -> None:
    register_model(ARCHITECTURE, ConnectedLlamaForCausalLM)
    register_feature(
        Feature(
            name="connector",
            parts=(Transfer, ConnectorPart, ConnectorResults),
            scheduler_side=ConnectorScheduler,
            worker_side=make_worker_side,
        )
    )
