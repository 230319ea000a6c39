"""The host beside the device: what a step costs the scheduler's process, and the client's ends.

With asynchronous scheduling host and device are two clocks. The host decides step k + 1, launches
it, then waits for the result of step k and books it. So the period between two results is what
the slower of the two needs, and a launch that blocks the host shows in the period of the step
before.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol, runtime_checkable

from sim.cost.features import CostModel, StepFeatures
from sim.cost.host_speed import Speed, Steady


@dataclass(frozen=True, slots=True)
class HostTerms:
    """Times of the host in ns; all of them zero is a host that takes no time.

    A launch prepares the inputs; then a decode step's graph begins, and the host needs
    `launch_rest`. Steps with prompts need `graph_launch` in piecewise graphs, of at most
    `graph_up_to` tokens, `eager_launch` beyond: their kernels are given one by one, so the device
    ends no earlier than the launch. `launch_chunk` is for each further chunk, `launch_arrival` for
    each request that comes in meanwhile. `hand_over` and `client` lie between client and scheduler.
    A decode step behind a decode step takes `steady_share` of its launch, since its batch stays.
    `launch_spread` is that of the launches' logarithm within a run, `run_spread` between runs.
    """

    schedule: float = 0.0
    schedule_seq: float = 0.0
    schedule_admission: float = 0.0
    schedule_kilo_token: float = 0.0
    prepare: float = 0.0
    prepare_seq: float = 0.0
    launch_rest: float = 0.0
    steady_share: float = 1.0
    graph_launch: float = 0.0
    eager_launch: float = 0.0
    launch_chunk: float = 0.0
    launch_arrival: float = 0.0
    graph_up_to: float = 512.0
    update: float = 0.0
    update_seq: float = 0.0
    update_finish: float = 0.0
    update_kilo_token: float = 0.0
    between: float = 0.0
    intake: float = 0.0
    hand_over: float = 0.0
    hand_over_kilo_token: float = 0.0
    client: float = 0.0
    client_seq: float = 0.0
    launch_spread: float = 0.0
    run_spread: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= getattr(self, field.name) < 1e12:
                raise ValueError(f"host term {field.name} is negative or not finite")


class Host:
    """The host of one server; its launches vary as `speed` says."""

    def __init__(self, terms: HostTerms, speed: Speed | None = None) -> None:
        self.terms = terms
        self.between_ns, self.arrival_ns = int(terms.between), int(terms.launch_arrival)
        self._speed = speed or Steady(terms.launch_spread)
        self._is_steady = False

    def schedule_ns(self, features: StepFeatures, num_admitted: int) -> int:
        """Deciding a step."""
        terms = self.terms
        return int(
            terms.schedule
            + terms.schedule_seq * features.num_seqs
            + terms.schedule_admission * num_admitted
            + terms.schedule_kilo_token * features.num_chunk_tokens / 1e3
        )

    def prepare_ns(self, features: StepFeatures) -> int:
        """The part of the next launch before the device gets its first kernel."""
        terms = self.terms
        prepare = terms.prepare + terms.prepare_seq * features.num_seqs
        return int(prepare * self._share(features))

    def launch_ns(self, features: StepFeatures, time_ns: int) -> int:
        """Launching the next step; called once per step, in order."""
        terms, prepare_ns = self.terms, self.prepare_ns(features)
        rest = terms.launch_rest * self._share(features)
        self._is_steady = not features.chunks
        if self._is_steady:
            return prepare_ns + int(rest)
        eager = features.num_tokens > terms.graph_up_to
        launch = terms.eager_launch if eager else terms.graph_launch
        launch += terms.launch_chunk * (len(features.chunks) - 1)
        return int((prepare_ns + launch) * self._speed.factor(time_ns))

    def _share(self, features: StepFeatures) -> float:
        return 1.0 if features.chunks or not self._is_steady else self.terms.steady_share

    def update_ns(self, features: StepFeatures, num_finished: int) -> int:
        """Booking its result."""
        terms = self.terms
        return int(
            terms.update
            + terms.update_seq * features.num_sampled
            + terms.update_finish * num_finished
            + terms.update_kilo_token * features.num_chunk_tokens / 1e3
        )

    def intake_ns(self, num_added: int) -> int:
        """Taking in that many requests between two calls."""
        return int(self.terms.intake * num_added)

    def hand_over_ns(self, num_prompt_tokens: int) -> int:
        """From the client to the scheduler's process."""
        terms = self.terms
        return int(terms.hand_over + terms.hand_over_kilo_token * num_prompt_tokens / 1e3)

    def client_ns(self, num_sampled: int) -> int:
        """From the booking of a step to the client's sight of its tokens."""
        return int(self.terms.client + self.terms.client_seq * num_sampled)


@runtime_checkable
class PipelineCostModel(CostModel, Protocol):
    """A cost model whose `step_time_ns` is the device's alone, with a host beside it."""

    host: Host


NO_HOST = Host(HostTerms())
