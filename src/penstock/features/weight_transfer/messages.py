"""Message parts of weight transfers."""

from __future__ import annotations

from penstock.contract.parts import OutputPart


class WeightVersion(OutputPart, frozen=True, kw_only=True):
    """Version of the weights that made a request's last token."""

    feature = "weight_version"
    version: int

    def result(self, num_tokens: int) -> int:
        return self.version
