"""The step that runs what the step before ran: nothing to plan or to lay out, only tokens to gather."""

from __future__ import annotations

from penstock.attention import ForwardContext
from penstock.contract import SchedulerOutput
from penstock.runner.input_batch import BatchBuilder, InputBatch
from penstock.runner.kv_cache import PagedKVCache
from penstock.runner.poisoned_blocks import PoisonedBlocks
from penstock.runner.request_lifecycle import RequestLifecycle
from penstock.runner.request_states import RequestStates


class RepeatedStep:
    """Knows a repeated step by what its message shares with the one before: the very same objects.

    A message that equals it in copies is a step like any other.
    """

    def __init__(
        self,
        requests: RequestStates,
        lifecycle: RequestLifecycle,
        poisoned_blocks: PoisonedBlocks,
        batcher: BatchBuilder,
        kv_cache: PagedKVCache,
    ) -> None:
        self._requests = requests
        self._lifecycle = lifecycle
        self._poisoned_blocks = poisoned_blocks
        self._batcher = batcher
        self._kv_cache = kv_cache
        self._last: SchedulerOutput | None = None
        # A list that says that no request gets a block.
        self._no_blocks: list[tuple[list[int], ...] | None] | None = None
        self._batch: InputBatch
        self._context: ForwardContext

    def prepare(self, output: SchedulerOutput) -> tuple[InputBatch, ForwardContext] | None:
        """The inputs of a step that repeats the last one; None if it does not, or not for certain."""
        last, cached = self._last, output.scheduled_cached_reqs
        if (
            last is None
            or output.num_scheduled_tokens is not last.num_scheduled_tokens
            or cached.req_ids is not last.scheduled_cached_reqs.req_ids
            or output.scheduled_new_reqs
            or output.finished_req_ids
            or output.preempted_req_ids
            or self._batcher.layout is not self._batch.layout
        ):
            self._last = None
            return None
        if cached.new_block_ids is self._no_blocks:
            self._requests.note_computed(cached)
        else:
            self._take_blocks(output)
        batch = self._batcher.build_again()
        if batch is not self._batch or not self._kv_cache.keeps_metadata:
            self._batch, self._context = batch, self._kv_cache.make_context(batch)
        return batch, self._context

    def remember(self, output: SchedulerOutput, batch: InputBatch, context: ForwardContext) -> None:
        """Note a step that was put together whole: all that was asked for is in it."""
        can_repeat = batch.layout.has_one_token_each and not output.scheduled_new_reqs
        self._last = output if can_repeat else None
        self._batch, self._context = batch, context

    def _take_blocks(self, output: SchedulerOutput) -> None:
        errors = self._lifecycle.apply(output)
        assert not errors, "these requests were here a step ago"
        self._poisoned_blocks.clear(output)
        new_block_ids = output.scheduled_cached_reqs.new_block_ids
        if new_block_ids.count(None) == len(new_block_ids):
            self._no_blocks = new_block_ids
