"""Scheduler: queues, token budget, preemption and KV cache blocks. Never imports torch."""

from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from penstock.scheduler.request import Request, RequestStatus
from penstock.scheduler.scheduler import Scheduler

__all__ = ["EngineCoreOutput", "FinishReason", "Request", "RequestStatus", "Scheduler"]
