"""Worker side of encoder-decoder models: encodes a request's source in its first step, and fills the cross attention's
KV cache with the output.

Suffixes: S positions of a source, D hidden size, K KV heads, T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.attention import AttentionStep, SequenceGeometry, StepGeometry
from penstock.contract import NewRequestData, SchedulerOutput, part_of
from penstock.errors import InvalidRequest
from penstock.features.encoder_decoder.messages import SourcePart
from penstock.features.encoder_decoder.second_pass import PendingSpeech, SecondPass
from penstock.features.encoder_decoder.speech_rules import SpeechRules
from penstock.layers.cross_attention import CrossAttention
from penstock.models.interface import LanguageModel
from penstock.runner.kv_cache import PagedKVCache
from penstock.runner.position_ids import PositionIds
from penstock.runner.sampling.logits_transform import LogitsTransform
from penstock.runner.slot_owner import SlotOwner
from penstock.runner.staging import StagedTensor
from penstock.step.batch import InputBatch
from penstock.step.frame import Frame
from penstock.worker.feature import WorkerFeature, WorkerServices


class SourceEncoder(PositionIds):
    """Sources by slot: their lengths, and those that the next step encodes, with second passes over their texts.

    num_encoded: encoded sources so far.
    """

    def __init__(self, services: WorkerServices) -> None:
        model: Any = services.model
        super().__init__(model.first_position)
        self._device = services.device
        self._config = services.config.model
        self._lengths = StagedTensor(services.device, services.num_slots, 1, torch.int32)
        self._due: dict[int, SourcePart] = {}
        # Second passes by slot until the step that samples, and those of filled steps.
        self._second: dict[int, SecondPass] = {}
        self._pending: dict[int, PendingSpeech] = {}
        self._kv_cache: PagedKVCache
        self.num_encoded = 0
        self.use_model(model)

    def use_model(self, model: Any) -> None:
        """Encode by this model from now on, whose cross attention reads the lengths."""
        self._model = model
        model.sources.lengths_S = self._lengths.tensor.view(-1)

    def use_kv_cache(self, kv_cache: PagedKVCache) -> None:
        self._kv_cache = kv_cache

    def add(self, slot: int, request: NewRequestData) -> None:
        part = part_of(request.parts, SourcePart)
        self.remove(slot)
        self._lengths.stage(slot, 0, [0 if part is None else part.length])
        if part is None:
            return
        longest, vocab_size = self._model.sources.longest, self._config.vocab_size
        if not 0 < part.length <= longest:
            raise InvalidRequest(f"A source has {part.length} positions. Allowed: 1 to {longest}.")
        if part.token_ids and not 0 <= min(part.token_ids) <= max(part.token_ids) < vocab_size:
            raise InvalidRequest(f"A source has tokens beyond the vocabulary. Allowed: 0 to {vocab_size - 1}.")
        second = SecondPass.of(request, part, self._model, self._config)
        if second is not None:
            self._second[slot] = second
        self._due[slot] = part

    def rollback(self, slot: int) -> None:
        self.remove(slot)
        self._lengths.discard(slot)

    def remove(self, slot: int) -> None:
        self._due.pop(slot, None)
        self._second.pop(slot, None)

    def flush(self) -> None:
        self._lengths.flush()

    def fill(self, frame: Frame) -> None:
        super().fill(frame)
        batch = frame.batch
        if self._due:
            for row, slot in enumerate(batch.layout.slots_np.tolist()):
                part = self._due.pop(slot, None)
                if part is not None:
                    self._write(batch, row, self._encode(part), self._second.get(slot))
                    self.num_encoded += 1
        if self._second:
            self._tell(frame)

    def part_of_results(self, output: SchedulerOutput) -> PendingSpeech | None:
        return self._pending.pop(output.step_id, None)

    def _encode(self, part: SourcePart) -> Tensor:
        """The encoder's output of one source, alone, so that its bits depend on no other: [S, D]."""
        context = self._kv_cache.context_of_texts(SequenceGeometry(*self._one_request(part.length)))
        source: Any = part.token_ids if part.features is None else part.features.to_numpy()
        dtype = np.int32 if part.features is None else np.float32
        encoded_SD: Tensor = self._model.encode(self._device.upload(np.array(source, dtype=dtype)), context)
        assert len(encoded_SD) == part.length, f"{len(encoded_SD)} positions of a source of {part.length}"
        return encoded_SD

    def _write(self, batch: InputBatch, row: int, encoded_SD: Tensor, second: SecondPass | None) -> None:
        """Write the keys and values of all layers to the request's own blocks, as a second pass comes to them."""
        length = len(encoded_SD)
        context = self._kv_cache.context_of_texts(SequenceGeometry(*self._one_request(length)))
        metadata: dict[int, Any] = {}

        def write(attention: CrossAttention) -> tuple[Tensor, Tensor]:
            bound = self._kv_cache.layers[attention.layer.name]
            if bound.group not in metadata:
                metadata[bound.group] = bound.backend.make_metadata(self._geometry(batch, bound.group, row, length))
            keys_SKD, values_SKD = attention.keys_and_values(encoded_SD, context)
            step = AttentionStep(attention.layer, None, bound.kv_cache, metadata[bound.group])
            bound.backend.write(step, keys_SKD, values_SKD)
            return keys_SKD, values_SKD

        if second is not None:
            second.run(self._model, self._device, write)
            return
        for attention in self._model.cross_attentions:
            write(attention)

    def _tell(self, frame: Frame) -> None:
        """Begin to copy the results of requests that the step gives a token."""
        layout, done = frame.batch.layout, {}
        for req_id, slot, count in zip(
            layout.req_ids, layout.slots_np.tolist(), layout.counts_np.tolist(), strict=True
        ):
            second = self._second.get(slot)
            if second is not None and second.is_done_after(count):
                done[req_id] = self._second.pop(slot).result
        if done:
            self._pending[frame.output.step_id] = PendingSpeech(frame.output.step_id, done, self._device)

    def _geometry(self, batch: InputBatch, group: int, row: int, length: int) -> StepGeometry:
        """Geometry of the source as a prompt of its own, in the blocks of a row of the batch."""
        of_batch = batch.geometry[group]
        table, size = of_batch.block_table[row : row + 1].contiguous(), of_batch.block_size
        positions_S = torch.arange(length, device=table.device)
        blocks_S = table[0].index_select(0, positions_S // size).to(torch.int64)
        return StepGeometry(
            *self._one_request(length),
            block_table=table,
            slot_mapping=blocks_S * size + positions_S % size,
            max_seq_len_upper_bound=length,
            block_size=size,
        )

    def _one_request(self, length: int) -> tuple[Tensor, np.ndarray, Tensor, int, int, int]:
        """Fields of the geometry of a single sequence."""
        starts_np = np.array([0, length], dtype=np.int32)
        lengths = self._device.upload(np.array([length], dtype=np.int32))
        return self._device.upload(starts_np), starts_np, lengths, length, 1, length


class SourceEncoding(WorkerFeature):
    """The worker's side, for the model that it has."""

    def __init__(self, services: WorkerServices) -> None:
        self._encoder = SourceEncoder(services)
        self._rules = SpeechRules(services)

    def slot_owners(self) -> Sequence[SlotOwner]:
        return [self._encoder]

    def logits_transforms(self) -> Sequence[LogitsTransform]:
        return [self._rules]

    def replace_model(self, model: LanguageModel) -> None:
        self._encoder.use_model(model)
