"""The state machine against the kernel under both policies, async, perturbed, and the reference."""

from __future__ import annotations

from typing import cast

from engine.core.config import KernelConfig
from properties.defects.perturb import Perturbed
from properties.follower.view import Target
from properties.reference import ReferenceScheduler
from properties.search.machine import SchedulerMachine


class MixedMachine(SchedulerMachine):
    """The kernel under `mixed`."""

    policy = "mixed"


class PrefillFirstMachine(SchedulerMachine):
    """The kernel under `prefill_first`."""

    policy = "prefill_first"


class AsyncMachine(SchedulerMachine):
    """The kernel with one plan in flight while the next is decided."""

    is_async = True


def _perturbed(config: KernelConfig) -> Target:
    return cast(Target, Perturbed(config))


def _reference(config: KernelConfig) -> Target:
    return cast(Target, ReferenceScheduler(config))


class PerturbedMachine(SchedulerMachine):
    """The kernel with refused admissions, random victims, early evictions and split chunks."""

    factory = staticmethod(_perturbed)
    target = "properties.defects.perturb:Perturbed"
    perturbed = True


class ReferenceMachine(SchedulerMachine):
    """The naive reference itself: the laws must hold for it too."""

    factory = staticmethod(_reference)
    target = "properties.reference:ReferenceScheduler"


TestMixed = MixedMachine.TestCase
TestPrefillFirst = PrefillFirstMachine.TestCase
TestAsync = AsyncMachine.TestCase
TestPerturbed = PerturbedMachine.TestCase
TestReference = ReferenceMachine.TestCase
