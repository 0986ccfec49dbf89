"""Scheduling of an engine that encodes for others: requests for one token end once their items are saved."""

from __future__ import annotations

from collections import deque

from msgspec.structs import replace

from penstock.contract import RpcCall, part_of
from penstock.features.multimodal.messages import ENCODE, MediaPart
from penstock.features.multimodal.scheduling import MediaScheduling
from penstock.scheduler.outputs import RUNNING, FinishReason
from penstock.scheduler.request import Request, RequestStatus
from penstock.scheduler.services import SchedulerServices

# Reason for which such a request waits.
_ENCODER = "encoder"


def make_scheduling(services: SchedulerServices) -> MediaScheduling:
    """Scheduler side of media, by the role of the engine."""
    return (ProducerScheduling if services.config.ec_transfer.encodes_for_others else MediaScheduling)(services)


class ProducerScheduling(MediaScheduling):
    """Ends requests for one token without a step: between two steps, the workers encode the items of one of them.

    Other requests run as everywhere, also those whose items are not saved or whose prompt is to be computed.
    """

    def __init__(self, services: SchedulerServices) -> None:
        super().__init__(services)
        self._services, self._scheduler = services, services.scheduler
        self._due = deque[Request]()

    def request_added(self, request: Request) -> None:
        super().request_added(request)
        part = part_of(request.parts, MediaPart)
        is_saved = part is not None and bool(part.items) and part.has_lasting_keys and part.given_values is None
        if is_saved and request.sampling_params.max_tokens == 1 and not (request.pools or request.needs_all_of_prompt):
            self._scheduler.wait_for(request.req_id, _ENCODER)
            self._due.append(request)

    @property
    def is_polled(self) -> bool:
        return bool(self._due) and self._scheduler.rest is RUNNING

    def before_step(self) -> None:
        while self._due and self._due[0].status is RequestStatus.FINISHED:
            self._due.popleft()
        # A core that rests may have no weights.
        if not self.is_polled or self._services.has_lost_workers():
            return
        request = self._due.popleft()
        part = part_of(request.parts, MediaPart)
        assert part is not None, "requests are due for their items"
        try:
            errors = self._services.call_workers(RpcCall(ENCODE, (part.items,)))
        except Exception:
            # It runs as others do, so that a request that makes workers fail is found.
            self._scheduler.ready(request.req_id, _ENCODER)
            raise
        error = next((text for text in errors if text is not None), None)
        reason = FinishReason.LENGTH if error is None else FinishReason.ERROR
        ended = self._scheduler.finish_requests([request.req_id], reason)
        self._services.tell_ends([replace(output, error=error) for output in ended])
