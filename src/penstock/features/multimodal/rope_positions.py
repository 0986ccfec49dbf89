"""Positions in time, height and width of prompts with media (M-RoPE), as a step input with each token's rotation.

Qwen2-VL, https://arxiv.org/abs/2409.12191, section 2.1: text has three equal positions; the rows of an image or a
video begin where the text before them ends, and count time, height and width apart; text goes on after the largest.
Suffixes: T tokens of the step, P positions of the prompt, R rotated dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.contract import NewRequestData, part_of
from penstock.device import Device
from penstock.errors import InvalidRequest
from penstock.features.multimodal.messages import MediaItem, MediaPart, Run
from penstock.layers.rotary import ROTATION_ROWS, RotaryEmbedding
from penstock.runner.slot_owner import SlotOwner
from penstock.runner.staging import StagedTensor
from penstock.step.frame import Frame
from penstock.step.inputs import StepInput


def media_positions(num_tokens: int, items: Iterable[MediaItem]) -> tuple[np.ndarray, int]:
    """Positions of a prompt's tokens, int64 [3, P], and the next token's position less its number of tokens."""
    positions = np.empty((3, num_tokens), dtype=np.int64)
    done, following = 0, 0
    for run in (run for item in items for run in item.runs):
        if run.grid is None:
            continue
        positions[:, done : run.start] = np.arange(following, following + run.start - done)
        following += run.start - done
        grid = grid_positions(run)
        positions[:, run.start : run.stop] = following + grid
        following += int(grid.max()) + 1
        done = run.stop
    positions[:, done:] = np.arange(following, following + num_tokens - done)
    return positions, following - done


def grid_positions(run: Run) -> np.ndarray:
    """Positions of a run's rows relative to its first one, int64 [3, L]."""
    assert run.grid is not None, "a run of an image or a video"
    time, height, width = np.indices(run.grid, dtype=np.int64).reshape(3, -1)
    # Float32, as in Transformers: a product just below a whole number is rounded to it, or is not.
    time = np.floor(time.astype(np.float32) * np.float32(run.time_step)).astype(np.int64)
    return np.stack([time, height, width])


class RopePositions(SlotOwner):
    """Rows of the rotary table for the tokens of requests with media.

    A token with three equal positions has the row of this position. Others have rows of their own in a step, behind
    those of all positions.

    sections: pairs of rotated dimensions with the position in time, height and width; is_interleaved: whether these
    alternate, instead of one section after the other. max_num_tokens: of a step.
    """

    step_inputs = (StepInput(ROTATION_ROWS, torch.int64),)

    def __init__(
        self, device: Device, num_slots: int, sections: Sequence[int], *, is_interleaved: bool, max_num_tokens: int
    ) -> None:
        self._device = device
        self._sections, self._is_interleaved, self._max_num_tokens = sections, is_interleaved, max_num_tokens
        self._delta = StagedTensor(device, num_slots, 1, torch.int64)
        # By slot: positions of the prompt's tokens. Deltas of the others are zero.
        self._positions: dict[int, np.ndarray] = {}
        self._deltas = np.zeros(num_slots, dtype=np.int64)
        # By buffer set: its last frame, and the delta of each of its tokens.
        self._of_frames: dict[int | None, tuple[Frame, Tensor]] = {}

    def use(self, rotary: RotaryEmbedding) -> None:
        """Add rows to the table of this embedding, and write to them from now on."""
        self._num_positions, num_dims = rotary.table.shape
        rotary.add_rows(self._max_num_tokens)
        self._table_PR = rotary.table
        axes = _axes(self._sections, num_dims // 2, self._is_interleaved)
        # For each column of a row, cosines and sines: which of the three positions it is of.
        self._axes_R = self._device.upload(np.concatenate([axes, axes]))
        self._columns_R = self._device.upload(np.arange(num_dims))

    def add(self, slot: int, request: NewRequestData) -> None:
        part = part_of(request.parts, MediaPart)
        delta = 0
        if part is not None:
            num_tokens = max(len(request.prefill_token_ids), part.items[-1].stop if part.items else 0)
            positions, delta = media_positions(num_tokens, part.items)
            if positions.max() >= self._num_positions:
                raise InvalidRequest(
                    f"The prompt's media have positions up to {positions.max():,}. Allowed: below "
                    f"{self._num_positions:,} (max_model_len). Give shorter videos, or fewer."
                )
            self._positions[slot] = positions
        if delta != self._deltas[slot]:
            self._deltas[slot] = delta
            self._delta.stage(slot, 0, [delta])

    def rollback(self, slot: int) -> None:
        self._positions.pop(slot, None)

    def remove(self, slot: int) -> None:
        self._positions.pop(slot, None)

    def flush(self) -> None:
        self._delta.flush()

    def has_work(self, frame: Frame) -> bool:
        return any(slot in self._positions for slot in frame.batch.layout.slots_np.tolist())

    def fill(self, frame: Frame) -> None:
        layout = frame.batch.layout
        num_tokens = layout.plan.num_tokens
        rows_T = frame.inputs.named[ROTATION_ROWS][:num_tokens]
        last = self._of_frames.get(frame.buffer_set)
        is_repeated = frame.is_repeated and last is not None and last[0] is frame
        if not is_repeated:
            token_slots_T = self._device.upload(np.repeat(layout.slots_np, layout.counts_np).astype(np.int64))
            deltas_T = self._delta.tensor[:, 0].index_select(0, token_slots_T)
            self._of_frames[frame.buffer_set] = frame, deltas_T
        torch.add(frame.batch.positions[:num_tokens], self._of_frames[frame.buffer_set][1], out=rows_T)
        rows_T.clamp_(max=self._num_positions - 1)
        chunks = () if is_repeated else self._chunks(frame)
        if chunks:
            numbers = np.concatenate([np.arange(first, first + chunk.shape[1]) for first, chunk in chunks])
            rows = self._rows_of(np.concatenate([chunk for _, chunk in chunks], axis=1))
            rows_T.index_copy_(0, self._device.upload(numbers), self._device.upload(rows))

    def _rows_of(self, positions: np.ndarray) -> np.ndarray:
        """Rows of tokens with these positions, int64 [3, tokens]; writes those of their own."""
        rows: np.ndarray = positions[0].copy()
        own = np.flatnonzero((positions != positions[0]).any(axis=0))
        if len(own):
            start, num_dims = self._num_positions, self._table_PR.shape[1]
            rows[own] = start + np.arange(len(own))
            found_TR = self._device.upload(positions[:, own].T.copy()).index_select(1, self._axes_R)
            self._table_PR[start : start + len(own)] = self._table_PR.view(-1)[found_TR * num_dims + self._columns_R]
        return rows

    def _chunks(self, frame: Frame) -> list[tuple[int, np.ndarray]]:
        """Positions of the step's tokens of prompts with media: first token in the step, and int64 [3, tokens]."""
        layout, chunks = frame.batch.layout, []
        starts = dict(frame.output.first_positions())
        firsts = layout.query_start_loc_np.tolist()
        slots, counts = layout.slots_np.tolist(), layout.counts_np.tolist()
        for req_id, slot, first, count in zip(layout.req_ids, slots, firsts, counts, strict=False):
            positions, start = self._positions.get(slot), starts.get(req_id)
            if positions is not None and start is not None and start < positions.shape[1]:
                chunks.append((first, positions[:, start : start + count]))
        return chunks


def _axes(sections: Sequence[int], num_pairs: int, is_interleaved: bool) -> np.ndarray:
    """Axis of each pair of rotated dimensions: 0 for time, 1 for height, 2 for width; int64 [pairs]."""
    if not is_interleaved:
        return np.repeat(np.arange(3), sections)[:num_pairs]
    axes = np.zeros(num_pairs, dtype=np.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes
