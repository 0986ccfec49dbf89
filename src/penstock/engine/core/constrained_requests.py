"""Constrained requests of an engine core: those that wait for a grammar, their bitmasks, and ends after failures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set

import msgspec

from penstock.contract import GrammarOutput, SchedulerOutput
from penstock.engine.core.structured_grammar import Grammar
from penstock.engine.messages import EngineRequest
from penstock.errors import GrammarError, InvalidRequest
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from penstock.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)
# Reason for which a request waits while its grammar is compiled.
_GRAMMAR = "its grammar"


class ConstrainedRequests:
    """Requests with a grammar. Where a grammar fails, its requests end with an error and others go on.

    tell_ends: called with the last outputs of requests that end so, and of no others.
    """

    def __init__(
        self, grammar: Grammar, scheduler: Scheduler, tell_ends: Callable[[list[EngineCoreOutput]], None]
    ) -> None:
        self._grammar = grammar
        self._scheduler = scheduler
        self._tell_ends = tell_ends

    def add(self, request: EngineRequest) -> None:
        """Follow a new request of the scheduler, which waits while its grammar is compiled."""
        if not self._grammar.add(request):
            self._scheduler.wait_for(request.req_id, _GRAMMAR)

    def take_ready(self) -> None:
        """Let requests run whose grammars are compiled, and end those whose grammars cannot be."""
        try:
            for req_id in self._grammar.take_ready():
                self._scheduler.ready(req_id, _GRAMMAR)
        except GrammarError as error:
            self._end(error, set())

    def among(self, req_ids: Set[str]) -> list[str]:
        """Return the constrained ones of these requests, in their order."""
        if not self._grammar.constrains_any(req_ids):
            return []
        return [req_id for req_id in req_ids if self._grammar.constrains(req_id)]

    def accept(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Advance grammars by the tokens of a step."""
        try:
            self._grammar.accept(outputs)
        except Exception as error:
            self._end(error, {output.req_id: None for output in outputs}.keys())

    def forget(self, ended: Sequence[EngineCoreOutput]) -> None:
        """Forget requests that ended without the result of a step."""
        self._grammar.accept(ended)

    def bitmask(self, output: SchedulerOutput) -> GrammarOutput:
        """Grammar bitmask of an executed step; requests whose grammar fails are ended first."""
        while True:
            try:
                return self._grammar.bitmask(output)
            except Exception as error:
                self._end(error, output.num_scheduled_tokens.keys())

    def close(self) -> None:
        """Stop the compiler's threads."""
        self._grammar.close()

    def _end(self, error: Exception, req_ids: Set[str]) -> None:
        """End the requests of a grammar failure: those that the error names, else the constrained ones of `req_ids`.

        Re-raises the error when that leaves no request.
        """
        failed = error.req_ids if isinstance(error, GrammarError) else self.among(req_ids)
        is_invalid = isinstance(error.__cause__, InvalidRequest)
        ended = self._scheduler.finish_requests(failed, FinishReason.INVALID if is_invalid else FinishReason.ERROR)
        if not ended:
            raise error
        if is_invalid:
            logger.info("%d requests end with a constraint that is not valid: %s", len(ended), error)
        else:
            logger.error("The grammar of %d requests failed", len(ended), exc_info=error)
        text = str(error) if is_invalid else f"Its grammar failed: {error}"
        self._tell_ends([msgspec.structs.replace(output, error=text) for output in ended])
