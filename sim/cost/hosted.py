"""Cost models of the device with an engine's host beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from sim.cost.features import StepFeatures
from sim.cost.host_speed import Drifting
from sim.cost.pipeline import Host, HostTerms
from sim.cost.pipeline_profile import PipelineProfile
from sim.cost.trust import Trust

# A launch goes through the layers, so its time is proportional to their number.
_PER_LAYER = ("graph_launch", "eager_launch", "launch_rest")
# A decode step behind a decode step launches faster than one behind prompts, whose launch is all
# that the profile's runs show. This share makes one stream of Qwen3-0.6B take the 1.95 ms per token
# that vLLM 0.33.0 was measured to take on an H200.
STEADY_SHARE = 0.78
# The recorder notes every entry of every step, which is part of the recorded times per sequence.
# With all of them 256 rows of Qwen3-0.6B would wait for the host; measured throughput says that
# they do not (benchmarks/records/offline_throughput.json).
SEQUENCE_SHARE = 0.5
_PER_SEQUENCE = ("schedule_seq", "prepare_seq", "update_seq")


class DeviceCost(Protocol):
    """A cost model of the device alone."""

    name: str
    trust: Trust

    def step_time_ns(self, features: StepFeatures) -> int:
        """The device's time of one step."""

    def describe(self) -> dict[str, object]:
        """Name and parameters."""


class RunDeviceCost(DeviceCost, Protocol):
    """One that times stretches of decode steps too."""

    def decode_run_ns(
        self, num_rows: int, context_sum: int, steps: int, kv_shared_tokens: int = 0
    ) -> list[int]:
        """Durations of consecutive pure decode steps."""


def host_terms(profile: PipelineProfile, num_layers: int) -> HostTerms:
    """The host of a profile's engine under a model of another depth."""
    share = num_layers / int(profile.target.model["num_layers"])
    scaled = {name: getattr(profile.host, name) * share for name in _PER_LAYER}
    scaled |= {name: getattr(profile.host, name) * SEQUENCE_SHARE for name in _PER_SEQUENCE}
    return replace(profile.host, **scaled, steady_share=STEADY_SHARE)


class OffDevice:
    """A device whose true times lie where `level` puts them in the measured error of its class.

    `level` is from 0 to 1; an unknown error is none. No time lies below the device's own limit.
    """

    def __init__(self, device: DeviceCost, level: float) -> None:
        self._device, self.name, self.trust = device, device.name, device.trust
        low, high = device.trust.step_percent or (0.0, 0.0)
        error = high + level * (low - high)
        self._scale = 100 / (100 + error)
        self._physics = getattr(device, "physics", None)

    def step_time_ns(self, features: StepFeatures) -> int:
        """The scaled time of one step."""
        time_ns = int(self._device.step_time_ns(features) * self._scale)
        if self._physics is None:
            return time_ns
        return max(time_ns, int(self._physics.floor_ns(self._physics.step_work(features))) + 1)

    def describe(self) -> dict[str, object]:
        """The device's description and the factor."""
        return {**self._device.describe(), "scale": self._scale}


class HostedCost:
    """Device and host as two clocks; one object per server, since the host's speed drifts."""

    def __init__(
        self, device: DeviceCost, profile: PipelineProfile, num_layers: int, seed: int
    ) -> None:
        self._device, self._profile, self._num_layers = device, profile, num_layers
        self.name, self.trust = device.name, device.trust
        terms, drift = host_terms(profile, num_layers), profile.drift
        speed = Drifting(terms.launch_spread, drift.memory_ms * 1e6, drift.slow_share, seed)
        self.host = Host(terms, speed)

    def step_time_ns(self, features: StepFeatures) -> int:
        """The device's time of one step."""
        return self._device.step_time_ns(features)

    def replicate(self, level: float, seed: int) -> HostedCost:
        """The same with another drawn host, and a device as far off as its class may be."""
        device = OffDevice(self._device, level)
        return HostedCost(device, self._profile, self._num_layers, seed)

    def describe(self) -> dict[str, object]:
        """The device's description and whose host it is."""
        return {**self._device.describe(), "host_of": self._profile.path}


class SerialCost:
    """Host and device one after the other, for engines without asynchronous scheduling.

    The device's model must time stretches of decode steps.
    """

    def __init__(self, device: RunDeviceCost, profile: PipelineProfile, num_layers: int) -> None:
        self._device, self._profile = device, profile
        self.name, self.trust = device.name, device.trust
        terms = host_terms(profile, num_layers)
        self._host = Host(replace(terms, launch_spread=0.0, steady_share=1.0))

    def step_time_ns(self, features: StepFeatures) -> int:
        """Deciding, launching and the device, and booking."""
        host, device_ns = self._host, self._device.step_time_ns(features)
        launched_ns = host.prepare_ns(features) + device_ns
        if features.chunks:
            launched_ns = max(launched_ns, host.launch_ns(features, 0))
        return self._around_ns(features) + launched_ns

    def decode_run_ns(
        self, num_rows: int, context_sum: int, steps: int, kv_shared_tokens: int = 0
    ) -> list[int]:
        """Durations of consecutive pure decode steps."""
        features = StepFeatures(num_rows, context_sum, (), num_rows)
        around_ns = self._around_ns(features) + self._host.prepare_ns(features)
        times = self._device.decode_run_ns(num_rows, context_sum, steps, kv_shared_tokens)
        return [time_ns + around_ns for time_ns in times]

    def _around_ns(self, features: StepFeatures) -> int:
        """Deciding and booking; who comes and goes is a small part of it and is left out."""
        host = self._host
        return host.schedule_ns(features, 0) + host.update_ns(features, 0) + host.between_ns

    def describe(self) -> dict[str, object]:
        """The device's description and whose host it is."""
        return {**self._device.describe(), "host_of": self._profile.path}
