"""Texts of outputs in the log (`enable_log_outputs`)."""

from __future__ import annotations

import logging

from penstock.engine.output.outputs import RequestOutput

logger = logging.getLogger("penstock.server.requests")


class OutputLog:
    """Log of the outputs of one HTTP request: a line for each when it ends. request_id: of the HTTP request."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        # By prompt and output; None for those that were logged.
        self._texts: dict[tuple[int, int], str | None] = {}

    def note(self, number: int, output: RequestOutput) -> None:
        """Take the next texts of a prompt. number: of the prompt in the request."""
        for sample in output.outputs:
            key = number, sample.index
            text = self._texts.get(key, "")
            if text is None:
                continue
            self._texts[key] = text + sample.text
            if sample.finished:
                name = f"output[{number}][{sample.index}]"
                logger.info("%s %s, %s: %s", self._request_id, name, sample.finish_reason, self._texts[key])
                self._texts[key] = None
