"""What runs next: queues, the budget of tokens, preemption, and the blocks of the KV cache. Never imports torch."""

from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from penstock.scheduler.request import Request, RequestStatus
from penstock.scheduler.scheduler import Scheduler

__all__ = ["EngineCoreOutput", "FinishReason", "Request", "RequestStatus", "Scheduler"]
