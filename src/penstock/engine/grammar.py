"""What may constrain a request's tokens, as the core sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.contract import GrammarOutput, SchedulerOutput
from penstock.engine.messages import EngineRequest
from penstock.scheduler.outputs import EngineCoreOutput


class Grammar(Protocol):
    """Follows the constrained requests by their tokens, and says what may come next.

    It knows tokens that the host has read and no others, so that a worker's death takes nothing away from it.
    """

    def on_ready(self, wake: Callable[[], None]) -> None:
        """Call `wake` from now on, from any thread, when `take_ready` has something to tell: a core waits for that."""

    def add(self, request: EngineRequest) -> bool:
        """Follow a request that the scheduler took, from the tokens on that it brings.

        False where it is not ready for that request yet: it compiles, and names it in `take_ready` when it is.
        """

    def take_ready(self) -> Sequence[str]:
        """The requests that it has become ready for since the last call.

        Raises GrammarError for those that it never will be.
        """

    def constrains(self, req_id: str) -> bool:
        """Whether it follows this request."""

    def accept(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Take in new tokens, in the order of their steps; requests that ended are forgotten.

        Raises GrammarError for requests whose tokens it cannot take, when it has taken in those of the others.
        """

    def bitmask(self, output: SchedulerOutput) -> GrammarOutput:
        """What a step may choose from: called once it was executed, and the step before it accepted.

        Raises GrammarError for requests that it cannot answer for.
        """

    def close(self) -> None:
        """Give back what it holds, threads above all."""


class NoGrammar:
    """Nobody is constrained."""

    def on_ready(self, wake: Callable[[], None]) -> None: ...

    def add(self, request: EngineRequest) -> bool:
        return True

    def take_ready(self) -> Sequence[str]:
        return ()

    def constrains(self, req_id: str) -> bool:
        return False

    def accept(self, outputs: Sequence[EngineCoreOutput]) -> None: ...

    def bitmask(self, output: SchedulerOutput) -> GrammarOutput:
        return GrammarOutput(step_id=output.step_id)

    def close(self) -> None: ...
