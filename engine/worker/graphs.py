"""CUDA graphs of a step: which sizes are captured, capture and replay.

A decode step is two graphs that follow each other without the host: the model (from the rows'
state on the device to their hidden states) and the sampling (LM head, draw, write-back). Steps
that need more than a temperature replay the first only. Steps with prompt chunks have graphs of
their own for the model, by their number of rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Beyond the small sizes a step of 8 keeps the padding of a 256-row batch below 3 %.
_SMALL_SIZES = (1, 2, 4)
_FINE_STEP, _FINE_LIMIT = 8, 256
_COARSE_STEP = 16
# What an H200 computes (at 600 TFLOP/s) in the 12 ms that the host takes to launch a step.
_LAUNCH_FLOP = 7_200 * 10**9
_PROMPT_SIZES = (
    *(16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896),
    *(1024, 1280, 1536, 1792, 2048),
)
# Kernel nodes and library workspaces that one captured graph keeps, beside its activations.
GRAPH_OVERHEAD_BYTES = 6 * 1024**2


def graph_batch_sizes(largest: int) -> tuple[int, ...]:
    """Batch sizes to capture for batches of 1..`largest`: the largest is one, none is above."""
    sizes = [*_SMALL_SIZES]
    sizes += range(_FINE_STEP, _FINE_LIMIT + 1, _FINE_STEP)
    sizes += range(_FINE_LIMIT + _COARSE_STEP, largest + 1, _COARSE_STEP)
    return (*[size for size in sizes if size < largest], largest)  # BUG-C08


def prompt_graph_sizes(max_num_batched_tokens: int, num_weights: int) -> tuple[int, ...]:
    """Numbers of rows of captured steps with chunks; the largest holds every step up to it.

    `num_weights` are those of the layers: they say from where on the device needs longer than the
    host, so that a graph would only add its padding.
    """
    worth_it = max(_PROMPT_SIZES[0], _LAUNCH_FLOP // (2 * num_weights))
    largest = min(max_num_batched_tokens, max(s for s in _PROMPT_SIZES if s <= worth_it))
    return (*[size for size in _PROMPT_SIZES if size < largest], largest)


def can_pad_prompts(backend_name: str, num_ranks: int) -> bool:
    """Whether steps with chunks run at padded sizes.

    Several ranks are left out because their sums have not been measured at these sizes.
    """
    return backend_name == "triton" and num_ranks == 1


def bucket_for(num_rows: int, sizes: tuple[int, ...]) -> int:
    """The smallest captured size that holds the batch."""
    return sizes[bisect_left(sizes, num_rows)]


def reserved_graph_bytes(num_graphs: int, decode_peak_bytes: int) -> int:
    """Memory to set aside for graphs that share one pool.

    The pool holds the activations of the largest graph; smaller ones reuse it.
    """
    return decode_peak_bytes + num_graphs * GRAPH_OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class _Captured:
    model: torch.cuda.CUDAGraph
    sampling: torch.cuda.CUDAGraph


class GraphPool:
    """Captures graphs that share their memory, since only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, work: Callable[[int], None], size: int) -> torch.cuda.CUDAGraph:
        """A graph of `work(size)`."""
        import torch

        # Kernels are compiled and library handles made by a run outside the capture.
        work(size)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls count: NCCL's watchdog may look at older work meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work(size)
        self._pool = self._pool or graph.pool()
        return graph


class PromptGraphs:
    """The model over padded steps with chunks, by number of rows."""

    def __init__(
        self, sizes: tuple[int, ...], run_model: Callable[[int], None], pool: GraphPool
    ) -> None:
        """As `DecodeGraphs`."""
        self._graphs = {size: pool.capture(run_model, size) for size in reversed(sizes)}

    def replay(self, num_rows: int) -> None:
        """Runs the model on a captured number of rows."""
        self._graphs[num_rows].replay()


class DecodeGraphs:
    """The captured graphs of all batch sizes."""

    def __init__(
        self,
        sizes: tuple[int, ...],
        run_model: Callable[[int], None],
        run_sampling: Callable[[int], None],
        pool: GraphPool,
    ) -> None:
        """Captures from large to small, so that small graphs reuse the large ones' memory.

        Both callables work on persistent buffers only and must leave no trace for rows that hold
        no request.
        """
        self.sizes = sizes
        self._graphs: dict[int, _Captured] = {}
        for size in reversed(sizes):
            model = pool.capture(run_model, size)
            self._graphs[size] = _Captured(model, pool.capture(run_sampling, size))

    def bucket(self, num_rows: int) -> int:
        """The captured size that a batch runs at."""
        return bucket_for(num_rows, self.sizes)

    def replay_model(self, num_rows: int) -> None:
        """Runs the model for a batch of `num_rows`."""
        self._graphs[self.bucket(num_rows)].model.replay()

    def replay_sampling(self, num_rows: int) -> None:
        """Samples `num_rows` rows."""
        self._graphs[self.bucket(num_rows)].sampling.replay()
