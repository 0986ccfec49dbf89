"""Images in prompts: features of an encoder take the place of embeddings, and wait in a cache for their chunk.

The scheduler decides which items a step encodes, where chunks end, and when features are freed; workers obey.
Suffixes: T tokens of the step, L tokens of an item, P pixels of a token, D hidden size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.contract import NewRequestData, Part, SchedulerOutput, part_of
from penstock.contract.feature import Feature, register_feature
from penstock.errors import ConfigError, InvalidRequest
from penstock.kernels.rows import sum_rows
from penstock.layers.embedding import VocabEmbedding
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, DecoderForCausalLM, DecoderLayer, DecoderModel, SelfAttention
from penstock.models.registry import register_model
from penstock.parallel import ParallelState
from penstock.runner.slot_owner import SlotOwner
from penstock.scheduler.feature import SchedulerFeature
from penstock.scheduler.request import Request, RequestStatus
from penstock.scheduler.services import SchedulerServices
from penstock.step.frame import Frame
from penstock.step.inputs import StepInput
from penstock.worker.feature import WorkerServices

ARCHITECTURE = "SeeingLlamaForCausalLM"
FEATURES, TEXT_IDS = "image_features", "image_text_ids"
NUM_PIXELS = 8


@dataclass(frozen=True)
class ImagesOptions:
    """cache_rows: rows of the encoder cache, one per token of an image."""

    cache_rows: int = 16

    def __post_init__(self) -> None:
        if self.cache_rows < 1:
            raise ConfigError(f"cache_rows={self.cache_rows!r} is not valid. Allowed: a number from 1 on.")


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """An image: its tokens, whether a chunk may end among them, and the seed of its pixels."""

    offset: int
    length: int
    seed: int
    may_cut: bool = True

    @property
    def stop(self) -> int:
        return self.offset + self.length

    def overlaps(self, start: int, stop: int) -> bool:
        return self.offset < stop and start < self.stop


class ImagesPart(Part, frozen=True, kw_only=True):
    """The images of a request, in the order of its tokens. Blocks with equal tokens of equal images are shared."""

    feature = "images"
    items: list[Item]

    def keys_of_block(self, start: int, stop: int) -> tuple[str, ...]:
        inside = (item for item in self.items if item.overlaps(start, stop))
        return tuple(f"{item.seed} at {item.offset}, {item.length}" for item in inside)


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of an item that a step computes: `count` from `row` on, for the request's tokens from `token` on.

    encode: whether the step encodes the item first. free: whether its features are freed afterwards.
    """

    req_id: str
    item: int
    token: int
    row: int
    count: int
    encode: bool
    free: bool


class StepImagesPart(Part, frozen=True, kw_only=True):
    """The images of a step, which is not repeated."""

    feature = "images of a step"
    may_repeat = False
    rows: list[Rows]


@dataclass
class _Running:
    """Items of a running request, and the numbers of those whose features are cached."""

    items: list[Item]
    cached: set[int] = field(default_factory=set)

    @property
    def num_rows(self) -> int:
        return sum(self.items[number].length for number in self.cached)


class ImageScheduler(SchedulerFeature):
    """Shares the rows of the encoder cache among requests."""

    def __init__(self, services: SchedulerServices) -> None:
        self._cache_rows = IMAGES.options_of(services.config).cache_rows
        self._max_num_tokens = services.config.scheduler.max_num_batched_tokens
        self._running: dict[str, _Running] = {}
        # Rows that the requests of the step being built need in addition.
        self._planned: dict[str, int] = {}

    @property
    def num_rows(self) -> int:
        """Cached rows after the last step."""
        return sum(running.num_rows for running in self._running.values())

    def request_added(self, request: Request) -> None:
        stop = 0
        for item in _items(request):
            if item.length < 1 or item.offset < stop or item.stop > request.num_prompt_tokens:
                raise InvalidRequest(f"{item} is not within the {request.num_prompt_tokens} tokens, after others.")
            most = self._cache_rows if item.may_cut else min(self._cache_rows, self._max_num_tokens)
            if item.length > most:
                raise InvalidRequest(f"An image has {item.length} tokens. Allowed: up to {most}.")
            stop = item.stop

    def chunk(self, request: Request, start: int, num_tokens: int) -> int:
        """End before the first item that the cache has no room for, or that would be cut and must not be."""
        running = self._running.get(request.req_id) if request.status is RequestStatus.RUNNING else None
        cached = set() if running is None else running.cached
        self._planned[request.req_id] = 0
        room, stop = self._cache_rows - self.num_rows - sum(self._planned.values()), start + num_tokens
        for number, item in enumerate(_items(request)):
            if not item.overlaps(start, stop):
                continue
            num_rows = 0 if number in cached else item.length
            if num_rows > room or (item.stop > stop and not item.may_cut):
                stop = max(start, item.offset)
                break
            room -= num_rows
            self._planned[request.req_id] += num_rows
        return stop - start

    def part_of_step(self, message: SchedulerOutput) -> Part | None:
        self._planned.clear()
        for req_id in message.preempted_req_ids | message.finished_req_ids:
            self._running.pop(req_id, None)
        for new in message.scheduled_new_reqs:
            part = part_of(new.parts, ImagesPart)
            if part is not None:
                self._running[new.req_id] = _Running(part.items)
        rows = [one for req_id, start in message.first_positions() for one in self._rows(message, req_id, start)]
        return StepImagesPart(rows=rows) if rows else None

    def workers_replaced(self) -> None:
        self._running.clear()

    def _rows(self, message: SchedulerOutput, req_id: str, start: int) -> Iterator[Rows]:
        """The rows of one request, which is noted to have computed them."""
        running = self._running.get(req_id)
        if running is None:
            return
        stop = start + message.num_scheduled_tokens[req_id]
        for number, item in enumerate(running.items):
            if not item.overlaps(start, stop):
                continue
            first, last = max(start, item.offset), min(stop, item.stop)
            yield Rows(
                req_id=req_id,
                item=number,
                token=first - start,
                row=first - item.offset,
                count=last - first,
                encode=number not in running.cached,
                free=item.stop <= stop,
            )
            if item.stop <= stop:
                running.cached.discard(number)
            else:
                running.cached.add(number)
        if not running.items or running.items[-1].stop <= stop:
            del self._running[req_id]


def _items(request: Request) -> Sequence[Item]:
    part = part_of(request.parts, ImagesPart)
    return () if part is None else part.items


class ImageFeatures(SlotOwner):
    """The encoder, and its cache by slot and item.

    most_rows: largest number of cached rows so far. num_encoded: number of encodings of each request's items.
    """

    step_inputs: Sequence[StepInput]

    def __init__(self, services: WorkerServices, embedding: ImageEmbedding) -> None:
        self._device = services.device
        self._vocab_size, size = embedding.vocab_size, embedding.hidden_size
        self.step_inputs = StepInput(FEATURES, torch.float32, (size,)), StepInput(TEXT_IDS, torch.int32)
        generator = torch.Generator().manual_seed(0)
        self._projection_PD = torch.randn(NUM_PIXELS, size, generator=generator).to(embedding.weight.device)
        self._items: dict[int, list[Item]] = {}
        self._cache: dict[tuple[int, int], Tensor] = {}
        self.most_rows = 0
        self.num_encoded: Counter[tuple[str, int]] = Counter()

    @property
    def num_rows(self) -> int:
        """Cached rows now."""
        return sum(len(features) for features in self._cache.values())

    def add(self, slot: int, request: NewRequestData) -> None:
        part = part_of(request.parts, ImagesPart)
        if part is not None:
            self._items[slot] = part.items

    def remove(self, slot: int) -> None:
        for number in range(len(self._items.pop(slot, []))):
            self._cache.pop((slot, number), None)

    def has_work(self, frame: Frame) -> bool:
        return part_of(frame.output.parts, StepImagesPart) is not None

    def fill(self, frame: Frame) -> None:
        layout, named = frame.batch.layout, frame.inputs.named
        starts = dict(zip(layout.req_ids, layout.query_start_loc_np.tolist(), strict=False))
        slots = dict(zip(layout.req_ids, layout.slots_np.tolist(), strict=True))
        part = part_of(frame.output.parts, StepImagesPart)
        rows = [] if part is None else [one for one in part.rows if one.req_id in slots]
        for one in rows:
            if one.encode:
                item = self._items[slots[one.req_id]][one.item]
                self._cache[slots[one.req_id], one.item] = self._encode(item)
                self.num_encoded[one.req_id, one.item] += 1
        self.most_rows = max(self.most_rows, self.num_rows)
        num_tokens = layout.plan.num_tokens
        is_image_np = np.zeros(num_tokens, dtype=bool)
        features_TD = named[FEATURES][:num_tokens].zero_()
        for one in rows:
            key, first = (slots[one.req_id], one.item), starts[one.req_id] + one.token
            features_TD[first : first + one.count] = self._cache[key][one.row : one.row + one.count]
            is_image_np[first : first + one.count] = True
            if one.free:
                del self._cache[key]
        is_image_T = self._device.upload(is_image_np)
        named[TEXT_IDS][:num_tokens] = torch.where(is_image_T, self._vocab_size, frame.batch.input_ids[:num_tokens])

    def _encode(self, item: Item) -> Tensor:
        """Features of one item, [L, D], whose bits do not depend on other items."""
        pixels_LP = torch.randn(item.length, NUM_PIXELS, generator=torch.Generator().manual_seed(item.seed))
        return pixels_LP.to(self._projection_PD.device) @ self._projection_PD


class ImageEmbedding(VocabEmbedding):
    """Embeddings of text, and features of images. Tokens of images have an id beyond the table: a row of zeros."""

    def forward(self, input_ids_T: Tensor, context: ForwardContext) -> Tensor:
        features_TD, text_ids_T = context.input(FEATURES), context.input(TEXT_IDS)
        if features_TD is None or text_ids_T is None:
            return super().forward(input_ids_T, context)
        return sum_rows(self.rows_or_zeros(text_ids_T), features_TD)


class SeeingLlamaForCausalLM(DecoderForCausalLM):
    """Llama whose prompts may have images."""

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        config = DecoderConfig.read(ConfigFields(model_config))

        def layer(index: int) -> DecoderLayer:
            attention = SelfAttention(config, index, parallel, qkv_bias=False, output_bias=False)
            return DecoderLayer(config, attention, parallel)

        embedding = ImageEmbedding(config.vocab_size, config.hidden_size, parallel=parallel)
        super().__init__(config, parallel, DecoderModel(config, parallel, layer, embed_tokens=embedding))


def make_image_features(services: WorkerServices) -> ImageFeatures | None:
    """The worker's side, for a model that sees."""
    model = services.model
    return ImageFeatures(services, model.model.embed_tokens) if isinstance(model, SeeingLlamaForCausalLM) else None


IMAGES = Feature(
    name="images",
    parts=(ImagesPart, StepImagesPart),
    options=ImagesOptions,
    scheduler_side=ImageScheduler,
    worker_side=make_image_features,
)


def register() -> None:
    register_model(ARCHITECTURE, SeeingLlamaForCausalLM)
    register_feature(IMAGES)
