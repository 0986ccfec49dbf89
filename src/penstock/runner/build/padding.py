"""Padding: the sizes of a step's tensors, which are those of a captured graph where it can be one."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from penstock.config import GraphConfig
from penstock.config.graphs import FULL
from penstock.step.batch import BatchPlan


class Padding:
    """Sizes of steps that are not padded.

    sizes: padded numbers of requests of uniform steps, in which all requests have equally many tokens, ascending.
    token_sizes: padded numbers of tokens of mixed steps, ascending. most_rows: rows of a padded mixed step, one more
    than its requests, since padding tokens belong to a padding row; None where only the tokens are padded.
    whole_block_tables: whether steps need all columns of the block tables, used or not.
    """

    sizes: Sequence[int] = ()
    token_sizes: Sequence[int] = ()
    most_rows: int | None = None
    whole_block_tables = False

    def plan(self, num_scheduled_tokens: Mapping[str, int]) -> BatchPlan:
        """Choose the padded sizes of a step, within the runner's limits, from each request's tokens."""
        return BatchPlan.without_padding(num_scheduled_tokens)

    def size_for(self, num_reqs: int) -> int | None:
        """The next of `sizes`; None beyond the largest one."""
        index = bisect.bisect_left(self.sizes, num_reqs)
        return None if index == len(self.sizes) else self.sizes[index]


NO_PADDING = Padding()


class GraphPadding(Padding):
    """Sizes of steps that can be CUDA graphs.

    is_capturable: whether attention can be captured; uniform steps are padded then. max_query_len: tokens of a request
    in the longest uniform step. max_num_tokens: limit of a padded uniform step.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        is_capturable: bool,
        max_query_len: int = 1,
        max_num_tokens: int | None = None,
        token_sizes: Sequence[int] = (),
        most_rows: int | None = None,
    ) -> None:
        self.sizes = sorted(sizes) if is_capturable else []
        self.token_sizes = sorted(token_sizes)
        self.most_rows = most_rows
        self.whole_block_tables = is_capturable
        self.max_query_len = max_query_len
        self._max_num_tokens = max_num_tokens or max(sizes, default=0) * max_query_len

    @classmethod
    def of(
        cls, graphs: GraphConfig, *, max_num_reqs: int, max_num_tokens: int, max_drafts: int, is_capturable: bool
    ) -> GraphPadding:
        """Padding of a runner with these limits."""
        return cls(
            graphs.sizes(min(max_num_reqs, max_num_tokens)),
            is_capturable=is_capturable,
            max_query_len=1 + max_drafts,
            max_num_tokens=max_num_tokens,
            token_sizes=graphs.token_sizes(max_num_tokens),
            most_rows=max_num_reqs + 1 if graphs.cudagraph_mode == FULL else None,
        )

    def plan(self, num_scheduled_tokens: Mapping[str, int]) -> BatchPlan:
        """Pad a uniform step to the next number of requests, and another one to the next number of tokens."""
        plan = BatchPlan.without_padding(num_scheduled_tokens)
        query_len = self._query_len(plan, num_scheduled_tokens)
        size = self.size_for(plan.num_reqs) if query_len else None
        if size is not None and size * query_len <= self._max_num_tokens:
            return plan._replace(num_tokens_padded=size * query_len, num_reqs_padded=size)
        return plan if query_len == 1 else self._plan_mixed(plan)

    def _query_len(self, plan: BatchPlan, num_scheduled_tokens: Mapping[str, int]) -> int:
        """Tokens of each request in a uniform step; 0 in another one."""
        query_len = plan.num_tokens // max(1, plan.num_reqs)
        if not 1 <= query_len <= self.max_query_len or plan.num_tokens != plan.num_reqs * query_len:
            return 0
        is_uniform = query_len == 1 or all(count == query_len for count in num_scheduled_tokens.values())
        return query_len if is_uniform else 0

    def _plan_mixed(self, plan: BatchPlan) -> BatchPlan:
        index = bisect.bisect_left(self.token_sizes, plan.num_tokens)
        if index == len(self.token_sizes) or plan.num_tokens <= plan.num_reqs:
            return plan
        size = self.token_sizes[index]
        if self.most_rows is None:
            return plan._replace(num_tokens_padded=size)
        rows = min(size, self.most_rows)
        return plan._replace(num_tokens_padded=size, num_reqs_padded=rows, most_tokens_of_request=size)
