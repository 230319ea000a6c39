"""The invariance matrix: one request through every way the kernel can serve it.

{alone, batched} x {cold, prefix hit} x {unchunked, chunked} x {undisturbed, preempted} x block
sizes x backends x policies. Every cell proves that its condition really occurred, must stay within
the bound, and says whether its logits are bitwise those of the base cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from engine.core import KernelConfig, Scheduler, StepPlan
from engine.sampler import SamplingBatch, sample
from engine.sampling_params import SamplingParams
from golden.cases import ForcedSequence, random_sequence
from golden.compare import FP32_ATOL, FP32_RTOL
from golden.forced import Events, ForcedRunner, Observed, drive
from golden.models import Reference, compare_outputs, engine_options
from golden.results import CaseResult, judged

GROUP = "invariance"
TARGET = "target"
CHUNK_BUDGET = 13  # no divisor of any block size
SEEDED = SamplingParams(temperature=1.0, seed=20_261)


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to be served."""

    backend: str
    policy: str
    block_size: int
    batched: bool = False
    prefix_hit: bool = False
    chunked: bool = False
    preempted: bool = False

    @property
    def label(self) -> str:
        """The cell's place in the table."""
        words = [self.backend, self.policy, f"block {self.block_size}"]
        words.append("batched" if self.batched else "alone")
        words.append("hit" if self.prefix_hit else "cold")
        words.append("chunked" if self.chunked else "unchunked")
        words.append("preempted" if self.preempted else "undisturbed")
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Workload:
    """The target, neighbours that arrive before it, and a primer that shares its prefix."""

    target: ForcedSequence
    neighbours: tuple[ForcedSequence, ...]
    primer: ForcedSequence

    @property
    def all_sequences(self) -> list[ForcedSequence]:
        """Every sequence, for the reference."""
        return [self.target, *self.neighbours, self.primer]


def make_workload(vocab_size: int, largest_block: int = 32) -> Workload:
    """A target longer than two of the largest blocks, so that a prefix hit is possible."""
    length = 2 * largest_block + 5
    target = random_sequence(TARGET, vocab_size, length, 19, 50)
    shared = target.prompt[: largest_block + 9]  # what is left must still need chunks
    # A few tokens before they need a further block, even of the largest size.
    # They must outlive the target's prompt, which takes longer in chunks.
    forced = max(44, largest_block // 2 - 8)
    neighbours = (
        random_sequence("older", vocab_size, largest_block - 6, forced, 51),
        random_sequence("old", vocab_size, largest_block - 5, forced, 52),
    )
    return Workload(target, neighbours, ForcedSequence("primer", (*shared, 7, 8), (9, 10)))


def cells(
    backends: Mapping[str, Sequence[int]], policies: Sequence[str] = ("mixed", "prefill_first")
) -> Iterator[Cell]:
    """All cells; `backends` maps a backend to the block sizes it is tried with.

    A request that runs alone is never preempted (LAW-L2), so those cells do not exist.
    """
    for backend, sizes in backends.items():
        for policy, size in product(policies, sizes):
            for batched, hit, chunked, preempted in product((False, True), repeat=4):
                if batched or not preempted:
                    yield Cell(backend, policy, size, batched, hit, chunked, preempted)


class Matrix:
    """Runs cells against one reference and the base cell."""

    def __init__(
        self,
        folder: Path,
        reference: Reference,
        workload: Workload,
        dtype: torch.dtype,
        device: str,
        **changes: object,
    ) -> None:
        """`changes` are engine options that hold in every cell."""
        self._changes = changes
        self._folder, self._reference, self._workload = folder, reference, workload
        self._dtype, self._device = dtype, device
        self._base: Tensor | None = None
        self._base_drawn: dict[int, int] = {}

    def run(self, cell: Cell, eager: bool = True) -> CaseResult:
        """One cell; the first one that runs becomes the base."""
        with self._start(cell, eager) as runner:
            observed = self._serve(runner, cell)
            return self._judge(runner, cell, observed)

    def target_logits(self, cell: Cell) -> tuple[Tensor, list[int], list[str]]:
        """(logits of the target where they were last computed, their positions, what is unmet)."""
        with self._start(cell, eager=True) as runner:
            target = self._serve(runner, cell)[TARGET]
            rows = target.latest()
            positions = sorted(rows)
            logits = runner.logits(target.hidden())[[rows[p] for p in positions]]
            return logits.clone(), positions, self._unmet(target.events, cell)

    def _start(self, cell: Cell, eager: bool) -> ForcedRunner:
        config = self._kernel_config(cell)
        options = engine_options(
            self._folder,
            self._dtype,
            self._device,
            attention_backend=cell.backend,
            enforce_eager=eager,
            policy=cell.policy,
            block_size=cell.block_size,
            num_kvcache_blocks=config.num_blocks,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            **self._changes,
        )
        return ForcedRunner(options, device=self._device)

    def _kernel_config(self, cell: Cell) -> KernelConfig:
        """A roomy pool, or for a preemption the largest one tried in which the kernel preempts."""
        longest = max(len(item.tokens) for item in self._workload.all_sequences)
        per_sequence = -(-longest // cell.block_size)
        roomy = 4 * per_sequence

        def with_pool(num_blocks: int) -> KernelConfig:
            return KernelConfig(
                num_blocks=num_blocks,
                max_model_len=min(longest + 1, num_blocks * cell.block_size),
                block_size=cell.block_size,
                max_num_seqs=4,
                max_num_batched_tokens=CHUNK_BUDGET if cell.chunked else 2048,
                policy=cell.policy,
                enable_prefix_caching=cell.prefix_hit,
            )

        if not cell.preempted:
            return with_pool(roomy)
        for tenths in range(30, 9, -1):
            config = with_pool(-(-per_sequence * tenths // 10))
            if not self._unmet(self._dry_run(config, cell), cell):
                return config
        raise AssertionError(f"no pool size makes the cell {cell.label} happen")

    def _dry_run(self, config: KernelConfig, cell: Cell) -> Events:
        """What the kernel will do to the target, found without a model."""
        scheduler = Scheduler(config)
        if cell.prefix_hit:
            drive(scheduler, [self._workload.primer], _compute_nothing, checked=False)
        return drive(scheduler, self._batch(cell), _compute_nothing, checked=False)[TARGET]

    def _batch(self, cell: Cell) -> list[ForcedSequence]:
        neighbours = self._workload.neighbours if cell.batched else ()
        return [*neighbours, self._workload.target]

    def _serve(self, runner: ForcedRunner, cell: Cell) -> dict[str, Observed]:
        if cell.prefix_hit:
            runner.run([self._workload.primer])
        return runner.run(self._batch(cell), SEEDED)

    def _unmet(self, events: Events, cell: Cell) -> list[str]:
        """Conditions of the cell that did not occur."""
        unmet = []
        if (events.hit_tokens > 0) != cell.prefix_hit:
            unmet.append(f"{events.hit_tokens} tokens hit")
        if (events.num_preemptions > 0) != cell.preempted:
            unmet.append(f"preempted {events.num_preemptions} times")
        if not cell.preempted and (events.num_chunks > 1) != cell.chunked:
            unmet.append(f"prompt computed in {events.num_chunks} chunks")
        return unmet

    def _judge(self, runner: ForcedRunner, cell: Cell, observed: dict[str, Observed]) -> CaseResult:
        target = observed[TARGET]
        problems = [f"condition not met: {text}" for text in self._unmet(target.events, cell)]
        greedy = {
            name: Observed(item.sequence, item.events, item.positions, item.pieces)
            for name, item in observed.items()
        }
        stats = compare_outputs(runner, greedy, self._reference, self._dtype)
        problems += stats.violations
        rows = target.latest()
        logits = runner.logits(target.hidden())
        problems += self._check_draws(logits, target)
        bitwise, distance = self._against_base(logits, rows, target, problems)
        result = judged(
            GROUP,
            f"{cell.label} ({str(self._dtype).removeprefix('torch.')})",
            problems,
            bitwise=bitwise,
            distance_to_base=distance,
            hit_tokens=target.events.hit_tokens,
            num_preemptions=target.events.num_preemptions,
        )
        return CaseResult(
            result.group, result.name, result.status, result.detail, stats, result.measured
        )

    def _check_draws(self, logits: Tensor, target: Observed) -> list[str]:
        """Seeded tokens are those that logits, seed and position give, whatever the batch."""
        rows = target.latest()
        positions = sorted(target.drawn)
        picked = logits[[rows[position] for position in positions]]
        again = self._race(picked, positions)
        wrong = []
        for place, position in enumerate(positions):
            drawn = target.drawn[position]
            if drawn == int(again[place]):
                continue
            # Heads of other batch shapes round differently, so a tie within rounding may turn.
            if not self._race_is_close(picked[place], position, drawn):
                wrong.append(position)
        return [f"the token drawn at position {wrong[0]} is not its race's winner"] if wrong else []

    def _race(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        device = logits.device
        count = len(positions)
        batch = SamplingBatch(
            temperatures=torch.ones(count, device=device),
            seeds=torch.full((count,), SEEDED.seed or 0, dtype=torch.int64, device=device),
            positions=torch.tensor(positions, device=device) + 1,
        )
        return sample(logits.contiguous(), batch)

    def _race_is_close(self, logits: Tensor, position: int, token: int) -> bool:
        """Whether a change of one token's logit by its rounding lets it win."""
        eps = 1e-5 if self._dtype == torch.float32 else 4 * torch.finfo(self._dtype).eps
        raised = logits.float().clone()
        raised[token] += eps * (1 + float(logits.float().abs().max()))
        return int(self._race(raised[None], [position])[0]) == token

    def _against_base(
        self, logits: Tensor, rows: dict[int, int], target: Observed, problems: list[str]
    ) -> tuple[str, float]:
        """("yes", "no" or "base", largest difference of a logit to the base cell)."""
        positions = sorted(rows)
        final = logits[[rows[position] for position in positions]]
        if self._base is None:
            self._base = final
            self._base_drawn = dict(target.drawn)
            return "base", 0.0
        base = self._base[positions]
        difference = (final.float() - base.float()).abs().amax(-1)
        if self._dtype == torch.float32:
            allowed = FP32_ATOL + FP32_RTOL * base.abs().amax(-1)
            if bool((difference > allowed).any()):
                problems.append(f"{float((difference / allowed).max()):.1f} x the bound off base")
            for position, token in target.drawn.items():
                if token != self._base_drawn[position] and not self._race_is_close(
                    base[positions.index(position)], position, token
                ):
                    problems.append(f"another seeded token at position {position}")
        return ("yes" if torch.equal(final, base) else "no"), float(difference.max())


def _compute_nothing(_plan: StepPlan) -> None:
    """A step of the kernel alone."""
