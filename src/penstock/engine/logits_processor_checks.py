"""What custom logits processors say to a request before it is accepted."""

from __future__ import annotations

from functools import cached_property
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from penstock.config.sampling import LOGITS_PROCESSORS_GROUP
from penstock.contract import SamplingParams
from penstock.contract.param_checks import shown
from penstock.errors import InvalidParameter

if TYPE_CHECKING:
    from penstock.runner.sampling import LogitsProcessor


class LogitsProcessorChecks:
    """configured: the engine's option. Classes are loaded when a request can first concern them."""

    def __init__(self, configured: tuple[str | type, ...]) -> None:
        self._configured = configured
        self._are_any = bool(configured) or bool(entry_points(group=LOGITS_PROCESSORS_GROUP))

    def check(self, params: SamplingParams) -> None:
        """Raise InvalidParameter for `extra_args` of a processor that is not there, or that refuses the request."""
        if not self._are_any and params.extra_args is None:
            return
        names = [processor.name for processor in self._classes]
        for name, value in (params.extra_args or {}).items():
            if name not in names:
                raise InvalidParameter(
                    f"extra_args has {shown(name)} (given: {shown(value)}), but there is no logits processor of "
                    f"that name. Allowed: {', '.join(names)}. Others are loaded with the option logits_processors."
                )
        for processor in self._classes:
            try:
                processor.validate(params)
            except ValueError as error:
                raise InvalidParameter(f"Logits processor {processor.name!r} refuses the request: {error}") from error

    @cached_property
    def _classes(self) -> list[type[LogitsProcessor]]:
        # Not imported unless there are processors: it needs torch.
        from penstock.runner.sampling.load_processors import load_logits_processors

        return load_logits_processors(self._configured)
