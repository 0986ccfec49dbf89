"""Pooled vectors of a step on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from penstock.contract import ArrayBytes, PooledOutput
from penstock.device import Device
from penstock.device.base import wait_until


def pooled_output(
    step_id: int, req_ids: list[str], vectors: Sequence[Tensor | None], errors: Mapping[str, str]
) -> PooledOutput:
    """Result of a step from vectors on the host. A request whose vector is not finite ends with an error."""
    pooled: list[ArrayBytes | None] = []
    failed: dict[str, str] = {}
    for req_id, vector in zip(req_ids, vectors, strict=True):
        if vector is not None and not bool(vector.isfinite().all()):
            failed[req_id] = "The hidden states of this text are not finite: they have NaN or infinity."
        pooled.append(None if vector is None else ArrayBytes.of(vector.numpy()))
    return PooledOutput(
        step_id=step_id,
        req_ids=req_ids,
        pooled=pooled,
        errors=failed | dict(errors),
        not_finite_req_ids=list(failed),
    )


class AsyncPooled:
    """Vectors of a step, copied to the host asynchronously from construction on; `get_output` waits once.

    vectors: by request; None where the prompt is not complete.
    """

    def __init__(
        self,
        device: Device,
        step_id: int,
        req_ids: list[str],
        vectors: Sequence[Tensor | None],
        errors: Mapping[str, str],
        *,
        rank: int,
    ) -> None:
        self.step_id = step_id
        self._req_ids = req_ids
        self._errors = dict(errors)
        self._rank = rank
        self._is_there = [vector is not None for vector in vectors]
        self._copy = device.download(tuple(vector for vector in vectors if vector is not None))

    def get_output(self, timeout_s: float) -> PooledOutput:
        """The step's result. Raises WaitTimeout when the device has not delivered it within `timeout_s` seconds."""
        if not self._copy.is_done():
            wait_until(self._copy.is_done, timeout_s, lambda: self._describe_wait(timeout_s))
        tensors = iter(self._copy.tensors)
        vectors = [next(tensors) if is_there else None for is_there in self._is_there]
        return pooled_output(self.step_id, self._req_ids, vectors, self._errors)

    def _describe_wait(self, timeout_s: float) -> str:
        return (
            f"Rank {self._rank} waited {timeout_s:g} s in get_output for the device to deliver the vectors of step "
            f"{self.step_id}."
        )
