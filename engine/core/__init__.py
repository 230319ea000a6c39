"""The shared kernel: scheduler, block manager and the data that crosses their boundary.

Owns every scheduling decision of the engine and of the simulator. Imports the standard library
and xxhash only: no clock, no randomness, no tensors, no file.
"""

from engine.core.audit import audit
from engine.core.config import KernelConfig
from engine.core.errors import ConfigError, InputError, KernelBug, LockstepError, RequestRejected
from engine.core.fake import fake_token
from engine.core.plan import (
    Admission,
    Chunk,
    DecodeBatch,
    DecodeRun,
    Entry,
    Finished,
    KvCopy,
    NewBlocks,
    StepOutcome,
    StepPlan,
)
from engine.core.request import Request, RequestId
from engine.core.scheduler import Scheduler, SchedulerDead, StepOrderError
from engine.core.tokens import Prompt
from engine.core.views import UnknownRequest

__all__ = [
    "Admission",
    "Chunk",
    "ConfigError",
    "DecodeBatch",
    "DecodeRun",
    "Entry",
    "Finished",
    "InputError",
    "KernelBug",
    "KernelConfig",
    "KvCopy",
    "LockstepError",
    "NewBlocks",
    "Prompt",
    "Request",
    "RequestId",
    "RequestRejected",
    "Scheduler",
    "SchedulerDead",
    "StepOrderError",
    "StepOutcome",
    "StepPlan",
    "UnknownRequest",
    "audit",
    "fake_token",
]
